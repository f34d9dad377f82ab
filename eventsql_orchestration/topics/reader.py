"""Reading a topic's log by offsets, without consuming it."""

from __future__ import annotations

from collections.abc import Iterator

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database
from eventsql_orchestration.model import NOT_PARTITIONED, Event, check_partition
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.reading import MAX_OFFSET, LogReader
from eventsql_orchestration.topics.layouts import Layouts
from eventsql_orchestration.topics.registry import Registry


@checked
class Reader:
    """Reads any range of any topic, as often as wanted."""

    def __init__(self, database: Database, registry: Registry) -> None:
        self._database = database
        self._registry = registry
        self._layouts = Layouts(database)
        self._log = LogReader(database.schema)

    def _partition(self, topic: str, partition: int | None) -> int:
        found = self._registry.cached_topic(topic)
        if partition is None:
            return NOT_PARTITIONED
        most = found.partitions
        if partition >= max(most, 0):
            # A repartitioned topic may have had more partitions. It may have been repartitioned a moment ago.
            self._registry.forget(topic)
            most = self._layouts.most_partitions(self._registry.cached_topic(topic))
        return check_partition(topic, partition, most)

    def read(
        self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None,
        limit: int | None = None,
    ) -> list[Event]:  # fmt: skip
        """At most `limit` events with `after < id <= upto`, of one partition or of all, in order."""
        wanted, bound = self._partition(topic, partition), MAX_OFFSET if upto is None else upto
        with self._database.connection() as connection:
            return self._log.read(connection, topic, partition=wanted, after=after, upto=bound, limit=limit)

    def stream(
        self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None, batch: int = 5_000
    ) -> Iterator[list[Event]]:
        """As `read`, in lists of at most `batch` events, each read when it is needed; ends at the log's end.

        A list ends early with the event whose value makes `BATCH_BYTES` full.
        """
        wanted, bound = self._partition(topic, partition), MAX_OFFSET if upto is None else upto
        while True:
            with self._database.connection() as connection:
                events, _ = self._log.read_batch(
                    connection, topic, partition=wanted, after=after, upto=bound, limit=batch
                )
            if not events:
                return
            yield events
            after = events[-1].id

    def end(self, topic: str, partition: int | None = None) -> int:
        """The newest offset of a topic or of one partition; 0 when it is empty."""
        wanted = self._partition(topic, partition)
        with self._database.connection() as connection:
            return self._log.end(connection, topic, wanted)

    def floor(self, topic: str) -> int:
        """The first offset that retention has left of a topic; 0 if it never dropped anything."""
        self._registry.cached_topic(topic)
        with self._database.connection() as connection:
            return segments.floor(connection, self._database.schema, topic)

    def count(self, topic: str, *, after: int = 0, upto: int | None = None, partition: int | None = None) -> int:
        """How many events there are with `after < id <= upto`."""
        wanted, bound = self._partition(topic, partition), MAX_OFFSET if upto is None else upto
        with self._database.connection() as connection:
            return self._log.count(connection, topic, partition=wanted, after=after, upto=bound)

    def seconds_behind(self, topic: str, *, after: int, partition: int | None = None) -> float:
        """Seconds since the first event after an offset was published; 0 when there is none."""
        wanted = self._partition(topic, partition)
        with self._database.connection() as connection:
            seconds = self._log.seconds_behind(connection, topic, partition=wanted, after=after)
        return max(0.0, seconds or 0.0)
