"""A queue in one database: its definition and the statements on its messages."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.binary import decode_jsonb
from eventsql_orchestration.database.notifications import Listener, Notifier
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    MessageNotFoundError,
    QueueNotFoundError,
    RedefinitionError,
    ValidationError,
)
from eventsql_orchestration.queue.arrays import (
    adapt_arrays,
    bigint_array,
    bytes_array,
    decode_bigints,
    float_array,
    integer_array,
    text_array,
    time_array,
)
from eventsql_orchestration.queue.values import (
    ArchivedMessage,
    Message,
    NewMessage,
    PeekedMessage,
    QueueDefinition,
    QueueStatistics,
)
from eventsql_orchestration.validation import (
    NO_METADATA,
    Duration,
    check_kind,
    check_name,
    check_seconds,
    check_whole,
)

QUEUE: Final = "queue"
"""The kind of a notification of new messages in a queue."""

FROM_START_SECONDS: Final = 0.2, 1.0
"""The least and the most seconds between two receives that look at all visible messages."""

FROM_START_RATIO: Final = 20
"""The time between two such receives, in times of what the first one took: at most 5 % of the work up to 50 ms each."""

PURGED_AT_ONCE: Final = 10_000
"""Messages that one transaction deletes or moves."""


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The options of a queue, as `Queue` takes them; None leaves an option as it is.

    A `timedelta` becomes seconds. Raises `InvalidNameError`, `ValidationError`.
    """

    ordered: bool | None = None
    visibility_timeout: Duration | None = None
    max_receives: int | None = None
    dead_letters: str | None = None
    retention: Duration | None = None
    deduplication_window: Duration | None = None

    def __post_init__(self) -> None:
        if self.ordered is not None:
            check_kind("ordered", self.ordered, bool)
        if self.max_receives is not None:
            check_whole("max_receives", self.max_receives, least=1, most=2**31 - 1)
        if self.dead_letters is not None:
            check_name("dead_letters", self.dead_letters)
        for name in ("visibility_timeout", "retention", "deduplication_window"):
            if (duration := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_seconds(name, duration, zero=False))

    def differ(self, found: QueueDefinition) -> bool:
        """Whether the database has an option that differs from a given one."""
        return any(
            (given := getattr(self, name)) is not None and given != getattr(found, name) for name in self.__slots__
        )

    def completed(self, found: QueueDefinition) -> QueueOptions:
        """The given options, and those of a definition for the others."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return QueueOptions(**{name: getattr(found, name) if given is None else given for name, given in own.items()})


_integer: Final = struct.Struct(">i").pack
_double: Final = struct.Struct(">d").pack


class _Statements(NamedTuple):
    """The statements that are transactions by themselves. Each calls a function that keeps its own plans."""

    put: SingleStatement
    take: SingleStatement
    take_in_order: SingleStatement
    acknowledge: SingleStatement


@cache
def _statements(schema: str) -> _Statements:
    queries = Queries("queue", schema)
    return _Statements(*(SingleStatement(name, queries(name)) for name in _Statements._fields))


class QueueTable:
    """One queue in one database. `QueueTable` creates the queue at its first use, with the options that were given.

    `elsewhere` gives the queue's definition in another database of the platform, if there is one: a new queue takes
    over the options that were not given.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        options: QueueOptions,
        *,
        shard: str | None = None,
        listener: Listener | None = None,
        notifier: Notifier | None = None,
        elsewhere: Callable[[QueueTable], QueueDefinition | None] = lambda _: None,
    ) -> None:
        self.database = database
        self.listener = listener
        self.shard = shard
        self._name = name
        self._options = options
        self._notifier = notifier
        self._elsewhere = elsewhere
        self._queries = Queries("queue", database.schema)
        self._statements = _statements(database.schema)
        self._onwards: bytes | None = None
        self._from_start_at = 0.0
        self._id: int | None = None
        self._known: QueueDefinition | None = None

    # The definition

    def definition(self) -> QueueDefinition:
        """The queue's options. Creates the queue, or changes the options that were given and differ.

        Raises `RedefinitionError` if the queue exists and the given `ordered` differs.
        """
        with self.database.connection() as connection:
            found = self._read(connection)
            if found is None or self._options.differ(found):
                found = self._define(connection, found)
        self._known = found
        return found

    def existing(self) -> QueueDefinition | None:
        """The queue's options, or None if the database has no such queue."""
        with self.database.connection() as connection:
            return self._read(connection)

    def known(self) -> QueueDefinition:
        """The definition as it was read last."""
        return self._known or self.definition()

    def id(self) -> int:
        """The queue's number in this database."""
        if self._id is None:
            self.definition()
        assert self._id is not None, "reading the definition notes the number"
        return self._id

    def _read(self, connection: Connection) -> QueueDefinition | None:
        row = connection.execute(self._queries("definition"), {"name": self._name}).fetchone()
        if row is None:
            return None
        self._id = row[0]
        return QueueDefinition(*row[1:])

    def _define(self, connection: Connection, found: QueueDefinition | None) -> QueueDefinition:
        options = self._options
        other = self._elsewhere(self) if found is None else found
        if other is not None and options.ordered not in (None, other.ordered):
            raise RedefinitionError(
                f"queue {self._name!r} {'keeps' if other.ordered else 'does not keep'} the order of keys, and that "
                "cannot change: omit `ordered`, or take another name"
            )
        if found is None and other is not None:
            options = options.completed(other)
        if options.max_receives is not None and options.dead_letters is None and not (found and found.dead_letters):
            options = replace(options, dead_letters=f"{self._name}_dead")
        if options.dead_letters is not None and not (options.max_receives or (found and found.max_receives)):
            raise ValidationError("a queue with dead_letters needs max_receives: give the number of receives")

        with connection.transaction():
            connection.execute(self._queries("create"), {"name": self._name, "ordered": options.ordered})
            if options.dead_letters is not None:
                dead = {"name": options.dead_letters, "ordered": None}
                connection.execute(self._queries("create"), dead)
            values = {name: getattr(options, name) for name in options.__slots__}
            connection.execute(self._queries("configure"), {**values, "name": self._name})
        defined = self._read(connection)
        assert defined is not None, "it was just created, and queues are not deleted"
        if options.ordered not in (None, defined.ordered):
            # Another process was first.
            return self._define(connection, defined)
        return defined

    # Sending

    def put(self, messages: Sequence[NewMessage], connection: CallersConnection | None) -> list[int]:
        """Write messages in one statement, and notify receivers unless the caller commits. Gives the ids in order."""
        columns = _columns(messages)
        if connection is None:
            encoded = self.database.fetch(self._statements.put, {"queue": _integer(self.id()), **columns})[0][0]
            ids = None if encoded is None else decode_bigints(encoded)
        else:
            with self.database.callers(connection) as joined, joined.cursor(row_factory=tuple_row) as cursor:
                adapt_arrays(cursor)
                row = cursor.execute(self._queries("put"), {"queue": self.id(), **columns}, binary=True).fetchone()
            ids = None if row is None else row[0]
        if ids is None:
            raise QueueNotFoundError(f"queue {self._name!r} is not in {self.database} any more")
        if connection is None and self._notifier is not None:
            self._notifier.notify(QUEUE, self._name)
        return ids

    # Receiving

    def take(self, most: int, seconds: float | None) -> list[Message]:
        """Receive messages, for the queue's own visibility timeout by default. Never waits."""
        queue, known = self.id(), self.known()
        values = {
            "queue": _integer(queue),
            "max_messages": _integer(most),
            "visibility_timeout": _double(known.visibility_timeout if seconds is None else seconds),
        }
        if known.ordered:
            rows = self.database.fetch_values(self._statements.take_in_order, values)
        else:
            rows = self._take_onwards(values)
        shard = self.shard
        return [
            Message(
                id_, body, key, _metadata(metadata), receives, receipt, priority, sent_at,
                () if history is None else decode_jsonb(history), shard,
            )
            for id_, body, key, metadata, receives, receipt, priority, sent_at, history, _ in rows
        ]  # fmt: skip

    def _take_onwards(self, values: Mapping[str, bytes]) -> list[tuple[Any, ...]]:
        """Receive messages from where the last receive found some, and now and then from the start.

        A message is behind that place if its sender committed late, or if another receiver's transaction failed.
        """
        started = time.monotonic()
        since = self._onwards if started < self._from_start_at else None
        rows = self.database.fetch_values(self._statements.take, {**values, "since": since})
        if since is None:
            ended, (least, most) = time.monotonic(), FROM_START_SECONDS
            self._from_start_at = ended + min(most, max(least, FROM_START_RATIO * (ended - started)))
        if rows and rows[-1][-1] is not None:
            self._onwards = rows[-1][-1]
        return rows

    def due(self) -> float | None:
        """Seconds until the next hidden message becomes visible by time alone; None if there is none."""
        with self.database.connection() as connection:
            row = connection.execute(self._queries("due"), {"queue": self.id()}, prepare=False).fetchone()
        return None if row is None else row[0]

    # Settling

    def acknowledge(self, messages: Collection[Message], connection: CallersConnection | None) -> None:
        """Delete held messages, or none of them. Raises `MessageNotFoundError`, `ValidationError`."""
        held = _held(messages)
        values = {"ids": bigint_array(held["ids"]), "receipts": integer_array(held["receipts"])}
        missing: list[int] | None
        if connection is None:
            queue = _integer(self.id())
            encoded = self.database.fetch(self._statements.acknowledge, {"queue": queue, **values})[0][0]
            missing = None if encoded is None else decode_bigints(encoded)
        else:
            missing = self._acknowledge_within(connection, values, held["ids"])
        if missing is None:
            raise ValidationError(
                f"queue {self._name!r} is ordered, and the connection's transaction is not READ COMMITTED, so it may "
                "miss the message that comes next. Nothing was acknowledged: take READ COMMITTED"
            )
        if missing:
            raise self.not_found(missing)

    def _acknowledge_within(
        self, connection: CallersConnection, values: Mapping[str, bytes], ids: list[int]
    ) -> list[int] | None:
        with self.database.callers(connection) as joined, joined.cursor(row_factory=tuple_row) as cursor:
            adapt_arrays(cursor)
            try:
                row = cursor.execute(self._queries("acknowledge"), {"queue": self.id(), **values}).fetchone()
            except psycopg.errors.SerializationFailure:
                # Under REPEATABLE READ: somebody has received or settled a message since the transaction began.
                return ids
        return None if row is None else row[0]

    def release(self, message: Message, delay: float, reason: str | None) -> None:
        values = {
            "queue": self.id(), "id": message.id, "receipt": message.receipt, "delay": delay, "reason": reason,
        }  # fmt: skip
        with self.database.connection() as connection:
            released = connection.execute(self._queries("release"), values, prepare=False).rowcount
        if not released:
            raise self.not_found([message.id])
        if self._notifier is not None and not delay:
            self._notifier.notify(QUEUE, self._name)

    def give_back(self, messages: Collection[Message]) -> None:
        """Make messages visible again that are still held. Their receive does not count."""
        values = {"queue": self.id(), **_held(messages)}
        with self.database.connection() as connection:
            given = connection.execute(self._queries("give_back"), values, prepare=False).rowcount
        if given and self._notifier is not None:
            self._notifier.notify(QUEUE, self._name)

    def extend(self, messages: Collection[Message], seconds: float) -> set[int]:
        """Hide held messages for `seconds` from now on. Gives the ids of those that are still held."""
        values = {"queue": self.id(), "seconds": seconds, **_held(messages)}
        with self.database.urgent() as connection:
            return {row[0] for row in connection.execute(self._queries("extend"), values, prepare=False)}

    def not_found(self, ids: Sequence[int]) -> MessageNotFoundError:
        many = f"messages {', '.join(map(str, ids))}" if len(ids) > 1 else f"message {ids[0]}"
        return MessageNotFoundError(
            f"queue {self._name!r} has no {many} with this receipt: acknowledged or released before, or the visibility "
            "timeout ended and another receiver took it",
            ids=ids,
        )

    # Looking after

    def peek(self, limit: int) -> list[PeekedMessage]:
        with self.database.connection() as connection:
            rows = connection.execute(self._queries("peek"), {"queue": self.id(), "limit": limit}, prepare=False)
            return [_peeked(row, self.shard) for row in rows]

    def statistics(self) -> QueueStatistics:
        with self.database.connection() as connection:
            row = connection.execute(self._queries("statistics"), {"queue": self.id()}, prepare=False).fetchone()
        assert row is not None, "an aggregate without GROUP BY has one row"
        return QueueStatistics(self._name, *row)

    def purge(self) -> int:
        """Delete the messages that are there, in transactions of 10,000. Gives their number."""
        queue, purged = self.id(), 0
        with self.database.connection() as connection:
            row = connection.execute(self._queries("newest"), {"queue": queue}, prepare=False).fetchone()
            values = {"queue": queue, "upto": row[0] if row else None, "limit": PURGED_AT_ONCE}
            while True:
                with connection.transaction():
                    counted = connection.execute(self._queries("purge"), values, prepare=False).fetchone()
                    if self.known().ordered:
                        # If the first message of a key was deleted alone, the next one is the first.
                        connection.execute(self._queries("stranded"), {"queue": queue}, prepare=False)
                assert counted is not None, "an aggregate has one row"
                if not counted[0]:
                    return purged
                purged += counted[0]

    def redrive(self, limit: int | None, ids: Sequence[int] | None) -> int:
        """Move dead letters back, in transactions of 10,000. Gives their number."""
        values = {"queue": self.id(), "ordered": self.known().ordered, "ids": None if ids is None else list(ids)}
        redriven = 0
        with self.database.connection() as connection:
            while limit is None or redriven < limit:
                most = PURGED_AT_ONCE if limit is None else min(limit - redriven, PURGED_AT_ONCE)
                moved = self._redrive({**values, "limit": most}, connection)
                redriven += moved
                if moved < most:
                    break
        if redriven and self._notifier is not None:
            self._notifier.notify(QUEUE, self._name)
        return redriven

    def _redrive(self, values: Mapping[str, Any], connection: Connection) -> int:
        with connection.transaction():
            # The rows get their new ids in the order of this index.
            connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
            left = connection.execute(self._queries("redrive"), values, prepare=False).fetchall()
            keys: dict[int, set[str]] = {}
            for queue, key in left:
                if queue is not None:
                    keys.setdefault(queue, set()).add(key)
            for queue, of_queue in keys.items():
                # If the dead letter before another one of its key has left, the other one is the first.
                promoted = {"queue": queue, "keys": sorted(of_queue)}
                connection.execute(self._queries("promote"), promoted, prepare=False)
        return len(left)

    def archived(self, limit: int) -> list[ArchivedMessage]:
        with self.database.connection() as connection:
            rows = connection.execute(self._queries("archived"), {"queue": self.id(), "limit": limit}, prepare=False)
            return [_archived(row, self.shard) for row in rows]


def list_queues(database: Database) -> list[QueueDefinition]:
    """Every queue of a database, by name."""
    with database.connection() as connection:
        rows = connection.execute(Queries("queue", database.schema)("definition"), {"name": None}, prepare=False)
        return [QueueDefinition(*row[1:]) for row in rows]


def drop_expired_archives(database: Database) -> list[str]:
    """Drop the parts of the archive whose messages have all expired. Gives the names of the dropped tables.

    Raises `DatabaseBusyError` if a reader keeps a part for longer than 5 s; the next call continues.
    """
    queries = Queries("queue", database.schema)
    dropped: list[str] = []
    with database.connection() as connection:
        archive = {"archive": f'"{database.schema}".queue_archive'}
        names = [name for (name,) in connection.execute(queries("expired_archives"), archive, prepare=False)]
        for name in names:
            try:
                with connection.transaction():
                    connection.execute("SET LOCAL lock_timeout = '5s'")
                    connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(database.schema, name)))
            except psycopg.errors.LockNotAvailable as error:
                raise DatabaseBusyError(f"table {name} of the archive is being read: try again") from error
            dropped.append(name)
    return dropped


def _columns(messages: Sequence[NewMessage]) -> dict[str, bytes | None]:
    """The columns of messages as encoded arrays. A column with the default in every message is NULL."""
    priorities = [message.priority for message in messages]
    dues = [message.due for message in messages]
    delays = [message.delay for message in messages]
    return {
        "bodies": bytes_array([message.body for message in messages]),
        "keys": _texts([message.key for message in messages]),
        "metadata": _texts(
            [
                json.dumps(message.metadata, ensure_ascii=False, separators=(",", ":")) if message.metadata else None
                for message in messages
            ]
        ),
        "priorities": integer_array(priorities) if any(priorities) else None,
        "dues": time_array(dues) if any(dues) else None,
        "delays": float_array([check_seconds("delay", delay, zero=True) for delay in delays]) if any(delays) else None,
        "deduplication_ids": _texts([message.deduplication_id for message in messages]),
    }


def _texts(values: Sequence[str | None]) -> bytes | None:
    return text_array(values) if any(value is not None for value in values) else None


def _held(messages: Collection[Message]) -> Mapping[str, list[int]]:
    held = {message.id: message.receipt for message in messages}
    return {"ids": list(held), "receipts": list(chain(held.values()))}


def _metadata(text: str) -> Mapping[str, str]:
    if text == "{}":
        return NO_METADATA
    metadata: dict[str, str] = json.loads(text)
    return metadata


def _peeked(row: tuple[Any, ...], shard: str | None) -> PeekedMessage:
    id_, body, key, metadata, receives, priority, sent_at, visible_at, state, origin, history = row
    return PeekedMessage(
        id_, body, key, _metadata(metadata), receives, priority, sent_at, visible_at, state, origin, history or (),
        shard,
    )  # fmt: skip


def _archived(row: tuple[Any, ...], shard: str | None) -> ArchivedMessage:
    id_, body, key, metadata, receives, priority, sent_at, acknowledged_at = row
    return ArchivedMessage(id_, body, key, _metadata(metadata), receives, priority, sent_at, acknowledged_at, shard)
