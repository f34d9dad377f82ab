"""Publishing: events are committed to the buffer before the call returns, or join the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.json import Json

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import RedefinitionError
from eventsql_orchestration.log.partitioner import Partitioner, default_partition
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import Publication, Topic, check_partition

_COPY_TYPES: Final = ("text", "int2", "text", "bytea", "json")


class Publisher:
    """Publishes events. One instance serves any number of threads."""

    def __init__(
        self, database: Database, registry: Registry, *, on_published: Callable[[], None] | None = None
    ) -> None:
        self._database = database
        self._registry = registry
        self._queries = Queries("log", database.schema)
        self._partitioner: Partitioner = default_partition
        self._on_published = on_published or (lambda: None)

    def configure_partitioner(self, partitioner: Partitioner) -> None:
        """Choose partitions by `partitioner(publication, partitions)` instead of by the hash of the key."""
        self._partitioner = partitioner

    def publish(
        self, publication: Publication, *, connection: Connection | sqlalchemy.Connection | None = None
    ) -> None:
        """Publish one event; it is committed when this returns.

        With `connection`, of psycopg or SQLAlchemy and on the same database, the event is part of the caller's
        transaction instead, and is published when that commits (an outbox).

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError`, `DatabaseFullError`, and
        `RedefinitionError` when the topic does not stop being redefined; in each case nothing was published.
        """
        topic = self._registry.cached_topic(publication.topic)
        row = self._row(publication, topic)
        with self._connection(connection) as psycopg_connection:
            if not self._insert(psycopg_connection, row, topic):
                self._registry.forget(topic.name)
                topic = self._registry.cached_topic(publication.topic)
                if not self._insert(psycopg_connection, self._row(publication, topic), topic):
                    raise _redefined([topic.name])
        self._on_published()

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> int:
        """Publish any number of events, of any topics, in order and in one commit; gives their number.

        `publications` is read as it is written, so it may be longer than memory. When it raises, or one of them cannot
        be published, none is; a transaction of the caller's must be rolled back then. Raises `RedefinitionError` when a
        topic was redefined meanwhile: publish again. Otherwise as `publish`.
        """
        published = 0
        topics: dict[str, Topic] = {}
        with self._transaction(connection) as psycopg_connection:
            with (
                psycopg_connection.cursor(row_factory=tuple_row) as cursor,
                cursor.copy(self._queries("publish_all")) as copy,
            ):
                copy.set_types(_COPY_TYPES)
                for publication in publications:
                    # One definition for the whole batch: what is checked below is what its partitions were chosen by.
                    topic = topics.get(publication.topic)
                    if topic is None:
                        topic = topics[publication.topic] = self._registry.cached_topic(publication.topic)
                    copy.write_row(self._row(publication, topic))
                    published += 1
            self._check(psycopg_connection, topics.values())
        if published:
            self._on_published()
        return published

    def _row(self, publication: Publication, topic: Topic) -> tuple[str, int, str | None, bytes, dict[str, str]]:
        partition = publication.partition
        if partition is None:
            partition = self._partitioner(publication, topic.partitions)
        check_partition(publication.topic, partition, topic.partitions)
        return publication.topic, partition, publication.key, publication.value, dict(publication.metadata)

    def _insert(
        self, connection: Connection, row: tuple[str, int, str | None, bytes, dict[str, str]], topic: Topic
    ) -> bool:
        """Insert an event; False, and nothing done, when its topic is not defined like `topic` any more."""
        inserted = connection.execute(
            self._queries("publish"),
            {
                "topic": row[0],
                "partition": row[1],
                "key": row[2],
                "value": row[3],
                "metadata": Json(row[4]),
                "partitions": topic.partitions,
            },
        )
        return inserted.rowcount == 1

    def _check(self, connection: Connection, topics: Collection[Topic]) -> None:
        """Raise `RedefinitionError` unless these are the topics' definitions, which the open COPY keeps as they are."""
        known = {"topics": [topic.name for topic in topics], "partitions": [topic.partitions for topic in topics]}
        cursor = connection.cursor(row_factory=tuple_row).execute(self._queries("redefined_topics"), known)
        if redefined := [name for (name,) in cursor]:
            for name in redefined:
                self._registry.forget(name)
            raise _redefined(redefined)

    def _connection(self, given: Connection | sqlalchemy.Connection | None) -> AbstractContextManager[Connection]:
        return self._database.joined(None if given is None else driver_connection(given))

    @contextmanager
    def _transaction(self, given: Connection | sqlalchemy.Connection | None) -> Iterator[Connection]:
        with self._connection(given) as connection:
            if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
                with connection.transaction():
                    yield connection
            else:
                yield connection


def _redefined(topics: list[str]) -> RedefinitionError:
    return RedefinitionError(f"topic {', '.join(topics)} was redefined meanwhile: nothing was published, publish again")


def driver_connection(connection: Connection | sqlalchemy.Connection) -> Connection:
    """The psycopg connection of a transaction that a caller runs with psycopg or with SQLAlchemy."""
    if isinstance(connection, sqlalchemy.Connection):
        driver: Any = connection.connection.driver_connection
    else:
        driver = connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(f"a psycopg or SQLAlchemy (postgresql+psycopg) connection is needed, not {type(driver)!r}")
    if isinstance(connection, sqlalchemy.Connection) and not connection.in_transaction():
        # SQLAlchemy would roll back what it did not begin itself.
        connection.begin()
    return driver
