"""What the driver asks of a topic's log while it plans a read."""

from __future__ import annotations

from typing import Any

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import PartitionOutOfRangeError
from eventsql_orchestration.log.reader import Reader
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange, Topic, check_partition
from eventsql_orchestration.spark.options import ReadOptions
from eventsql_orchestration.spark.splits import PROBES, equal_parts, even_splits


class TopicLog:
    """The log of the topic of a read. Close it, or use it as a context manager."""

    def __init__(self, options: ReadOptions) -> None:
        """Raises `TopicNotFoundError` or `PartitionOutOfRangeError`."""
        self._topic = options.topic
        self._partition = options.partition
        self._tasks = options.tasks
        self._database = Database(
            options.source.dsn, schema=options.source.schema, migrate=False, application_name="eventsql-spark"
        )
        self._queries = Queries("spark", options.source.schema)
        registry = Registry(self._database)
        self._reader = Reader(self._database, registry)
        try:
            self._check(registry.topic(self._topic))
        except BaseException:
            self.close()
            raise

    def _check(self, topic: Topic) -> None:
        if self._partition != NOT_PARTITIONED:
            try:
                check_partition(topic.name, self._partition, topic.partitions)
            except PartitionOutOfRangeError as error:
                raise PartitionOutOfRangeError(f"option partition: {error}") from None

    def __enter__(self) -> TopicLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def end(self) -> int:
        """The newest offset, of all partitions. A log only grows at its end, so all that lies before is decided."""
        return self._reader.end(self._topic)

    def offset_of_nth(self, after: int, upto: int, nth: int) -> int | None:
        """The offset of the `nth` event of a range, None where it holds fewer."""
        rows = self._rows("offset_of_nth", after=after, upto=upto, skip=nth - 1)
        return rows[0][0] if rows else None

    def splits(self, after: int, upto: int) -> list[OffsetRange]:
        """Ranges for as many tasks as were asked for, together exactly this one; none where it holds no event."""
        parts = equal_parts(after, upto, PROBES)
        lows, highs = [low for low, _ in parts], [high for _, high in parts]
        occupied = [(first, last) for first, last in self._rows("occupied", after=lows, upto=highs)]
        return [
            OffsetRange(self._topic, self._partition, low, high)
            for low, high in even_splits(after, upto, occupied, self._tasks)
        ]

    def _rows(self, name: str, **values: object) -> list[tuple[Any, ...]]:
        if self._partition != NOT_PARTITIONED:
            name += "_in_partition"
        with self._database.connection() as connection:
            query = self._queries(name, topic=self._topic)
            return connection.execute(query, {"partition": self._partition, **values}).fetchall()
