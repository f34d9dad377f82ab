"""Writing to a topic's ordered log, as its only writer while a transaction holds the topic.

Contract: in a topic's event table, an event with a smaller id never becomes visible after an event with a larger id.
Inserting draws the ids, so only a transaction that holds the topic's row of `event_buffer_lock` may insert.

The writer reads buffered events in the order of their buffer ids, from a low-water mark on (`publishing/low_water.py`).
Without the mark, each batch would step over the index entries of all rows deleted since the last vacuum, while any
transaction in the database keeps vacuum from removing them. Measured: 126,000 events/s fall to 75,000 without the mark,
and stay at 140,000 with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final, TypeAlias, cast

import psycopg

from eventsql_orchestration.database import Connection, Database, Queries, is_pooled, is_quiet
from eventsql_orchestration.database.binary import microseconds
from eventsql_orchestration.database.load import disk_is_full, too_much
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import PermissionDeniedError, StuckEventError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.model import BLOCKS, Topic
from eventsql_orchestration.publishing import batch_sizes, copy_format
from eventsql_orchestration.publishing.block_format import EncodedBlock
from eventsql_orchestration.publishing.buffer_mover import BufferMover
from eventsql_orchestration.publishing.log_room import LogRoom
from eventsql_orchestration.publishing.low_water import LowWater
from eventsql_orchestration.publishing.placements import Appended
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.appending import LogAppender, TopicState
from eventsql_orchestration.storage.reading import MAX_OFFSET

LOOK_SECONDS: Final = 0.5
"""How often a publisher that appends updates the low-water mark."""

MOST_BUFFERED: Final = 10_000
"""The most buffered events that a publisher moves before its own. If there are more, the transfer is behind."""

LOCK_TIMEOUT: Final = 0.25
"""Seconds that a publisher waits for other threads of its process, and then for the topic, before its batch goes to the
buffer. A batch that waits is written once; a batch in the buffer has to be moved. Measured with four publishers of
batches of 5,000: together as fast as one alone."""

_OF_EVENTS: Final = ("22", "23", "44", "P0", "XX")
"""SQLSTATE classes that a single event may cause: data, constraints, views' checks, triggers, faults of the server."""


Encoded: TypeAlias = Iterable[Sequence[bytes]] | Iterable[EncodedBlock]
"""Events for a log in rows (`copy_format.encode`) in parts, or for a log in blocks."""


class SmallerBatchError(Exception):
    """Internal: a batch could not be moved, and the next batch of its topic has fewer events."""


class _BufferStuckError(Exception):
    """Internal: a publisher could not move the buffered events. The transfer has to move them."""


_BUFFER_MAY_TAKE_IT: Final = (
    psycopg.errors.LockNotAvailable, psycopg.errors.CheckViolation, psycopg.errors.UniqueViolation,
    psycopg.errors.QueryCanceled, _BufferStuckError,
)  # fmt: skip
"""After these errors nothing was appended, and the buffer may still take the batch."""


class LogWriter:
    """Becomes a topic's only writer, one transaction at a time: moves buffered events, appends given events.

    It has its own connection, opened at first use. Call its methods inside a `session()`.
    """

    def __init__(self, database: Database, *, batch: int | None = None, lock_timeout: float | None = None) -> None:
        """`batch` fixes the number of events moved at a time; the default follows their size and the server's speed.

        `lock_timeout` is how many seconds `append` waits for a topic.
        """
        self._database = database
        self._sizes = batch_sizes.BatchSizes(batch)
        # The number of rows of the buffer in the current batch, and the id of its last row if that is known.
        self._tried: tuple[int, int | None] | None = None
        self.more = False
        """Whether the last `move` may have left events behind that it could see."""
        self._lock_timeout = lock_timeout
        self._queries = Queries("log", database.schema)
        self._log = LogAppender(database.schema)
        self._mover = BufferMover(database.schema)
        self._connection: Connection | None = None
        self._low_water = LowWater(database.schema)
        self._looked_at = 0.0
        self._room = LogRoom(database.schema)
        self._refused: set[str] = set()
        self._mutex = threading.Lock()
        self._closing = False
        after_fork(self, LogWriter._after_fork)

    def _after_fork(self) -> None:
        self._connection, self._mutex, self._closing = None, threading.Lock(), False

    def close(self) -> None:
        """Close the connection, but not before the end of a session that uses it. The next use opens another."""
        self._closing = True
        # Do not wait: a server that stands still would keep the session for ever.
        with self.session(timeout=0.0):
            pass

    def _open(self) -> Connection:
        if self._connection is None or not is_quiet(self._connection):
            self._discard()
            self._connection = self._database.dedicated()
            if not is_pooled(self._connection):
                self._set_limits(self._connection)
        return self._connection

    def _set_limits(self, connection: Connection) -> None:
        """Set the limits for the session; through a pooler, for the current transaction."""
        local = is_pooled(connection)
        # Sort the events between buffer and log in memory. Read the buffer by its indexes: a plan is kept for long, and
        # the buffer may fill up meanwhile. Before PostgreSQL 18, a plan that reads a sequence, which has no index, then
        # seems dear enough to be compiled. Measured with 400 topics: each look takes 190 ms, and 0.6 ms without `jit`.
        connection.execute(
            "SELECT pg_catalog.set_config('work_mem', '64MB', %(local)s), "
            "pg_catalog.set_config('enable_seqscan', 'off', %(local)s), "
            "pg_catalog.set_config('jit', 'off', %(local)s)",
            {"local": local},
        )
        if self._lock_timeout is not None:
            connection.execute(
                "SELECT pg_catalog.set_config('lock_timeout', %s, %s)", [f"{round(self._lock_timeout * 1000)}ms", local]
            )

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[None]:
        with connection.transaction():
            if is_pooled(connection):
                # A pooler lends the session to other clients.
                self._set_limits(connection)
            yield

    def _discard(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._low_water = LowWater(self._database.schema)
        self._looked_at = 0.0

    @contextmanager
    def session(self, *, timeout: float = -1) -> Iterator[bool]:
        """Use the writer in the block, and keep other threads out. False if another thread keeps it for `timeout`
        seconds.

        An error in the block closes the connection. It becomes an error of this package if its meaning is known.
        """
        held: list[bool] = []
        try:
            # One call takes the lock and notes it, because Ctrl-C can come at the end of each call.
            held.extend(map(self._mutex.acquire, [True], [timeout]))
            if held == [True]:
                try:
                    with self._database.errors():
                        yield True
                except BaseException:
                    self._discard()
                    raise
            else:
                yield False
        finally:
            if held == [True]:
                try:
                    if self._closing:
                        self._closing = False
                        self._discard()
                finally:
                    self._mutex.release()
                if self._closing:
                    # `close` came in between.
                    self.close()

    def may_append(self, topic: str) -> bool:
        """Whether the current role may write to logs and was not refused the log of `topic` before."""
        return topic not in self._refused and self._database.may_transfer

    @property
    def broken(self) -> bool:
        """Whether the connection is gone."""
        return self._connection is None or self._connection.closed

    # Looking into the buffer

    def look(self, wanted: list[str] | None) -> tuple[int, list[str]]:
        """The newest buffer id that was given out, and the topics with buffered events, of `wanted` or of all."""
        # Opening a connection makes a new low-water mark, so open it first.
        connection = self._open()
        try:
            return self._low_water.look(connection, wanted)
        except psycopg.Error:
            # The server may have restarted since the last use. Nothing was executed since: connect again.
            if not self.broken:
                raise
        connection = self._open()
        return self._low_water.look(connection, wanted)

    # Moving buffered events

    def move(self, topic: str, newest: int) -> int | None:
        """Move one batch of `topic`, up to buffer id `newest`, in its own transaction.

        Gives the number of events, or None if another transaction holds the topic. Raises `SmallerBatchError` if the
        batch failed and a smaller one is to be tried, `StuckEventError` if a batch of one event failed although the
        disk is not full.
        """
        self._tried, self.more = None, False
        try:
            try:
                return self._move_batch(topic, newest)
            except (psycopg.errors.CheckViolation, psycopg.errors.UniqueViolation) as error:
                # A writer that knows no segments has used up the segments, or the sequence was set back at that moment.
                # The second attempt looks at both.
                if error.diag.constraint_name == segments.ADOPTION_CHECK:
                    segments.give_adoption_up(self._open(), self._database.schema, topic)
                return self._move_batch(topic, newest)
        except psycopg.Error as error:
            self._shrink(topic, error)
            raise

    def _move_batch(self, topic: str, newest: int) -> int | None:
        connection = self._open()
        limit = self._sizes.of(topic)
        started = time.monotonic()
        with self._room.using(topic), self._transaction(connection):
            if connection.execute(self._queries("lock_topic"), {"topic": topic}).fetchone() is None:
                return None

            self._tried = limit, None
            mark = self._low_water.marks.get(topic, 0)
            batch = self._log.batch(
                connection, topic, low_water=mark, newest=newest, limit=limit, size=batch_sizes.MOST_BYTES
            )
            self._tried = None
            if not batch.rows:
                self._low_water.moved(topic, newest)
                return 0
            if batch.partitions is None:
                # A topic that was deleted has no log, which the statement has read.
                raise PermissionDeniedError(
                    f"the events of topic {topic!r} stay in the buffer of {self._database}: row security hides the "
                    "topic's definition from the role of the transfer; `eventsql doctor` names the remedy"
                )
            self._room.make(connection, topic, batch.last_id, blocks=batch.blocks)
            self._tried = batch.rows, batch.upto
            moved = self._mover.move(
                connection, topic, low_water=mark, upto=batch.upto, partitions=batch.partitions, mixed=batch.mixed,
                most=batch.rows, after=self._room.last_id(topic), seconds=batch_sizes.BATCH_SECONDS,
            )  # fmt: skip
            self._room.drew(topic, moved.events)
            if moved.events and not batch.blocks:
                self._room.check(connection, topic)

        self.more = batch.full or not moved.whole
        if moved.whole:
            self._low_water.moved(topic, batch.upto if batch.full else newest)
            if batch.full:
                self._sizes.fit(topic, batch.rows, time.monotonic() - started)
        return moved.events

    def _shrink(self, topic: str, error: psycopg.Error) -> None:
        """Make the topic's next batch smaller if events of this batch may have caused `error`.

        Raises as `move`. Returns if the error has another cause or the connection is gone.
        """
        lost = self.broken
        if self._tried is None or not (lost or too_much(error) or (error.sqlstate or "").startswith(_OF_EVENTS)):
            return

        events, upto = self._tried
        # A server that runs out of memory closes the connection.
        self._sizes.halve(topic, events)
        if lost:
            return
        if events > 1:
            raise SmallerBatchError(f"{events:,} events of topic {topic!r} at once: {describe(error)}") from error
        if upto is not None and not disk_is_full(error):
            raise self._stuck(topic, upto, error) from error

    def _stuck(self, topic: str, buffer_id: int, error: psycopg.Error) -> StuckEventError:
        size, events = None, None
        with suppress(psycopg.Error):
            size, events = fetch_first(self._open(), self._queries("buffered_size"), {"id": buffer_id}) or (None, None)
        what = f"event {buffer_id}" if events is None else f"block {buffer_id} of {events:,} events"
        return StuckEventError(
            f"the events of topic {topic!r} stay in the buffer of {self._database} from {what} on, which could not "
            f"be moved even alone{'' if size is None else f' ({size:,} bytes)'}: {describe(error)}",
            topic=topic, buffer_id=buffer_id, size=size,
        )  # fmt: skip

    # Appending a publisher's own events

    def append(self, topic: Topic, encoded: Encoded, events: int) -> list[Appended] | None:
        """Append encoded events to the topic's log, after its buffered events, in one transaction.

        `topic.storage` says how they are encoded: for rows, or as blocks. `events` is their number. Parts and blocks
        are fetched while the topic is held. If fetching one raises, nothing is appended. Gives the ids of blocks; those
        of rows are not known.

        None, with nothing done, if the events must go to the buffer: another transaction keeps the topic for too long,
        too much is buffered, the topic is no longer defined like `topic`, its log is in another form, or its log has
        times without a time zone, which the server must convert (EventSQL's Java library makes such tables).
        """
        try:
            # The mark may be a little late; it matters only with events in the buffer.
            if time.monotonic() - self._looked_at > LOOK_SECONDS:
                self.look([topic.name])
                self._looked_at = time.monotonic()

            connection = self._open()
            with self._room.using(topic.name), self._transaction(connection):
                appended = self._append(connection, topic, encoded, events)
        except _BUFFER_MAY_TAKE_IT:
            return None
        except psycopg.errors.InsufficientPrivilege:
            # The transfer reports this if it lacks the right, too.
            self._refused.add(topic.name)
            return None

        if appended is not None:
            self._low_water.moved(topic.name, MAX_OFFSET)
        return appended

    def _append(self, connection: Connection, topic: Topic, encoded: Encoded, events: int) -> list[Appended] | None:
        if connection.execute(self._queries("await_topic"), {"topic": topic.name}).fetchone() is None:
            return None

        # Read after the lock: this statement sees the last holder's work, and nobody can redefine the topic any more.
        most = self._sizes.at_most(topic.name, MOST_BUFFERED)
        mark = self._low_water.marks.get(topic.name, 0)
        wanted = events if topic.storage == BLOCKS and self._room.left(topic.name) else 0
        state = self._log.state(connection, topic.name, low_water=mark, limit=most + 1, events=wanted)
        if not state.allowed:
            # The error of the buffer names the right.
            self._refused.add(topic.name)
            return None
        blocks = state.blocks
        redefined = state.definition != [topic.partitions, topic.layout] or blocks != (topic.storage == BLOCKS)
        if redefined or state.buffered > most or state.bytes > batch_sizes.MOST_BYTES:
            return None
        room = self._room.make(connection, topic.name, state.last_id, blocks=blocks)
        if not room.zoned:
            # The server has to convert the times.
            return None

        now = microseconds(self._move_before(connection, topic.name, state) if state.buffered else state.now)
        if blocks:
            # If there was another look, do not use the ids that were drawn before it: they may belong to older events.
            first = None if room.looked else state.drawn
            first = first or self._log.draw(connection, topic.name, events, after=self._room.last_id(topic.name))
            self._room.drew(topic.name, events)
            return self._append_blocks(connection, topic.name, cast("Iterable[EncodedBlock]", encoded), first, now)
        self._append_rows(connection, topic.name, cast("Iterable[Sequence[bytes]]", encoded), now)
        self._room.check(connection, topic.name)
        return []

    def _append_rows(self, connection: Connection, topic: str, events: Iterable[Sequence[bytes]], now: int) -> None:
        prefix = copy_format.log_prefix(now, now)

        def rows() -> Iterator[bytes]:
            yield copy_format.HEADER
            for part in events:
                yield prefix + prefix.join(part)
                self._room.drew(topic, len(part))
            yield copy_format.TRAILER

        self._log.append(connection, topic, rows())

    def _append_blocks(
        self, connection: Connection, topic: str, blocks: Iterable[EncodedBlock], first: int, now: int
    ) -> list[Appended]:
        appended: list[Appended] = []

        def rows() -> Iterator[bytes]:
            nonlocal first
            yield copy_format.HEADER
            for block in blocks:
                yield block.row(first, now, now)
                appended.append(Appended(block.partition, first, block.events))
                first += block.events
            yield copy_format.TRAILER

        self._log.append(connection, topic, rows())
        return appended

    def _move_before(self, connection: Connection, topic: str, state: TopicState) -> datetime:
        """Move the buffered rows, before a publisher's own events. Gives the time after that: times grow with ids.

        They are moved in runs, whatever the state says: a block that was committed since may lie before events.
        """
        found, mark = state.buffered, self._low_water.marks.get(topic, 0)
        assert state.definition is not None, "it is the publisher's"
        try:
            moved = self._mover.move(
                connection, topic, low_water=mark, upto=state.upto, partitions=state.definition[0], mixed=True,
                most=found, after=self._room.last_id(topic),
            )  # fmt: skip
        except psycopg.Error as error:
            # Other publishers' events must not make this publisher's batch fail, even if they end its session.
            self._sizes.halve(topic, found)
            raise _BufferStuckError(describe(error)) from error
        self._room.drew(topic, moved.events)
        self._sizes.double(topic, found)
        return self._log.now(connection)
