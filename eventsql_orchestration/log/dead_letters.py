"""Dead letters: events that failed their consumer's last attempt, kept in the topic `{topic}_dlt`."""

from __future__ import annotations

from typing import Final

from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.log.publisher import Publisher
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, NOT_PARTITIONED, Consumer, Event, Publication

CONSUMER: Final = "dlt_consumer"
EXCEPTION: Final = "dlt_exception"
MESSAGE: Final = "dlt_message"
ATTEMPTS: Final = "dlt_attempts"
SOURCE_TOPIC: Final = "dlt_topic"
SOURCE_PARTITION: Final = "dlt_partition"
SOURCE_OFFSET: Final = "dlt_offset"

REDRIVEN_FROM: Final = "redriven_from"

REDRIVE_CONSUMER: Final = "eventsql.redrive"
"""The consumer of a dead letter topic whose offset says what was redriven."""

MAX_MESSAGE_LENGTH: Final = 2_000


def describe(error: BaseException) -> str:
    """A failure as one storable line: `Type: message`, without NUL characters and cut at 2,000 characters."""
    text = f"{type(error).__name__}: {error}".replace("\x00", "�")
    return text.encode(errors="replace").decode()[:MAX_MESSAGE_LENGTH]


class DeadLetters:
    """Lists and redrives the dead letters of a topic."""

    def __init__(self, database: Database, registry: Registry, publisher: Publisher, reader: Reader) -> None:
        self._database = database
        self._registry = registry
        self._publisher = publisher
        self._reader = reader
        self._queries = Queries("log", database.schema)

    def topic_of(self, topic: str, connection: Connection | None = None) -> str | None:
        """The name of the topic's dead letter topic, or None where none is registered."""
        if connection is None:
            with self._database.connection() as pooled:
                return self.topic_of(topic, pooled)
        name = topic + DEAD_LETTER_SUFFIX
        # The connection may be a handler's, with a row factory of its own.
        cursor = connection.cursor(row_factory=tuple_row).execute(self._queries("topic_exists"), {"topic": name})
        return name if cursor.fetchone() == (True,) else None

    def bury(
        self,
        connection: Connection,
        dead_letter_topic: str,
        event: Event,
        *,
        consumer: str,
        failure: str,
        attempts: int,
    ) -> None:
        """Publish `event` as a dead letter in the caller's transaction."""
        exception, _, message = failure.partition(": ")
        self._publisher.publish(
            event.as_publication(
                dead_letter_topic,
                **{
                    CONSUMER: consumer,
                    EXCEPTION: exception,
                    MESSAGE: message,
                    ATTEMPTS: str(attempts),
                    SOURCE_TOPIC: event.topic,
                    SOURCE_PARTITION: str(event.partition),
                    SOURCE_OFFSET: str(event.id),
                },
            ),
            connection=connection,
        )

    def list(self, topic: str, *, limit: int = 100) -> list[Event]:
        """The oldest dead letters of `topic`. Raises `TopicNotFoundError` where it has no dead letter topic."""
        return self._reader.read(topic + DEAD_LETTER_SUFFIX, limit=limit)

    def redrive(self, topic: str, *, limit: int | None = None) -> int:
        """Publish dead letters to their topic again, each once and in order; gives their number.

        What was redriven before is left out. A redriven event names its dead letter in its metadata.
        """
        source = topic + DEAD_LETTER_SUFFIX
        self._registry.register_consumer(Consumer(source, REDRIVE_CONSUMER))
        redriven = 0
        while limit is None or redriven < limit:
            with self._database.transaction() as connection:
                row = connection.execute(
                    self._queries("await_consumer"),
                    {"topic": source, "consumer": REDRIVE_CONSUMER, "partition": NOT_PARTITIONED},
                ).fetchone()
                assert row is not None, "registered above"
                after = int(row[3])
                batch = 1_000 if limit is None else min(1_000, limit - redriven)
                letters = self._reader.read(source, after=after, limit=batch)
                if not letters:
                    break
                self._publisher.publish_all((_redriven(topic, letter) for letter in letters), connection=connection)
                connection.execute(
                    self._queries("advance"),
                    {
                        "topic": source,
                        "consumer": REDRIVE_CONSUMER,
                        "partition": NOT_PARTITIONED,
                        "after": after,
                        "upto": letters[-1].id,
                        "first": letters[0].id,
                        "consumed": len(letters),
                    },
                )
                redriven += len(letters)
        return redriven


def _redriven(topic: str, letter: Event) -> Publication:
    kept = {name: value for name, value in letter.metadata.items() if not name.startswith("dlt_")}
    return Publication(
        topic, letter.value, key=letter.key, metadata={**kept, REDRIVEN_FROM: f"{letter.topic}:{letter.id}"}
    )
