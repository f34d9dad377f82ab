"""Writing to a topic's ordered log: as its one writer, for as long as a transaction holds the topic.

Contract: in a topic's event table, an event with a smaller id is never visible after one with a larger id was. Ids are
given out by whoever inserts, so only a transaction that holds the topic's row of `event_buffer_lock` may insert.

Buffered events are read in the order of their buffer ids, from a low-water mark on. Without one, every batch would
step over the index entries of all rows that were deleted since the last vacuum, for as long as any transaction in the
database keeps them from being removed (measured: 126,000 events/s falling to 75,000, against 140,000 flat). The mark
may pass an id only when no event with that id or a smaller one can still appear; see `_LowWater`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries, is_pooled, tables
from eventsql_orchestration.database.database import describe
from eventsql_orchestration.errors import StuckEventError
from eventsql_orchestration.log import encoding, segments, sequences
from eventsql_orchestration.log.block_moves import BlockMoves
from eventsql_orchestration.log.load import too_much
from eventsql_orchestration.log.reader import MAX_OFFSET
from eventsql_orchestration.model import Topic

FIRST_BATCH: Final = 1_000
LEAST_BATCH: Final = 100
MOST_BATCH: Final = 20_000
"""Events that are moved in one transaction. Measured: 3,000 to 30,000 move at the same rate. Only a batch that failed
makes the next ones smaller than the least."""

BATCH_SECONDS: Final = 0.2
"""How long a transaction should hold its topic: batches shrink where events are large or the server is slow."""

LOOK_SECONDS: Final = 0.5
"""How often a publisher that appends takes note of what is decided in the buffer."""

OBSERVE_SECONDS: Final = 0.05
"""How often, at most, the transactions that may have written to the buffer are listed: what is not decided yet costs
nothing but a step over entries that are dead already."""

MOST_BUFFERED: Final = 10_000
"""Events in the buffer that a publisher moves before its own; where there are more, the transfer is behind."""

LOCK_TIMEOUT: Final = 0.25
"""Seconds that a publisher waits for other threads of its process, and then for a topic, before its batch goes to the
buffer: who waits writes each event once, who turns to the buffer makes whoever holds the topic move it. Measured with
four publishers of batches of 5,000: as fast together as one alone."""

ROOM_CHECK: Final = 500_000
"""After how many events a writer looks whether there are segments ahead; far fewer than are kept ahead."""

_POSTGRESQL_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_OF_EVENTS: Final = ("22", "23", "44", "P0", "XX")
"""SQLSTATE classes of data, constraints, views' checks, triggers and faults of the server: one event may cause them."""


class SmallerBatchError(Exception):
    """Internal: a batch could not be moved, and the next one of its topic has fewer events."""


class _BufferStuckError(Exception):
    """Internal: what lies in the buffer could not be moved by a publisher; the transfer has to."""


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


class LogWriter:
    """Becomes a topic's one writer for a transaction at a time: moves what is buffered, appends what is handed to it.

    Has a connection of its own, opened at first use. Its methods are called in the block of a `session()`.
    """

    def __init__(self, database: Database, *, batch: int | None = None, lock_timeout: float | None = None) -> None:
        """`batch` fixes the number of events moved at a time; it follows their size and the server's speed by default.

        `lock_timeout` is how long `append` waits for a topic, in seconds.
        """
        self._database = database
        self._fixed_batch = batch
        # Per topic: the events of one must not make the batches of another small.
        self._batches: dict[str, int] = {}
        # The number of events in the batch that is being moved, and the buffer id of its last one where that is known.
        self._tried: tuple[int, int | None] | None = None
        self._lock_timeout = lock_timeout
        self._queries = Queries("log", database.schema)
        self._blocks = BlockMoves(database.schema)
        self._connection: Connection | None = None
        self._low_water = _LowWater()
        self._looked_at = 0.0
        self._observed_at = 0.0
        self._room: dict[str, int] = {}
        self._zoned: dict[str, bool] = {}
        self._ids = sequences.Ids(database.schema)
        self._refused: set[str] = set()
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        with self._mutex:
            self._discard()

    def _open(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._discard()
            self._connection = self._database.dedicated()
            if not is_pooled(self._connection):
                self._set_limits(self._connection)
        return self._connection

    def _set_limits(self, connection: Connection) -> None:
        """For the session, or for the transaction in one."""
        local = is_pooled(connection)
        # A batch of events is sorted between the buffer and the log; keep it in memory.
        connection.execute("SELECT pg_catalog.set_config('work_mem', '64MB', %s)", [local])
        if self._lock_timeout is not None:
            connection.execute(
                "SELECT pg_catalog.set_config('lock_timeout', %s, %s)", [f"{round(self._lock_timeout * 1000)}ms", local]
            )

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[None]:
        with connection.transaction():
            if is_pooled(connection):
                # What a session keeps would be everybody's.
                self._set_limits(connection)
            yield

    def _discard(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._low_water = _LowWater()
        self._looked_at = self._observed_at = 0.0
        # Another server may answer the next one, with sequences of its own.
        self._room.clear()

    @contextmanager
    def session(self, *, timeout: float = -1) -> Iterator[bool]:
        """The block has the writer for itself, or False where another thread keeps it for `timeout` seconds.

        What goes wrong in the block ends the connection, and is an error of ours where it is known what it means.
        """
        if not self._mutex.acquire(timeout=timeout):
            yield False
            return
        try:
            with self._database.errors():
                yield True
        except BaseException:
            self._discard()
            raise
        finally:
            self._mutex.release()

    def may_append(self, topic: str) -> bool:
        """Whether the current role may write to logs, and was not refused that of `topic` before."""
        return topic not in self._refused and self._database.may_transfer

    @property
    def broken(self) -> bool:
        """Whether the connection is gone."""
        return self._connection is None or self._connection.closed

    def look(self, wanted: list[str] | None) -> tuple[int, list[str]]:
        """The newest buffer id that was given out, and the topics with events in the buffer, of `wanted` or of all."""
        reused = self._connection is not None
        try:
            return self._look(self._open(), wanted)
        except psycopg.Error:
            # The server may have restarted since the last time: nothing was asked of it in this one.
            if not (reused and self.broken):
                raise
            return self._look(self._open(), wanted)

    def _look(self, connection: Connection, wanted: list[str] | None) -> tuple[int, list[str]]:
        process, newest, topics = self._marked(connection, wanted)
        # Through a pooler, a server that crashes and gives ids out again between two transactions goes unnoticed.
        known_server = not is_pooled(connection)
        if not self._low_water.holds(process, newest):
            self._low_water = _LowWater(process)
            self._observed_at = 0.0
            if known_server:
                sequences.advance_buffer(connection, self._database.schema)
            process, newest, topics = self._marked(connection, wanted)
        if topics and known_server and time.monotonic() - self._observed_at >= OBSERVE_SECONDS:
            self._observed_at = time.monotonic()
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
        process, newest, topics, in_order = row
        if not in_order:
            sequences.check(connection, self._database.schema, tables.event_buffer.name)
        return process, newest, topics

    def move(self, topic: str, newest: int) -> int | None:
        """Move one batch of `topic`, up to buffer id `newest`, in a transaction of its own.

        Gives the number of its events, None when another transaction holds the topic. Raises `SmallerBatchError` where
        the batch failed and a smaller one is to be tried, `StuckEventError` where it failed with a single event.
        """
        self._tried = None
        try:
            return self._move_with_room(topic, newest)
        except psycopg.Error as error:
            self._shrink(topic, error)
            raise

    def _move_with_room(self, topic: str, newest: int) -> int | None:
        try:
            return self._move_batch(topic, newest)
        except psycopg.errors.CheckViolation as error:
            # Another writer, which knows nothing of segments, has used up the room; it is made by the second attempt.
            if error.diag.constraint_name == segments.ADOPTION_CHECK:
                segments.give_adoption_up(self._open(), self._database.schema, topic)
            return self._move_batch(topic, newest)

    def _move_batch(self, topic: str, newest: int) -> int | None:
        connection = self._open()
        limit = min(self._batches.get(topic, self._fixed_batch or FIRST_BATCH), self._fixed_batch or MOST_BATCH)
        started = time.monotonic()
        with self._room_for(topic), self._transaction(connection):
            if connection.execute(self._queries("lock_topic"), {"topic": topic}).fetchone() is None:
                return None
            self._tried = limit, None
            batch = connection.execute(
                self._queries("batch_end"),
                {
                    "topic": topic,
                    "low_water": self._low_water.marks.get(topic, 0),
                    "newest": newest,
                    "limit": limit,
                },
                prepare=False,
            ).fetchone()
            assert batch is not None, "an aggregate gives one row"
            upto, found, definition, block, last_id = batch
            self._tried = None
            if found:
                self._make_room(connection, topic, last_id)
                self._tried = found, upto
            last = upto if block is None else block - 1
            moved = self._move(connection, topic, last, definition) if found else 0
            if block is not None:
                moved += self._move_block(connection, topic, block)
        if block is not None:
            self._low_water.moved(topic, block)
            return moved
        self._low_water.moved(topic, upto if found == limit else newest)
        if found == limit:
            self._fit_batch(topic, limit, time.monotonic() - started)
        return moved

    def _move(self, connection: Connection, topic: str, upto: int, definition: list[int]) -> int:
        partitions, layout = definition
        # Only a publisher that knows nothing of layouts may have written by one that is past.
        moved = connection.execute(
            self._queries("move" if layout == 1 else "move_into_layout", topic=topic),
            {
                "topic": topic,
                "low_water": self._low_water.marks.get(topic, 0),
                "upto": upto,
                "partitions": partitions,
            },
            prepare=False,
        ).rowcount
        self._drew(topic, moved)
        return moved

    def _move_block(self, connection: Connection, topic: str, block: int) -> int:
        moved = self._blocks.move(connection, topic, block, zoned=self._zoned[topic])
        self._drew(topic, moved)
        return moved

    def _shrink(self, topic: str, error: psycopg.Error) -> None:
        """Have fewer events in the next batch of a topic, where `error` may come from those in this one.

        Raises as `move`; returns where the error has another cause, or the connection is gone.
        """
        lost = self.broken
        if self._tried is None or not (lost or too_much(error) or (error.sqlstate or "").startswith(_OF_EVENTS)):
            return
        events, upto = self._tried
        # A server that runs out of memory takes the connection with it.
        self._batches[topic] = max(1, events // 2)
        if lost:
            return
        if events > 1:
            raise SmallerBatchError(f"{events:,} events of topic {topic!r} at once: {describe(error)}") from error
        if upto is not None:
            raise self._stuck(topic, upto, error) from error

    def _stuck(self, topic: str, buffer_id: int, error: psycopg.Error) -> StuckEventError:
        size, events = None, None
        with suppress(psycopg.Error):
            row = self._open().execute(self._queries("buffered_size"), {"id": buffer_id}).fetchone()
            size, events = row or (None, None)
        what = f"event {buffer_id}" if events is None else f"block {buffer_id} of {events:,} events"
        return StuckEventError(
            f"the events of topic {topic!r} stay in the buffer of {self._database}, from {what} on, which cannot be "
            f"moved even alone{'' if size is None else f' ({size:,} bytes)'}: {describe(error)}",
            topic=topic, buffer_id=buffer_id, size=size,
        )  # fmt: skip

    def _fit_batch(self, topic: str, size: int, seconds: float) -> None:
        """Adapt the size of a topic's batches to how long a full one took."""
        if seconds < BATCH_SECONDS / 2:
            size = min(size * 2, self._fixed_batch or MOST_BATCH)
        elif seconds > BATCH_SECONDS and self._fixed_batch is None:
            size = max(min(size, LEAST_BATCH), size // 2)
        self._batches[topic] = size

    def append(self, topic: Topic, events: Iterable[Sequence[bytes]]) -> bool:
        """Append encoded events to the topic's log, after what lies in its buffer, in a transaction of its own.

        They come in parts, which are asked for one by one while the topic is held. Where one cannot be had, nothing is
        appended.

        False, and nothing done, where they must go to the buffer instead: another transaction keeps the topic for too
        long, too much lies in the buffer, the topic is not defined like `topic` any more, or its log has times without
        a time zone, which the server must convert (EventSQL's Java library makes such tables).
        """
        # What is decided need not be known to the last event; without events in the buffer it makes no difference.
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self.look([topic.name])
            self._looked_at = time.monotonic()
        connection = self._open()
        try:
            with self._room_for(topic.name), self._transaction(connection):
                appended = self._append(connection, topic, events)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.CheckViolation, psycopg.errors.UniqueViolation):
            return False
        except (psycopg.errors.QueryCanceled, _BufferStuckError):
            # Nothing was appended: the buffer may take the batch yet.
            return False
        except psycopg.errors.InsufficientPrivilege:
            # The transfer says so, where it may not either.
            self._refused.add(topic.name)
            return False
        if appended:
            self._low_water.moved(topic.name, MAX_OFFSET)
        return appended

    def _append(self, connection: Connection, topic: Topic, events: Iterable[Sequence[bytes]]) -> bool:
        if connection.execute(self._queries("await_topic"), {"topic": topic.name}).fetchone() is None:
            return False
        # After the lock: what its last holder did is seen, and the topic cannot be redefined any more.
        most = min(self._batches.get(topic.name, MOST_BUFFERED), MOST_BUFFERED)
        row = connection.execute(
            self._queries("append_state"),
            {
                "topic": topic.name,
                "low_water": self._low_water.marks.get(topic.name, 0),
                "limit": most + 1,
            },
            prepare=False,
        ).fetchone()
        assert row is not None, "an aggregate gives one row"
        definition, now, upto, found, last_id = row
        if definition != [topic.partitions, topic.layout] or found > most:
            return False
        self._make_room(connection, topic.name, last_id)
        if not self._zoned[topic.name]:
            return False
        if found:
            self._move_before(connection, topic.name, upto, definition, found)
        prefix = encoding.log_prefix((now - _POSTGRESQL_EPOCH) // timedelta(microseconds=1))
        with connection.cursor().copy(self._queries("append", topic=topic.name)) as copy:
            copy.write(encoding.HEADER)
            for part in events:
                copy.write(prefix + prefix.join(part))
                self._drew(topic.name, len(part))
            copy.write(encoding.TRAILER)
        return True

    def _move_before(self, connection: Connection, topic: str, upto: int, definition: list[int], found: int) -> None:
        """Move the `found` events that lie in the buffer, before a publisher's own."""
        try:
            self._move(connection, topic, upto, definition)
        except psycopg.Error as error:
            if self.broken:
                raise
            # They are others' events: the publisher's own batch must not fail because of them.
            self._batches[topic] = max(1, found // 2)
            raise _BufferStuckError(describe(error)) from error
        if topic in self._batches:
            self._batches[topic] = max(found * 2, self._batches[topic])

    def _make_room(self, connection: Connection, topic: str, last_id: int | None) -> None:
        """See to it that there are segments for the ids to come, in the caller's transaction that holds the topic.

        Now and then, and with it what else does not change while the log is there. At once where `last_id`, the last id
        of the log's sequence as it was read with the sequence's settings, is not what it should be.
        """
        if self._room.get(topic, 0) > 0 and self._ids.holds(topic, last_id):
            return
        self._zoned[topic] = self._ids.look(connection, topic)
        segments.ensure_ahead(connection, self._database.schema, topic)
        self._room[topic] = ROOM_CHECK

    def _drew(self, topic: str, ids: int) -> None:
        self._room[topic] -= ids
        self._ids.drew(topic, ids)

    @contextmanager
    def _room_for(self, topic: str) -> Iterator[None]:
        """Looks for room anew after a transaction that failed: for want of it, or with segments that it had made."""
        try:
            yield
        except BaseException:
            self._room.pop(topic, None)
            raise
