"""A queue of messages in PostgreSQL: sent once, received by one worker at a time, kept until acknowledged."""

from __future__ import annotations

import json
from collections.abc import Mapping

import sqlalchemy
from psycopg.rows import class_row, scalar_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import MessageNotFoundError
from eventsql_orchestration.queue.message import (
    Message,
    QueueDepth,
    check_body,
    check_key,
    check_max_messages,
)
from eventsql_orchestration.rules import NO_METADATA, Duration, check_metadata, check_name, check_seconds


@checked
class Queue:
    """The queue called `name`; it exists as soon as a message is sent to it.

    Messages are handed out roughly in the order in which they became visible, each to one receiver at a time. A
    receiver that dies, or takes longer than its visibility timeout, has its message handed out again: delivery is at
    least once. `acknowledge(message, connection=…)` in the transaction of the message's own effects makes those
    effects exactly once.

    Raises `InvalidNameError` for a name that cannot be used; nothing connects before the first call.
    """

    def __init__(self, database: Database, name: str) -> None:
        self.name = check_name("queue name", name)
        self._database = database
        self._queries = Queries("queue", database.schema)

    def send(
        self,
        body: bytes,
        *,
        key: str | None = None,
        metadata: Mapping[str, str] = NO_METADATA,
        delay: Duration = 0.0,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> int:
        """Put one message on the queue and return its id.

        `key` and `metadata` travel with the message; they do not order its delivery. It is received no earlier than
        `delay` (seconds) from now. With `connection`, of psycopg or SQLAlchemy, it is sent when the caller's
        transaction commits, and not at all when that rolls back.

        Raises `ValidationError` for what cannot be stored, and for a connection to another database; nothing was sent
        then.
        """
        values = {
            "queue": self.name,
            "key": check_key(key),
            "body": check_body(body),
            "metadata": json.dumps(check_metadata(metadata)),
            "delay": check_seconds("delay", delay, zero=True),
        }
        with self._database.joined(connection) as joined, joined.cursor(row_factory=scalar_row) as cursor:
            sent: int | None = cursor.execute(self._queries("send"), values).fetchone()
            assert sent is not None, "an insert of one row returns its id"
            return sent

    def receive(self, *, max_messages: int = 1, visibility_timeout: Duration = 30.0) -> list[Message]:
        """Take up to `max_messages` (1 to 10,000) messages, none when none is visible; it never waits.

        No other receiver gets them for `visibility_timeout` seconds; choose it longer than a batch takes. A batch is
        in the order in which its messages were sent.
        """
        values = {
            "queue": self.name,
            "max_messages": check_max_messages(max_messages),
            "visibility_timeout": check_seconds("visibility_timeout", visibility_timeout, zero=False),
        }
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(Message)) as cursor:
            return cursor.execute(self._queries("receive"), values, binary=True).fetchall()

    def acknowledge(self, message: Message, *, connection: Connection | sqlalchemy.Connection | None = None) -> None:
        """Delete a message whose work is done, with `connection` when the caller's transaction commits.

        A message whose visibility timeout has ended can still be acknowledged while nobody received it again.
        Raises `MessageNotFoundError` when somebody did, or when it was acknowledged or released before.
        """
        self._settle("acknowledge", message, connection)

    def release(self, message: Message) -> None:
        """Give a message back, visible to every receiver at once, behind those that are visible already.

        Raises `MessageNotFoundError` when it is not held under this receipt any more.
        """
        self._settle("release", message, None)

    def depth(self) -> QueueDepth:
        """Count the queue's messages; the time it takes grows with their number."""
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(QueueDepth)) as cursor:
            counted = cursor.execute(self._queries("depth"), {"queue": self.name}).fetchone()
            assert counted is not None, "an aggregate without GROUP BY has one row"
            return counted

    def _settle(self, statement: str, message: Message, connection: Connection | sqlalchemy.Connection | None) -> None:
        values = {"queue": self.name, "id": message.id, "receipt": message.receipt}
        with self._database.joined(connection) as joined:
            settled = joined.execute(self._queries(statement), values).rowcount
        if not settled:
            raise MessageNotFoundError(
                f"queue {self.name!r} does not hold message {message.id} under this receipt any more: it was "
                "acknowledged or released, or its visibility timeout ended and another receiver took it"
            )
