"""A queue in PostgreSQL: one worker at a time receives a message, and it stays until it is acknowledged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from psycopg.errors import SerializationFailure
from psycopg.rows import class_row, scalar_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.errors import MessageNotFoundError, ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.validation import (
    MAX_VALUE_BYTES,
    NO_METADATA,
    Duration,
    check_metadata,
    check_name,
    check_seconds,
    check_text,
    check_whole,
)

MAX_MESSAGES: Final = 10_000
"""The most messages of one receive. More would wait in memory for longer than their visibility timeout."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that one receiver holds until it acknowledges or releases it, or its visibility timeout ends.

    `receives` counts how often the message was received, including this time. `receipt` identifies this receive; the
    next receiver gets another.
    """

    id: int
    body: bytes
    key: str | None
    metadata: Mapping[str, str]
    receives: int
    receipt: UUID


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of messages that can be received now, and of messages that are delayed or held by a receiver."""

    visible: int
    invisible: int


def _checked_body(body: bytes) -> bytes:
    """Return a message's body: bytes, up to 64 MiB. Raises `ValidationError`."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise ValidationError(f"body must be bytes, not {type(body).__name__}: encode it first, as UTF-8 for example")
    body = bytes(body)
    if len(body) > MAX_VALUE_BYTES:
        raise ValidationError(
            f"body has {len(body)} bytes; {MAX_VALUE_BYTES} are allowed: send a reference to it instead"
        )
    return body


@checked
class Queue:
    """The queue called `name`. It exists as soon as a message is sent to it.

    Messages are received roughly in the order in which they became visible, by one receiver at a time. If a receiver
    dies or takes longer than its visibility timeout, another receives the message: delivery is at least once.
    `acknowledge(message, connection=…)` in the transaction of the message's effects makes the effects exactly once.

    Raises `InvalidNameError` for an unusable name. Nothing connects before the first call.
    """

    def __init__(self, database: Database, name: str) -> None:
        self.name = check_name("queue name", name)
        self._database = database
        self._queries = Queries("queue", database.schema)

    def send(
        self, body: bytes, *, key: str | None = None, metadata: Mapping[str, str] = NO_METADATA,
        delay: Duration = 0.0, connection: CallersConnection | None = None,
    ) -> int:  # fmt: skip
        """Send one message and return its id.

        `key` and `metadata` go with the message and do not affect its delivery. It is received at the earliest after
        `delay` seconds. With `connection`, of psycopg or SQLAlchemy, it is sent when the caller's transaction commits.

        Raises `ValidationError`, with nothing sent, for values that cannot be stored and for a connection to another
        database.
        """
        values = {
            "queue": self.name, "body": _checked_body(body),
            "key": None if key is None else check_text("key", key, most=MAX_KEY_BYTES),
            "metadata": json.dumps(check_metadata(metadata)), "delay": check_seconds("delay", delay, zero=True),
        }  # fmt: skip
        with self._database.joined(connection) as joined, joined.cursor(row_factory=scalar_row) as cursor:
            sent: int | None = cursor.execute(self._queries("send"), values).fetchone()
            assert sent is not None, "an insert of one row returns its id"
            return sent

    def receive(self, *, max_messages: int = 1, visibility_timeout: Duration = 30.0) -> list[Message]:
        """Receive up to `max_messages` (1 to 10,000) visible messages, in the order in which they were sent. Never
        waits.

        No other receiver gets them for `visibility_timeout` seconds. Choose it longer than a batch takes.
        """
        values = {
            "queue": self.name,
            "max_messages": check_whole("max_messages", max_messages, least=1, most=MAX_MESSAGES),
            "visibility_timeout": check_seconds("visibility_timeout", visibility_timeout, zero=False),
        }
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(Message)) as cursor:
            return cursor.execute(self._queries("receive"), values, binary=True, prepare=False).fetchall()

    def acknowledge(self, message: Message, *, connection: CallersConnection | None = None) -> None:
        """Delete a message whose work is done; with `connection`, when the caller's transaction commits.

        After its visibility timeout, a message can still be acknowledged until somebody receives it again. Raises
        `MessageNotFoundError` after that, or if it was acknowledged or released before.
        """
        self._settle("acknowledge", message, connection)

    def release(self, message: Message) -> None:
        """Make a message visible again at once, behind all visible messages.

        Raises `MessageNotFoundError` if this receipt does not hold it any more.
        """
        self._settle("release", message, None)

    def depth(self) -> QueueDepth:
        """Count the queue's messages. This takes longer the more there are."""
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(QueueDepth)) as cursor:
            counted = cursor.execute(self._queries("depth"), {"queue": self.name}, prepare=False).fetchone()
            assert counted is not None, "an aggregate without GROUP BY has one row"
            return counted

    def _settle(self, statement: str, message: Message, connection: CallersConnection | None) -> None:
        values = {"queue": self.name, "id": message.id, "receipt": message.receipt}
        with self._database.joined(connection) as joined:
            try:
                settled = joined.execute(self._queries(statement), values, prepare=False).rowcount
            except SerializationFailure:
                # Under REPEATABLE READ: somebody has received or settled the message since the transaction began.
                settled = 0
        if not settled:
            raise MessageNotFoundError(
                f"queue {self.name!r} has no message {message.id} with this receipt: it was acknowledged or released, "
                "or its visibility timeout ended and another receiver took it"
            )
