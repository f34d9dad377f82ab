"""Readings of a database that many scrapers share: one at a time, and none more often than an interval."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.threads import start_thread

logger = logging.getLogger(__name__)

FiguresT = TypeVar("FiguresT")

REST: Final = 9.0
"""After a reading, the database rests for at least this multiple of the reading's time: reading takes 10 % at most."""

MOST_REST: Final = 300.0
"""The longest rest in seconds. A reading that waited for a lock took the database no time, and its figures get old."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[FiguresT]):
    """One reading: its figures, or None if it failed; when it ended, by `time.monotonic`, and its seconds."""

    figures: FiguresT | None
    ended: float
    seconds: float


class Readings(Generic[FiguresT]):
    """The latest reading of one database.

    A reading runs in a thread of its own, so a scraper that waits for a database may give up at any time. One reading
    at a time calls `read`.
    """

    def __init__(
        self, name: str, read: Callable[[], FiguresT], *, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._read = read
        self._interval = interval
        self._clock = clock
        self._latest: Reading[FiguresT] | None = None
        self._failure: str | None = None
        self._after_fork()
        after_fork(self, Readings._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. A reading under way is the parent's."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reading = False

    def begin(self) -> None:
        """Begin a reading, if none is under way and the latest reading is too old."""
        with self._lock:
            if self._reading or self._is_fresh():
                return
            # First: if no thread can be started, the next scrape tries again.
            start_thread("metrics", self._run)
            self._reading = True

    def latest(self, seconds: float) -> Reading[FiguresT] | None:
        """The reading that is under way, or the latest; None if that takes longer than `seconds`."""
        with self._lock:
            self._changed.wait_for(lambda: not self._reading, max(0.0, seconds))
            return None if self._reading else self._latest

    def _is_fresh(self) -> bool:
        last = self._latest
        if last is None:
            return False
        # A reading that failed has mostly waited for a database that did not answer.
        rest = 0.0 if last.figures is None else min(REST * last.seconds, MOST_REST)
        return self._clock() - last.ended < max(self._interval, rest)

    def _run(self) -> None:
        began, figures = self._clock(), None
        try:
            figures = self._figures()
        finally:
            ended = self._clock()
            with self._lock:
                self._latest, self._reading = Reading(figures, ended, ended - began), False
                self._changed.notify_all()

    def _figures(self) -> FiguresT | None:
        try:
            found = self._read()
        except EventSQLError as error:
            # Once for each outage: the metric `eventsql_up` says that it lasts.
            if self._failure is None:
                logger.warning("metrics of %s cannot be read: %s", self._name, error)
            self._failure = str(error)
            return None
        if self._failure is not None:
            logger.warning("metrics of %s can be read again", self._name)
        self._failure = None
        return found
