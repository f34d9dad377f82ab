"""The transfer: moves events from the buffer to the ordered log of their topic.

Contract: in a topic's event table, an event with a smaller id is never visible after one with a larger id was. Ids are
given out by whoever inserts, so only a transaction that holds the topic's row of `event_buffer_lock` may insert.

Buffered events are read in the order of their buffer ids, from a low-water mark on. Without one, every batch would
step over the index entries of all rows that were deleted since the last vacuum, for as long as any transaction in the
database keeps them from being removed (measured: 126,000 events/s falling to 75,000, against 140,000 flat). The mark
may pass an id only when no event with that id or a smaller one can still appear; see `_LowWater`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.database import describe, translate
from eventsql_orchestration.errors import DatabaseError, EventSQLError
from eventsql_orchestration.log.reader import MAX_OFFSET

logger = logging.getLogger(__name__)

BATCH: Final = 10_000
"""Events per transaction. Measured: 5,000 to 20,000 move at the same rate; larger ones hold the topic's lock longer."""

MAX_RETRY_DELAY: Final = 5.0
"""Seconds between two attempts at most, when the database is away or the events of a topic cannot be moved."""


class _LowWater:
    """The largest buffer id below which nothing can appear any more.

    An event's id comes from a sequence that hands its values out one by one, before its transaction commits. A
    transaction that was given an id holds `ROW EXCLUSIVE` on the buffer from before that until its end, and its end is
    visible to others before the lock goes. So: read the newest id that was given out, then list the transactions that
    hold that lock; once all of them have ended, every id up to that one is decided. A transaction that only keeps a
    snapshot open is not in the list, and does not hold the mark back. One that is prepared keeps its place in the list.

    What is known here was seen through one process of one server and is void with it: a server that crashed or failed
    over may give out ids again, and a connection pooler may put another server behind the same connection.
    """

    def __init__(self, process: str = "") -> None:
        self._process = process
        self._decided = 0
        self._candidate = 0
        self._writers: frozenset[str] | None = None
        self._moved: dict[str, int] = {}

    def holds(self, process: str, newest: int) -> bool:
        """Whether what is known still holds, as seen by this server process that knows this newest id."""
        return process == self._process and newest >= max(self._decided, self._candidate)

    def observe(self, newest: int, writers: frozenset[str]) -> None:
        """Take in the newest id and, listed after it was read, the transactions that may hold ids."""
        if self._writers is not None:
            self._writers &= writers
            if self._writers:
                return
            self._decided = self._candidate
        self._candidate, self._writers = newest, writers
        if not writers:
            self._decided, self._writers = newest, None

    @property
    def marks(self) -> dict[str, int]:
        """Per topic, the buffer id up to which all of its events are moved, for ever."""
        return self._moved

    def moved(self, topic: str, upto: int) -> None:
        """Every event of `topic` up to buffer id `upto` that was visible after the last observation is moved."""
        self._moved[topic] = max(self._moved.get(topic, 0), min(self._decided, upto))


class Transfer:
    """Moves buffered events into their topics' logs.

    Several may run at once, in any processes, and share the topics.
    """

    def __init__(self, database: Database, *, batch: int = BATCH) -> None:
        self._database = database
        self._batch = batch
        self._queries = Queries("log", database.schema)
        self._mutex = threading.Lock()
        self._connection: Connection | None = None
        self._low_water = _LowWater()

    def run_once(self, topics: Iterable[str] | None = None) -> dict[str, int]:
        """Move what is visible in the buffer now, of `topics` or of all; gives the number of events moved per topic.

        A topic that another transfer holds is left to it. Topics take turns, a batch each, so that one topic's flood
        does not keep the others waiting; one whose events cannot be moved does not either: its error is raised at the
        end. Raises `DatabaseUnavailableError`, other kinds of `DatabaseError`, `TopicNotFoundError`.
        """
        wanted = None if topics is None else list(topics)
        moved: Counter[str] = Counter()
        failed: dict[str, EventSQLError] = {}
        # Publishers that are faster than this must not keep it from ending.
        newest = None
        while True:
            newest, counts = self._round(wanted, failed, newest)
            if not counts:
                break
            moved.update(counts)
        if failed:
            raise next(iter(failed.values()))
        return dict(moved)

    def run(
        self,
        stop: threading.Event,
        *,
        polling_delay: float = 0.2,
        wake: threading.Event | None = None,
        on_moved: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        """Transfer until `stop` is set; looks again after `polling_delay` seconds, or when `wake` is set.

        A database that goes away is waited for, and so is a topic whose events cannot be moved. `on_moved` is told what
        each round moved.
        """
        wake = wake or stop
        delay = polling_delay
        failed: dict[str, EventSQLError] = {}
        retry_failed_at = 0.0
        while not stop.is_set():
            if time.monotonic() >= retry_failed_at:
                failed.clear()
                retry_failed_at = time.monotonic() + MAX_RETRY_DELAY
            counts: dict[str, int] = {}
            try:
                _, counts = self._round(None, failed, MAX_OFFSET)
                delay = polling_delay
            except DatabaseError as error:
                delay = min(delay * 2, MAX_RETRY_DELAY)
                logger.warning("the transfer waits %.1f s for the database: %s", delay, error)
            if counts:
                if on_moved is not None:
                    on_moved(counts)
            elif wake.wait(delay) and wake is not stop:
                wake.clear()

    def close(self) -> None:
        """Close the transfer's connection; the next run opens another."""
        with self._mutex:
            self._discard()

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._discard()
            self._connection = self._database.dedicated()
            # A batch of events is sorted between the buffer and the log; keep it in memory.
            self._connection.execute("SET work_mem TO '64MB'")
        return self._connection

    def _discard(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._low_water = _LowWater()

    def _round(
        self, wanted: list[str] | None, failed: dict[str, EventSQLError], newest: int | None
    ) -> tuple[int, dict[str, int]]:
        """Move a batch of each topic that has events in the buffer up to id `newest`, by default the newest there is.

        Gives that id and the events moved per topic that had any. A topic whose events cannot be moved is added to
        `failed`; the topics in there are left out.
        """
        with self._mutex:
            try:
                reused = self._connection is not None
                connection = self._open()
                try:
                    last, topics = self._look(connection, wanted)
                except psycopg.Error:
                    # The server may have restarted since the last round: nothing was asked of it in this one.
                    if not (reused and connection.closed):
                        raise
                    connection = self._open()
                    last, topics = self._look(connection, wanted)
                newest = last if newest is None else newest
                counts = {}
                for topic in topics:
                    if topic not in failed:
                        try:
                            counts[topic] = self._move(connection, topic, newest)
                        except psycopg.Error as error:
                            if connection.closed:
                                raise
                            failed[topic] = self._fault(topic, error)
                            logger.error("%s", failed[topic])
                return newest, {topic: count for topic, count in counts.items() if count}
            except psycopg.Error as error:
                self._discard()
                known = translate(error, str(self._database), self._database.schema)
                raise known or DatabaseError(f"{self._database} refused to transfer: {describe(error)}") from error
            except BaseException:
                self._discard()
                raise

    def _fault(self, topic: str, error: psycopg.Error) -> EventSQLError:
        kind = type(translate(error, str(self._database), self._database.schema) or DatabaseError())
        fault = kind(f"the events of topic {topic!r} stay in the buffer of {self._database}: {describe(error)}")
        fault.__cause__ = error
        return fault

    def _look(self, connection: Connection, wanted: list[str] | None) -> tuple[int, list[str]]:
        """The newest buffer id that was given out, and the topics with events in the buffer."""
        process, newest, topics = self._marked(connection, wanted)
        if not self._low_water.holds(process, newest):
            self._low_water = _LowWater(process)
            process, newest, topics = self._marked(connection, wanted)
        if topics:
            # The order matters: whoever drew an id up to `newest` and is not in the list has ended.
            relation = f'"{self._database.schema}".event_buffer'
            writers = connection.execute(self._queries("buffer_writers"), {"relation": relation})
            self._low_water.observe(newest, frozenset(str(writer) for (writer,) in writers))
        return newest, topics

    def _marked(self, connection: Connection, wanted: list[str] | None) -> tuple[str, int, list[str]]:
        marks = self._low_water.marks
        row = connection.execute(
            self._queries("look"), {"marked": list(marks), "low_waters": list(marks.values()), "wanted": wanted}
        ).fetchone()
        assert row is not None, "a SELECT without FROM gives a row"
        return row[0], row[1], row[2]

    def _move(self, connection: Connection, topic: str, newest: int) -> int:
        """Move one batch of `topic`; gives the number of its events, 0 when another transaction holds the topic."""
        low_water = self._low_water.marks.get(topic, 0)
        with connection.transaction():
            if connection.execute(self._queries("lock_topic"), {"topic": topic}).fetchone() is None:
                return 0
            batch = connection.execute(
                self._queries("batch_end"),
                {"topic": topic, "low_water": low_water, "newest": newest, "limit": self._batch},
                prepare=False,
            ).fetchone()
            assert batch is not None, "an aggregate gives one row"
            upto, found = batch
            moved = 0
            if found:
                moved = connection.execute(
                    self._queries("move", topic=topic),
                    {"topic": topic, "low_water": low_water, "upto": upto},
                    prepare=False,
                ).rowcount
        self._low_water.moved(topic, upto if found == self._batch else newest)
        return moved
