"""The transfer: moves events from the buffer to the ordered log of their topic, in rounds over all topics."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.database import describe
from eventsql_orchestration.errors import DatabaseError, EventSQLError, PermissionDeniedError
from eventsql_orchestration.log.reader import MAX_OFFSET
from eventsql_orchestration.log.writer import LogWriter, SmallerBatchError

logger = logging.getLogger(__name__)

MAX_RETRY_DELAY: Final = 5.0
"""Seconds between two attempts at most, when the database is away or the events of a topic cannot be moved."""

FIRST_DELAY: Final = 0.005
"""Seconds until the next look after a wake-up or a move. Doubles with each look that finds nothing, so that what a
caller's transaction publishes a little later, by a commit that nobody tells of, is found soon."""


class _Round(NamedTuple):
    """The newest buffer id of a round, the events moved per topic, and whether a smaller batch is to be tried."""

    newest: int
    moved: dict[str, int]
    again: bool


@checked
class Transfer:
    """Moves buffered events into their topics' logs.

    Several may run at once, in any processes, and share the topics.
    """

    def __init__(
        self,
        database: Database,
        *,
        batch: int | None = None,
        announce: Callable[[Iterable[str]], None] | None = None,
    ) -> None:
        """`announce` is told, after each round, the topics that events were moved of.

        `batch` fixes the events moved at a time; it follows their size and the server's speed by default.
        """
        self._database = database
        self._announce = announce or (lambda _topics: None)
        self._writer = LogWriter(database, batch=batch)

    def run_once(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> dict[str, int]:
        """Move what is visible in the buffer now, of `topics` or of all; gives the number of events moved per topic.

        A topic that another transfer holds is left to it. Topics take turns, a batch each, so that one topic's flood
        does not keep the others waiting; one whose events cannot be moved does not either: its error is raised at the
        end. A batch that fails is tried again with half as many events; `StuckEventError` names an event that fails
        alone. Of topics that do not exist there is nothing to move. From `deadline` on, a time of `time.monotonic`, no
        further round begins. Raises `DatabaseUnavailableError`, `SequenceError` and other kinds of `DatabaseError`.
        """
        wanted = None if topics is None else list(topics)
        moved: Counter[str] = Counter()
        failed: dict[str, EventSQLError] = {}
        # Publishers that are faster than this must not keep it from ending.
        newest = None
        while deadline is None or time.monotonic() < deadline:
            newest, counts, again = self._round(wanted, failed, newest)
            moved.update(counts)
            if not counts and not again:
                break
        if failed:
            raise next(iter(failed.values()))
        return dict(moved)

    def run(
        self,
        stop: threading.Event,
        *,
        polling_delay: float | Callable[[], float] = 0.2,
        wake: threading.Event | None = None,
        on_moved: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        """Transfer until `stop` is set; looks again after `polling_delay` seconds, or when `wake` is set.

        After a wake-up, and after a round that moved something, it looks sooner, and slows down. A database that goes
        away is waited for, and so is a topic whose events cannot be moved. `on_moved` is told what each round moved.
        """
        wake = wake or stop
        delay = 0.0
        failed: dict[str, EventSQLError] = {}
        retry_failed_at = 0.0
        while not stop.is_set():
            if time.monotonic() >= retry_failed_at:
                failed.clear()
                retry_failed_at = time.monotonic() + MAX_RETRY_DELAY
            longest = polling_delay() if callable(polling_delay) else polling_delay
            delay = delay or min(FIRST_DELAY, longest)
            try:
                _, counts, again = self._round(None, failed, MAX_OFFSET)
            except DatabaseError as error:
                longest = max(longest, MAX_RETRY_DELAY)
                logger.warning("the transfer waits %.2g s for the database: %s", delay, error)
                # Not for a wake-up: each publication would make an attempt.
                stop.wait(delay)
                delay = min(delay * 2, longest)
                continue
            if counts and on_moved is not None:
                on_moved(counts)
            if counts or again:
                delay = 0.0
            elif not wake.wait(delay):
                delay = min(delay * 2, longest)
            elif wake is not stop:
                wake.clear()
                delay = 0.0

    def close(self) -> None:
        """Close the transfer's connection; the next run opens another."""
        self._writer.close()

    def _round(self, wanted: list[str] | None, failed: dict[str, EventSQLError], newest: int | None) -> _Round:
        """Move a batch of each topic that has events in the buffer up to id `newest`, by default the newest there is.

        A topic whose events cannot be moved is added to `failed`; the topics in there are left out.
        """
        counts: dict[str, int | None] = {}
        again = False
        try:
            with self._writer.session():
                last, topics = self._writer.look(wanted)
                newest = last if newest is None else newest
                for topic in topics:
                    if topic in failed:
                        continue
                    try:
                        counts[topic] = self._writer.move(topic, newest)
                    except SmallerBatchError as error:
                        logger.info("the next batch is smaller: %s", error)
                        again = True
                    except (psycopg.Error, DatabaseError) as error:
                        if self._writer.broken:
                            raise
                        failed[topic] = self._fault(topic, error)
                        logger.error("%s", failed[topic])
        except psycopg.Error as error:
            raise self._database.meaning(error) from error
        moved = {topic: count for topic, count in counts.items() if count}
        if moved:
            self._announce(moved)
        return _Round(newest, moved, again)

    def _fault(self, topic: str, error: psycopg.Error | DatabaseError) -> EventSQLError:
        if isinstance(error, DatabaseError):
            return error
        known = self._database.meaning(error)
        # A right that is missing is named with the role that has it.
        why = str(known) if isinstance(known, PermissionDeniedError) else describe(error)
        fault = type(known)(f"the events of topic {topic!r} stay in the buffer of {self._database}: {why}")
        fault.__cause__ = error
        return fault
