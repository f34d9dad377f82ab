"""A stream's progress as that of a registered consumer: it shows as lag and holds retention back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eventsql_orchestration.consumer import ConsumerState, EventFilter
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import ConsumerNotFoundError, PartitionLeasedError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.spark.log_planner import Lane, Logs
from eventsql_orchestration.topics.layouts import Layouts


class StreamProgress:
    """Moves the offsets of a consumer that is registered for every topic of a stream."""

    def __init__(self, logs: Logs, consumer: str) -> None:
        """Raises `ConsumerNotFoundError`, or `ValidationError` if the consumer cannot hold the stream's offsets."""
        self._logs = logs
        self._consumer = consumer
        self._queries = Queries("spark_read", logs.database.schema)
        self._log_queries = Queries("log", logs.database.schema)
        self._layouts = Layouts(logs.database)
        self._filters: dict[str, EventFilter | None] = {}
        self._written: dict[Lane, int] = {}
        for lane in logs.lanes:
            states = self._states(lane)
            self._filters[lane.topic] = states[0].filter
            if lane.partition != NOT_PARTITIONED and states[0].partition == NOT_PARTITIONED:
                raise ValidationError(
                    f"option consumer: {consumer!r} is not partitioned and cannot hold the offset of {lane} alone"
                )

    def _states(self, lane: Lane) -> list[ConsumerState]:
        try:
            return self._logs.registry.consumer(lane.topic, self._consumer)
        except ConsumerNotFoundError as error:
            raise ConsumerNotFoundError(f"option consumer: {error}") from None

    @property
    def filters(self) -> Mapping[str, EventFilter | None]:
        """The consumer's filter for each topic."""
        return self._filters

    def start(self, lane: Lane) -> int:
        """The first offset that the consumer has not consumed in all partitions of a lane."""
        states = self._states(lane)
        # The consumer has no row for a partition that the topic has lost: it has consumed that partition.
        return 1 + min(
            (state.last_event_id for state in states if lane.partition in (NOT_PARTITIONED, state.partition)),
            default=max(state.last_event_id for state in states),
        )

    def write(self, lane: Lane, upto: int) -> None:
        """Record that everything up to an offset is processed. An offset never moves back.

        Raises `PartitionLeasedError` if another owner consumes the same partition.
        """
        if self._written.get(lane, -1) >= upto:
            return
        with self._logs.database.transaction() as connection:
            locked = self._lock(connection, lane)
            for partition, offset, _ in locked:
                if offset < upto:
                    self._advance(connection, lane.topic, partition, offset, upto)
        self._written[lane] = upto
        if any(waits for *_, waits in locked):
            # The consumer has reached the offset at which the topic was repartitioned.
            while self._layouts.settle(lane.topic, self._consumer).entered:
                pass

    def _lock(self, connection: Connection, lane: Lane) -> Sequence[tuple[int, int, bool]]:
        """The consumer's partitions of a lane: number, offset, and whether it waits for the topic's next layout."""
        rows = connection.execute(
            self._queries("lock_partitions"),
            {
                "topic": lane.topic,
                "consumer": self._consumer,
                "partition": None if lane.partition == NOT_PARTITIONED else lane.partition,
            },
        ).fetchall()
        if not rows:
            # The topic has lost this partition, or the consumer was deleted, which `_states` reports.
            self._states(lane)
        for partition, _, owner, _ in rows:
            if owner is not None:
                raise PartitionLeasedError(
                    f"option consumer: {owner} also consumes {self._consumer!r} partition {partition} of topic "
                    f"{lane.topic!r}: a stream needs its own consumer"
                )
        return [(partition, offset, waits) for partition, offset, _, waits in rows]

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
