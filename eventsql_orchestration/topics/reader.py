"""Reading a topic's log by offsets, without consuming it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import TextBinaryLoader

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import query_first
from eventsql_orchestration.model import MAX_PARTITIONS, NOT_PARTITIONED, Event, check_partition
from eventsql_orchestration.topics.registry import Registry

MAX_OFFSET: Final = 2**63 - 1


def fetch(
    connection: Connection, queries: Queries, topic: str, *, partition: int, after: int,
    upto: int | None = None, limit: int | None = None,
) -> list[Event]:  # fmt: skip
    """Events with `after < id <= upto` of a partition (-1: of all), in order, on a connection of the caller's."""
    # The connection may be a caller's, with a row factory of its own.
    cursor = connection.cursor(row_factory=tuple_row)
    # Events decode these values when they are read.
    cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)
    cursor.adapters.register_loader("json", TextBinaryLoader)
    cursor.execute(
        queries("read" if partition == NOT_PARTITIONED else "read_partition", topic=topic),
        {"partition": partition, "after": after, "upto": MAX_OFFSET if upto is None else upto, "limit": limit},
        binary=True,
        prepare=False,
    )
    return [Event(topic, *row) for row in cursor.fetchall()]


@checked
class Reader:
    """Reads any range of any topic, as often as wanted."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._queries = Queries("log", database.schema)

    def _partition(self, topic: str, partition: int | None) -> int:
        found = self._registry.cached_topic(topic)
        if partition is None:
            return NOT_PARTITIONED
        if partition >= found.partitions and found.layout == 1:
            # The topic may have been repartitioned a moment ago.
            self._registry.forget(topic)
            found = self._registry.cached_topic(topic)
        # A repartitioned topic may have had more partitions.
        most = found.partitions if found.layout == 1 else MAX_PARTITIONS
        return check_partition(topic, partition, most)

    def read(
        self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None,
        limit: int | None = None,
    ) -> list[Event]:  # fmt: skip
        """At most `limit` events with `after < id <= upto`, of one partition or of all, in order."""
        wanted = self._partition(topic, partition)
        with self._database.connection() as connection:
            return fetch(connection, self._queries, topic, partition=wanted, after=after, upto=upto, limit=limit)

    def stream(
        self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None, batch: int = 5_000
    ) -> Iterator[list[Event]]:
        """The same events in lists of at most `batch`, each read when it is needed; ends at the log's end."""
        while events := self.read(topic, after=after, upto=upto, partition=partition, limit=batch):
            yield events
            after = events[-1].id

    def end(self, topic: str, partition: int | None = None) -> int:
        """The newest offset of a topic or of one partition; 0 when it is empty."""
        return int(self._scalar("end", topic, partition))

    def count(self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None) -> int:
        """How many events there are with `after < id <= upto`."""
        return int(self._scalar("count", topic, partition, after=after, upto=MAX_OFFSET if upto is None else upto))

    def seconds_behind(self, topic: str, *, after: int, partition: int | None = None) -> float:
        """Seconds since the first event after an offset was published; 0 when there is none."""
        return max(0.0, float(self._scalar("oldest", topic, partition, after=after) or 0.0))

    def _scalar(self, name: str, topic: str, partition: int | None, **values: int) -> Any:
        wanted = self._partition(topic, partition)
        query = self._queries(name if wanted == NOT_PARTITIONED else f"{name}_partition", topic=topic)
        row = query_first(self._database, query, {"partition": wanted, **values}, prepare=False)
        return None if row is None else row[0]
