"""The transfer: moves events from the buffer to the ordered log of their topic.

Contract: in a topic's event table, an event with a smaller id is never visible after one with a larger id was. Ids are
given out by whoever inserts, so only a transaction that holds the topic's row of `event_buffer_lock` may insert.

Buffered events are read in the order of their buffer ids, from a low-water mark on. Without one, every batch would step
over the index entries of all rows that were deleted since the last vacuum, for as long as any transaction in the database
keeps them from being removed (measured: 126,000 events/s falling to 75,000, against 140,000 flat). The mark may pass an
id only when no event with that id or a smaller one can still appear; see `_LowWater`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import DatabaseUnavailableError

logger = logging.getLogger(__name__)

BATCH: Final = 10_000
"""Events per transaction. Measured: 5,000 to 20,000 move at the same rate; larger ones hold the topic's lock longer."""

MAX_RECONNECT_DELAY: Final = 5.0


class _LowWater:
    """The largest buffer id below which nothing can appear any more.

    An event's id comes from a sequence, before its transaction commits. A transaction that was given an id holds
    `ROW EXCLUSIVE` on the buffer from before that until its end. So: read the newest id that was given out, then list
    the transactions that hold that lock; once all of them have ended, every id up to that one is decided. A transaction
    that only keeps a snapshot open is not in the list, and does not hold the mark back.

    What is known here holds for one connection to one server: a server that failed over may give out ids again.
    """

    def __init__(self) -> None:
        self.decided = 0
        self._candidate = 0
        self._writers: frozenset[str] | None = None
        self._moved: dict[str, int] = {}

    def observe(self, last_id: int, writers: frozenset[str]) -> None:
        """Take in the newest id and, listed after it was read, the transactions that may hold ids."""
        if self._writers is not None:
            self._writers &= writers
            if self._writers:
                return
            self.decided = self._candidate
        self._candidate, self._writers = last_id, writers
        if not writers:
            self.decided, self._writers = last_id, None

    def of(self, topic: str) -> int:
        return self._moved.get(topic, 0)

    def moved(self, topic: str, upto: int | None) -> None:
        """Every visible event of `topic` up to buffer id `upto` is moved; None: every one that is visible."""
        mark = self.decided if upto is None else min(self.decided, upto)
        self._moved[topic] = max(self.of(topic), mark)


class Transfer:
    """Moves buffered events into their topics' logs. Several may run at once, in any processes, and share the topics."""

    def __init__(self, database: Database, *, batch: int = BATCH) -> None:
        self._database = database
        self._batch = batch
        self._queries = Queries("log", database.schema)
        self._mutex = threading.Lock()
        self._connection: Connection | None = None
        self._low_water = _LowWater()

    def run_once(self, topics: Iterable[str] | None = None) -> dict[str, int]:
        """Move what is visible in the buffer now, of `topics` or of all; gives the number of events moved per topic.

        A topic that another transfer holds is left to it. Topics take turns, a batch each, so that one topic's flood does
        not keep the others waiting. Raises `DatabaseUnavailableError`.
        """
        wanted = None if topics is None else frozenset(topics)
        moved: dict[str, int] = {}
        with self._mutex, self._database.errors():
            try:
                connection = self._open()
                while True:
                    counts = {topic: self._move(connection, topic) for topic in self._waiting(connection, wanted)}
                    for topic, count in counts.items():
                        if count:
                            moved[topic] = moved.get(topic, 0) + count
                    if not any(counts.values()):
                        return moved
            except psycopg.OperationalError:
                self._discard()
                raise

    def run(
        self,
        stop: threading.Event,
        *,
        polling_delay: float = 0.2,
        wake: threading.Event | None = None,
        on_moved: Callable[[dict[str, int]], None] | None = None,
    ) -> None:
        """Transfer until `stop` is set; looks again after `polling_delay` seconds, or when `wake` is set.

        A database that goes away is waited for. `on_moved` is told what each round moved.
        """
        wake = wake or stop
        delay = polling_delay
        while not stop.is_set():
            try:
                moved = self.run_once()
                delay = polling_delay
                if moved and on_moved is not None:
                    on_moved(moved)
            except DatabaseUnavailableError as error:
                logger.warning("the transfer waits %.1f s for the database: %s", delay, error)
                delay = min(delay * 2, MAX_RECONNECT_DELAY)
            if wake.wait(delay) and wake is not stop:
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

    def _waiting(self, connection: Connection, wanted: frozenset[str] | None) -> list[str]:
        lockable = [name for (name,) in connection.execute(self._queries("lockable_topics"))]
        topics = [name for name in lockable if wanted is None or name in wanted]
        waiting = connection.execute(
            self._queries("buffered_topics"),
            {"topics": topics, "low_waters": [self._low_water.of(topic) for topic in topics]},
        ).fetchall()
        if waiting:
            self._observe(connection)
        return [topic for (topic,) in waiting]

    def _observe(self, connection: Connection) -> None:
        last_id = connection.execute(self._queries("last_buffered_id")).fetchone()
        assert last_id is not None, "a sequence has one row"
        relation = f'"{self._database.schema}".event_buffer'
        writers = connection.execute(self._queries("buffer_writers"), {"relation": relation})
        self._low_water.observe(int(last_id[0]), frozenset(str(writer) for (writer,) in writers))

    def _move(self, connection: Connection, topic: str) -> int:
        """Move one batch of `topic`; gives the number of its events, 0 when another transaction holds the topic."""
        low_water = self._low_water.of(topic)
        with connection.transaction():
            if connection.execute(self._queries("lock_topic"), {"topic": topic}).fetchone() is None:
                return 0
            batch = connection.execute(
                self._queries("batch_end"), {"topic": topic, "low_water": low_water, "limit": self._batch}
            ).fetchone()
            assert batch is not None, "an aggregate gives one row"
            upto, found = batch
            moved = 0
            if found:
                moved = connection.execute(
                    self._queries("move", topic=topic), {"topic": topic, "low_water": low_water, "upto": upto}
                ).rowcount
        self._low_water.moved(topic, upto if found == self._batch else None)
        return moved
