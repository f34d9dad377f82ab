"""Publishing: events are committed to the buffer before the call returns, or join the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy
from psycopg.types.json import Json

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.log.partitioner import Partitioner, default_partition
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import Publication, check_partition

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

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError`, `DatabaseFullError`; in each
        case nothing was published.
        """
        row = self._row(publication)
        with self._connection(connection) as psycopg_connection:
            psycopg_connection.execute(
                self._queries("publish"),
                {
                    "topic": row[0],
                    "partition": row[1],
                    "key": row[2],
                    "value": row[3],
                    "metadata": Json(row[4]),
                },
                binary=True,
            )
        self._on_published()

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> int:
        """Publish any number of events, of any topics, in order and in one commit; gives their number.

        `publications` is read as it is written, so it may be longer than memory. When it raises, or one of them cannot
        be published, none is. Otherwise as `publish`.
        """
        published = 0
        with self._connection(connection) as psycopg_connection, psycopg_connection.cursor() as cursor:
            with cursor.copy(self._queries("publish_all")) as copy:
                copy.set_types(_COPY_TYPES)
                for publication in publications:
                    copy.write_row(self._row(publication))
                    published += 1
        if published:
            self._on_published()
        return published

    def _row(self, publication: Publication) -> tuple[str, int, str | None, bytes, dict[str, str]]:
        partitions = self._registry.cached_topic(publication.topic).partitions
        partition = publication.partition
        if partition is None:
            partition = self._partitioner(publication, partitions)
        check_partition(publication.topic, partition, partitions)
        return publication.topic, partition, publication.key, publication.value, dict(publication.metadata)

    @contextmanager
    def _connection(self, given: Connection | sqlalchemy.Connection | None) -> Iterator[Connection]:
        if given is None:
            with self._database.connection() as connection:
                yield connection
        else:
            self._database.ensure_schema()
            with self._database.errors():
                yield driver_connection(given)


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
