"""The progress of a stream as a registered consumer's, so that it shows as lag and holds retention back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import ConsumerNotFoundError, PartitionLeasedError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, EventFilter
from eventsql_orchestration.spark.planning import Lane, Logs


class Progress:
    """Moves the offsets of one consumer, which is registered for every topic that a stream reads."""

    def __init__(self, logs: Logs, consumer: str) -> None:
        """Raises `ConsumerNotFoundError`, or `ValidationError` for one that cannot hold the stream's offsets."""
        self._logs = logs
        self._consumer = consumer
        self._queries = Queries("spark_read", logs.database.schema)
        self._log_queries = Queries("log", logs.database.schema)
        self._partitions: dict[Lane, list[int]] = {}
        self._filters: dict[str, EventFilter | None] = {}
        self._written: dict[Lane, int] = {}
        for lane in logs.lanes:
            try:
                states = logs.registry.consumer(lane.topic, consumer)
            except ConsumerNotFoundError as error:
                raise ConsumerNotFoundError(f"option consumer: {error}") from None
            registered = [state.partition for state in states]
            self._filters[lane.topic] = states[0].filter
            if lane.partition == NOT_PARTITIONED:
                self._partitions[lane] = registered
            elif lane.partition in registered:
                self._partitions[lane] = [lane.partition]
            else:
                raise ValidationError(
                    f"option consumer: {consumer!r} is not partitioned and cannot hold the offset of {lane} alone"
                )

    @property
    def filters(self) -> Mapping[str, EventFilter | None]:
        """The consumer's filter for each topic."""
        return self._filters

    def start(self, lane: Lane) -> int:
        """The first offset that the consumer has not consumed in every partition of a lane."""
        states = self._logs.registry.consumer(lane.topic, self._consumer)
        return 1 + min(state.last_event_id for state in states if state.partition in self._partitions[lane])

    def write(self, lane: Lane, upto: int) -> None:
        """Note that everything up to an offset was processed. An offset is never moved back.

        Raises `PartitionLeasedError` where another owner consumes the same partition.
        """
        if self._written.get(lane, -1) >= upto:
            return
        with self._logs.database.transaction() as connection:
            for partition, offset in self._lock(connection, lane):
                if offset < upto:
                    self._advance(connection, lane.topic, partition, offset, upto)
        self._written[lane] = upto

    def _lock(self, connection: Connection, lane: Lane) -> Sequence[tuple[int, int]]:
        rows = connection.execute(
            self._queries("lock_partitions"),
            {"topic": lane.topic, "consumer": self._consumer, "partitions": self._partitions[lane]},
        ).fetchall()
        if len(rows) != len(self._partitions[lane]):
            raise ConsumerNotFoundError(
                f"option consumer: {self._consumer!r} of topic {lane.topic!r} was deleted or redefined"
            )
        for partition, _, owner in rows:
            if owner is not None:
                raise PartitionLeasedError(
                    f"option consumer: {self._consumer!r} partition {partition} of topic {lane.topic!r} is consumed by "
                    f"{owner} as well: a stream needs a consumer of its own"
                )
        return [(partition, offset) for partition, offset, _ in rows]

    def _advance(self, connection: Connection, topic: str, partition: int, after: int, upto: int) -> None:
        name = "extent" if partition == NOT_PARTITIONED else "extent_partition"
        passed = connection.execute(
            self._log_queries(name, topic=topic), {"partition": partition, "after": after, "upto": upto}, prepare=False
        ).fetchone()
        assert passed is not None, "an aggregate gives one row"
        events, first = passed
        connection.execute(
            self._queries("advance"),
            {
                "topic": topic,
                "consumer": self._consumer,
                "partition": partition,
                "upto": upto,
                "first": first,
                "events": events,
            },
        )
