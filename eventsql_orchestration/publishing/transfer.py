"""The transfer: moves events from the buffer to the ordered logs, in rounds over all topics."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import DatabaseError, EventSQLError, PermissionDeniedError, ValidationError
from eventsql_orchestration.publishing.log_writer import LogWriter, SmallerBatchError
from eventsql_orchestration.storage.reading import MAX_OFFSET
from eventsql_orchestration.threads import after_commit, log_recovery
from eventsql_orchestration.validation import Duration, in_seconds

logger = logging.getLogger(__name__)

MAX_RETRY_DELAY: Final = 5.0
"""The most seconds between two attempts if the database is down or a topic's events cannot be moved."""

FIRST_DELAY: Final = 0.005
"""Seconds until the next look for events whose commit nobody announces. Doubles with each look that finds nothing."""


Announce: TypeAlias = Callable[[Iterable[str]], None]
"""A function that is called with topics whose consumers have something new to read."""


Delay: TypeAlias = Duration | Callable[[], float]
"""Seconds, or a function that gives them."""

OnMoved: TypeAlias = Callable[[dict[str, int]], None]
"""Takes the number of moved events by topic."""


class _Round(NamedTuple):
    """The newest buffer id of a round, whether more events wait or a smaller batch is to be tried, and whether another
    transfer held a topic.
    """

    newest: int
    again: bool
    held: bool


@checked
class Transfer:
    """Moves buffered events into the logs of their topics.

    Several may run at once, in any processes. They share the topics.
    """

    def __init__(
        self, database: Database, *, batch: int | None = None, announce: Announce = lambda _topics: None
    ) -> None:
        """`announce` is called after each round with the topics whose events were moved.

        `batch` fixes the number of events moved at a time; the default follows their size and the server's speed.
        """
        self._database = database
        self._announce = after_commit(announce)
        self._writer = LogWriter(database, batch=batch)
        self._suspected: set[str] = set()
        """Topics whose batch lost the connection. They come last: the batch itself may have ended the session."""
        self._logged: dict[str, str] = {}
        """The last error of each topic whose events cannot be moved."""

    def run_once(
        self, topics: Iterable[str] | None = None, *, deadline: float | None = None, retry_held: bool = False
    ) -> dict[str, int]:
        """Move the events visible in the buffer now. See `ClusterTransfer.run_once`.

        No round begins after `deadline`, a time of `time.monotonic`. With `retry_held`, a topic that another transfer
        holds is tried again until `deadline`, instead of being left to that transfer.
        """
        wanted = None if topics is None else list(topics)
        moved: Counter[str] = Counter()
        failed: dict[str, EventSQLError] = {}
        # One bound for all rounds: fast publishers must not keep this from ending.
        newest = None
        while deadline is None or time.monotonic() < deadline:
            counts: dict[str, int] = {}
            newest, again, held = self._round(wanted, failed, newest, counts)
            moved.update(counts)
            if counts or again:
                continue
            if not (held and retry_held):
                break
            time.sleep(FIRST_DELAY)
        if failed:
            raise next(iter(failed.values()))
        return dict(moved)

    def run(
        self, stop: threading.Event,
        *, polling_delay: Delay = 0.2, wake: threading.Event | None = None, uncommitted: threading.Event | None = None,
        on_moved: OnMoved | None = None,
    ) -> None:  # fmt: skip
        """Transfer until `stop` is set, also when `wake` is set. See `ClusterTransfer.run`.

        `uncommitted` is set before `wake` if the transaction of new events may still be open: nobody announces its
        commit, so this looks again soon, and then slows down. It does so too after a look without a wake-up
        that finds events, and while another transfer holds a topic.
        """
        wake = wake or stop
        polling_delay = polling_delay if callable(polling_delay) else in_seconds(polling_delay)
        woken = False
        delay = pause = FIRST_DELAY
        fault: str | None = None
        failed: dict[str, EventSQLError] = {}
        retry_failed_at = 0.0
        while not stop.is_set():
            if time.monotonic() >= retry_failed_at:
                failed.clear()
                retry_failed_at = time.monotonic() + MAX_RETRY_DELAY
            longest = polling_delay() if callable(polling_delay) else polling_delay
            counts: dict[str, int] = {}
            try:
                _, again, held = self._round(None, failed, MAX_OFFSET, counts)
            except DatabaseError as error:
                if str(error) != fault:
                    fault = str(error)
                    logger.warning("the transfer waits for the database: %s", error)
                # Ignore wake-ups: otherwise each publication would cause an attempt.
                stop.wait(pause)
                pause = min(pause * 2, max(longest, MAX_RETRY_DELAY))
                continue
            finally:
                # Also the events that were moved before the connection broke.
                if counts and on_moved is not None:
                    on_moved(counts)
            if fault is not None:
                log_recovery(logger, "the transfer goes on with %s", self._database)
                pause, fault = FIRST_DELAY, None
            if again:
                continue
            if (woken and held) or (counts and not woken):
                delay = FIRST_DELAY
            delay = min(delay, longest)
            woken = wake.wait(delay)
            if not woken:
                delay = min(delay * 2, longest)
            elif wake is not stop:
                wake.clear()
                if uncommitted is not None and uncommitted.is_set():
                    uncommitted.clear()
                    delay = FIRST_DELAY

    def close(self) -> None:
        """Close the transfer's connection; the next run opens another."""
        self._writer.close()

    def _round(
        self, wanted: list[str] | None, failed: dict[str, EventSQLError], newest: int | None, moved: dict[str, int]
    ) -> _Round:
        """Move one batch of each topic with events up to buffer id `newest`, by default the newest id.

        Skips the topics in `failed`, and adds each topic whose events cannot be moved. `moved` gets the number of moved
        events by topic, also if the connection breaks afterwards.
        """
        counts: dict[str, int | None] = {}
        again = False
        try:
            with self._writer.session():
                last, topics = self._writer.look(wanted)
                newest = last if newest is None else newest
                if wanted is None:
                    # Another transfer may have moved the events of a topic, or the topic is deleted.
                    self._logged = {topic: error for topic, error in self._logged.items() if topic in topics}
                for topic in sorted(topics, key=self._suspected.__contains__):
                    if topic in failed:
                        continue
                    try:
                        counts[topic] = self._writer.move(topic, newest)
                        again = again or self._writer.more
                        self._suspected.discard(topic)
                        if counts[topic] and self._logged.pop(topic, None):
                            log_recovery(logger, "the transfer of topic %r goes on with %s", topic, self._database)
                    except SmallerBatchError as error:
                        logger.info("the next batch is smaller, because this one failed: %s", error)
                        again = True
                    except (psycopg.Error, DatabaseError) as error:
                        if self._writer.broken:
                            self._suspected.add(topic)
                            raise
                        failed[topic] = self._fault(topic, error)
                        # An error that lasts is one line.
                        lasts = str(failed[topic]) == self._logged.get(topic)
                        self._logged[topic] = str(failed[topic])
                        logger.log(logging.DEBUG if lasts else logging.ERROR, "%s", failed[topic])
        finally:
            # Also the topics that were moved before the connection broke.
            moved.update({topic: count for topic, count in counts.items() if count})
            if moved:
                self._announce(moved)
        return _Round(newest, again, held=None in counts.values())

    def _fault(self, topic: str, error: psycopg.Error | DatabaseError) -> EventSQLError:
        if isinstance(error, DatabaseError):
            return error
        known = self._database.meaning(error)
        # The error for a missing right names the role that has it.
        why = str(known) if isinstance(known, PermissionDeniedError) else describe(error)
        # A value of the events is at fault, and not a value that the transfer was given.
        kind = DatabaseError if isinstance(known, ValidationError) else type(known)
        fault = kind(f"the events of topic {topic!r} stay in the buffer of {self._database}: {why}")
        fault.__cause__ = error
        return fault
