"""A queue in one database: its definition and the statements on its messages."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.binary import encode_integer
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.database.notifier import Notifier
from eventsql_orchestration.database.rows import query_first
from eventsql_orchestration.database.sessions import read_committed
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import (
    DatabaseError,
    MessageNotFoundError,
    QueueNotFoundError,
    RedefinitionError,
    ValidationError,
    WrongShardError,
)
from eventsql_orchestration.queue.arrays import adapt_arrays, bigint_array, decode_bigints, integer_array
from eventsql_orchestration.queue.options import QueueOptions
from eventsql_orchestration.queue.rows import columns_of, held, received
from eventsql_orchestration.queue.values import Message, NewMessage, QueueDefinition
from eventsql_orchestration.sharding import pending
from eventsql_orchestration.threads import after_commit

QUEUE: Final = "queue"
"""The kind of a notification of new messages in a queue."""

FROM_START_SECONDS: Final = 0.2, 1.0
"""The least and the most seconds between two receives that look at all visible messages."""

FROM_START_RATIO: Final = 20
"""The time between two receives from the start, as a multiple of the time that the first of them took. So these
receives take 5 % of the time at most, up to 50 ms each."""

ORDERED_KEY_BYTES: Final = 2_600
"""The longest key that always fits an ordered queue's index. PostgreSQL compresses a longer one, and may refuse it."""

_double: Final = struct.Struct(">d").pack
_TRUE: Final = b"\x01"


class _Statements(NamedTuple):
    """The statements that are transactions by themselves.

    A statement that searches messages calls a function, which has plans of its own.
    """

    put: SingleStatement
    put_plain: SingleStatement
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
        self, database: Database, name: str, options: QueueOptions,
        *, shard: str | None = None, listener: Listener | None = None, notifier: Notifier | None = None,
        elsewhere: Callable[[QueueTable], QueueDefinition | None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.database = database
        self.listener = listener
        self.shard = shard
        self.name = name
        self._options = options
        self._notifier = notifier
        self._elsewhere = elsewhere
        self._queries = Queries("queue", database.schema)
        self._statements = _statements(database.schema)
        self._onwards: bytes | None = None
        self._from_start_at = 0.0
        self._id: int | None = None
        self._inserts = False
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
        row = connection.execute(self._queries("definition"), {"name": self.name}).fetchone()
        if row is None:
            return None
        self._id, self._inserts, *definition = row
        return QueueDefinition(*definition)

    def _define(self, connection: Connection, found: QueueDefinition | None) -> QueueDefinition:
        options = self._options
        other = self._elsewhere(self) if found is None else found
        if other is not None and options.ordered not in (None, other.ordered):
            raise RedefinitionError(
                f"queue {self.name!r} {'keeps' if other.ordered else 'does not keep'} the order of keys, and that "
                "cannot change: omit `ordered`, or use another name"
            )
        if found is None and other is not None:
            options = options.completed(other)
        if options.max_receives is not None and options.dead_letters is None and not (found and found.dead_letters):
            options = replace(options, dead_letters=f"{self.name}_dead")
        if options.dead_letters is not None and not (options.max_receives or (found and found.max_receives)):
            raise ValidationError("a queue with dead_letters needs max_receives: give it too (`--max-receives N`)")

        with connection.transaction():
            connection.execute(self._queries("create"), {"name": self.name, "ordered": options.ordered})
            if options.dead_letters is not None:
                dead = {"name": options.dead_letters, "ordered": None}
                connection.execute(self._queries("create"), dead)
            values = {name: getattr(options, name) for name in options.__slots__}
            connection.execute(self._queries("configure"), {**values, "name": self.name})
        defined = self._read(connection)
        if defined is None:
            raise self._gone()
        if options.ordered not in (None, defined.ordered):
            # Another process was first.
            return self._define(connection, defined)
        return defined

    # Sending

    def put(self, messages: Sequence[NewMessage], connection: CallersConnection | None) -> list[int]:
        """Write messages in one statement, and notify receivers unless the caller commits. Gives the ids in order.

        Raises `WrongShardError` if this database is a shard that does not take them.
        """
        columns = columns_of(messages)
        try:
            ids = self._put_alone(columns) if connection is None else self._put_joined(columns, connection)
        except DatabaseError as error:
            if isinstance(error.__cause__, psycopg.errors.ProgramLimitExceeded):
                raise ValidationError(
                    f"a key is too long for the ordered queue {self.name!r}, which has an index of keys: use keys of "
                    f"at most {ORDERED_KEY_BYTES} bytes; nothing was sent"
                ) from error
            if isinstance(cause := error.__cause__, psycopg.errors.ObjectNotInPrerequisiteState):
                found, refusal = cause.diag.message_primary, cause.diag.constraint_name
                if refusal == "active_shard":
                    raise pending(self.shard or "", found) from error
                # A trigger of a user may raise an error of this kind, too.
                if refusal == "key_of_shard":
                    raise WrongShardError(
                        f"{found}: send the message through a platform on all shards, or on a connection to the shard "
                        "of the key (platform.shard_of(key))"
                    ) from error
            raise
        if not ids:
            raise self._gone()
        if connection is None:
            self.notify()
        return ids

    def _put_joined(self, columns: Mapping[str, bytes | None], connection: CallersConnection) -> list[int] | None:
        """Write messages in the caller's transaction."""
        with self.database.callers(connection) as joined, joined.cursor(row_factory=tuple_row) as cursor:
            adapt_arrays(cursor)
            values = {"queue": self.id(), **columns, "alone": False}
            row = cursor.execute(self._queries("put"), values, binary=True).fetchone()
        return None if row is None else row[0]

    def _put_alone(self, columns: Mapping[str, bytes | None]) -> list[int] | None:
        """Write messages in a transaction of their own."""
        values = {"queue": encode_integer(self.id()), **columns}
        if self._inserts and not self.known().ordered and columns["deduplication_ids"] is None:
            return [id_ for (id_,) in self.database.fetch_values(self._statements.put_plain, values)]
        encoded = self.database.fetch(self._statements.put, {**values, "alone": _TRUE})[0][0]
        return None if encoded is None else decode_bigints(encoded)

    # Receiving

    def take(self, most: int, seconds: float | None) -> list[Message]:
        """Receive messages, for the queue's own visibility timeout by default. Never waits."""
        queue, known = self.id(), self.known()
        values = {
            "queue": encode_integer(queue),
            "max_messages": encode_integer(most),
            "visibility_timeout": _double(known.visibility_timeout if seconds is None else seconds),
        }
        rows = self._take_onwards(self._statements.take_in_order if known.ordered else self._statements.take, values)
        return received(rows, self.shard)

    def _take_onwards(self, take: SingleStatement, values: Mapping[str, bytes]) -> list[tuple[Any, ...]]:
        """Receive messages from where the last receive found some, and now and then from the start.

        A message is behind that place if its sender committed late, or if another receiver's transaction failed.
        """
        started = time.monotonic()
        since = self._onwards if started < self._from_start_at else None
        rows = self.database.fetch_values(take, {**values, "since": since})
        if since is None:
            ended, (least, most) = time.monotonic(), FROM_START_SECONDS
            self._from_start_at = ended + min(most, max(least, FROM_START_RATIO * (ended - started)))
        if rows and rows[-1][-1] is not None:
            self._onwards = rows[-1][-1]
        return rows

    def due(self) -> float | None:
        """Seconds until the next hidden message becomes visible by time alone; None if there is none.

        Raises `QueueNotFoundError` if the queue was deleted: otherwise a receiver would wait for ever.
        """
        row = query_first(self.database, self._queries("due"), {"queue": self.id()}, prepare=False)
        if row is None:
            raise self._gone()
        seconds: float | None = row[0]
        return seconds

    # Settling

    def acknowledge(self, messages: Collection[Message], connection: CallersConnection | None) -> None:
        """Delete held messages, or none of them. Raises `MessageNotFoundError`, `ValidationError`."""
        given = held(messages)
        values = {"ids": bigint_array(given["ids"]), "receipts": integer_array(given["receipts"])}
        missing: list[int] | None
        if connection is None:
            queue = encode_integer(self.id())
            encoded = self.database.fetch(self._statements.acknowledge, {"queue": queue, **values})[0][0]
            missing = None if encoded is None else decode_bigints(encoded)
        else:
            missing = self._acknowledge_within(connection, values, given["ids"])
        if missing is None:
            raise ValidationError(
                f"queue {self.name!r} is ordered, and the connection's transaction is not READ COMMITTED, so it may "
                "miss the message that comes next. Nothing was acknowledged: use READ COMMITTED"
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
                # This happens under REPEATABLE READ: somebody has received or settled a message since the transaction
                # began.
                return ids
        return None if row is None else row[0]

    def release(self, message: Message, delay: float, reason: str | None) -> None:
        self._release("release", message, delay, reason)
        if not delay:
            self.notify()

    def fail(self, message: Message, delay: float, reason: str) -> str | None:
        """Release a message whose handler failed. Gives the queue of the dead letters if its receives are spent."""
        dead_letters: str | None = self._release("fail", message, delay, reason)[0]
        if dead_letters is not None:
            self.notify(dead_letters)
        if dead_letters is not None or not delay:
            self.notify()
        return dead_letters

    def _release(self, statement: str, message: Message, delay: float, reason: str | None) -> tuple[Any, ...]:
        values = {
            "queue": self.id(), "id": message.id, "receipt": message.receipt, "delay": delay, "reason": reason,
        }  # fmt: skip
        with self.database.connection() as connection, read_committed(connection):
            row = connection.execute(self._queries(statement), values, prepare=False).fetchone()
        if row is None:
            raise self.not_found([message.id])
        return row

    def give_back(self, messages: Collection[Message]) -> None:
        """Make messages visible again that are still held. Their receive does not count."""
        values = {"queue": self.id(), **held(messages)}
        with self.database.connection() as connection, read_committed(connection):
            given = connection.execute(self._queries("give_back"), values, prepare=False).rowcount
        if given:
            self.notify()

    def extend(self, messages: Collection[Message], seconds: float) -> set[int]:
        """Hide held messages for `seconds` from now on. Returns the ids of the messages that are still held."""
        values = {"queue": self.id(), "seconds": seconds, **held(messages)}
        with self.database.urgent() as connection, read_committed(connection):
            return {row[0] for row in connection.execute(self._queries("extend"), values, prepare=False)}

    def notify(self, name: str | None = None) -> None:
        """Tell receivers in all processes that this queue, or the queue `name`, may have visible messages."""
        if self._notifier is not None:
            after_commit(self._notifier.notify)(QUEUE, name or self.name, look=True)

    def _gone(self) -> QueueNotFoundError:
        return QueueNotFoundError(
            f"queue {self.name!r} is not in {self.database} any more, or was created again: restart programs that "
            "use it"
        )

    def not_found(self, ids: Sequence[int]) -> MessageNotFoundError:
        many = f"messages {', '.join(map(str, ids))}" if len(ids) > 1 else f"message {ids[0]}"
        return MessageNotFoundError(
            f"queue {self.name!r} has no {many} with this receipt: acknowledged or released before, or the visibility "
            "timeout ended and another receiver took it",
            ids=ids,
        )
