"""A queue in PostgreSQL: one worker at a time receives a message, and it stays until it is acknowledged."""

from __future__ import annotations

import json
from collections.abc import Mapping

from psycopg.rows import class_row, scalar_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.errors import MessageNotFoundError
from eventsql_orchestration.queue.message import Message, QueueDepth, check_body, check_key, check_max_messages
from eventsql_orchestration.validation import NO_METADATA, Duration, check_metadata, check_name, check_seconds


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
        self,
        body: bytes,
        *,
        key: str | None = None,
        metadata: Mapping[str, str] = NO_METADATA,
        delay: Duration = 0.0,
        connection: CallersConnection | None = None,
    ) -> int:
        """Send one message and return its id.

        `key` and `metadata` go with the message and do not affect its delivery. It is received at the earliest after
        `delay` seconds. With `connection`, of psycopg or SQLAlchemy, it is sent when the caller's transaction commits.

        Raises `ValidationError`, with nothing sent, for values that cannot be stored and for a connection to another
        database.
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
        """Receive up to `max_messages` (1 to 10,000) visible messages, in the order in which they were sent. Never
        waits.

        No other receiver gets them for `visibility_timeout` seconds. Choose it longer than a batch takes.
        """
        values = {
            "queue": self.name,
            "max_messages": check_max_messages(max_messages),
            "visibility_timeout": check_seconds("visibility_timeout", visibility_timeout, zero=False),
        }
        with self._database.connection() as connection, connection.cursor(row_factory=class_row(Message)) as cursor:
            return cursor.execute(self._queries("receive"), values, binary=True).fetchall()

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
            counted = cursor.execute(self._queries("depth"), {"queue": self.name}).fetchone()
            assert counted is not None, "an aggregate without GROUP BY has one row"
            return counted

    def _settle(self, statement: str, message: Message, connection: CallersConnection | None) -> None:
        values = {"queue": self.name, "id": message.id, "receipt": message.receipt}
        with self._database.joined(connection) as joined:
            settled = joined.execute(self._queries(statement), values).rowcount
        if not settled:
            raise MessageNotFoundError(
                f"queue {self.name!r} has no message {message.id} with this receipt: it was acknowledged or released, "
                "or its visibility timeout ended and another receiver took it"
            )
