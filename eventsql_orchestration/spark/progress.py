"""A stream's progress as the offset of a registered consumer: it shows as lag and holds retention back."""

from __future__ import annotations

from collections.abc import Sequence

from eventsql_orchestration.consumer import ConsumerState, EventFilter
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import PartitionLeasedError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.spark.log_planner import Logs, TopicPartition
from eventsql_orchestration.spark.options import naming_option
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.layouts import Layouts


class StreamProgress:
    """Moves the offsets of a consumer that is registered for every topic of a stream."""

    def __init__(self, logs: Logs, consumer: str) -> None:
        """Raises `ConsumerNotFoundError`, or `ValidationError` if the consumer cannot hold the stream's offsets."""
        self._logs = logs
        self._consumer = consumer
        self._queries = Queries("spark_read", logs.database.schema)
        self._log = LogReader(logs.database.schema)
        self._layouts = Layouts(logs.database)
        self.filters: dict[str, EventFilter | None] = {}
        """The consumer's filter for each topic."""
        self._written: dict[TopicPartition, int] = {}
        self._left_at: dict[tuple[str, int], int] = {}
        """The offset of each partition of the consumer, as this stream has left it."""
        for tp in logs.topic_partitions:
            states = self._states(tp)
            self.filters[tp.topic] = states[0].filter
            if tp.partition != NOT_PARTITIONED and states[0].partition == NOT_PARTITIONED:
                raise ValidationError(
                    f"option consumer: {consumer!r} is not partitioned and cannot hold the offset of {tp} alone"
                )

    def _states(self, tp: TopicPartition) -> list[ConsumerState]:
        with naming_option("option consumer"):
            return self._logs.registry.consumer(tp.topic, self._consumer)

    def start(self, tp: TopicPartition) -> int:
        """The first offset that the consumer has not consumed."""
        states = self._states(tp)
        # The consumer has no row for a partition that the topic has lost: it has consumed that partition.
        return 1 + min(
            (state.last_event_id for state in states if tp.partition in (NOT_PARTITIONED, state.partition)),
            default=max(state.last_event_id for state in states),
        )

    def write(self, tp: TopicPartition, upto: int) -> None:
        """Record that everything up to an offset is processed. An offset never moves back.

        Raises `PartitionLeasedError` if another owner consumes the same partition, or another stream has come further
        with this consumer: retention may then drop events that this stream has not read.
        """
        if self._written.get(tp, -1) >= upto:
            return
        with self._logs.database.transaction() as connection:
            locked = self._lock(connection, tp)
            for partition, offset, _ in locked:
                if offset > max(upto, self._left_at.get((tp.topic, partition), offset)):
                    raise PartitionLeasedError(
                        f"option consumer: another stream, or a seek, has moved {self._consumer!r} partition "
                        f"{partition} of topic {tp.topic!r} to offset {offset}, and this stream is at {upto}: a stream "
                        "needs its own consumer. A DataFrame with two queries, or twice in one query, is two streams: "
                        "load it twice, with a consumer each"
                    )
                if offset < upto:
                    self._advance(connection, tp.topic, partition, offset, upto)
        self._written[tp] = upto
        self._left_at |= {(tp.topic, partition): max(offset, upto) for partition, offset, _ in locked}
        if any(waits for *_, waits in locked):
            # The consumer has reached the offset at which the topic was repartitioned.
            while self._layouts.settle(tp.topic, self._consumer).entered:
                pass

    def _lock(self, connection: Connection, tp: TopicPartition) -> Sequence[tuple[int, int, bool]]:
        """Lock the consumer's partitions: number, offset, and whether each waits for the topic's next layout."""
        partition = None if tp.partition == NOT_PARTITIONED else tp.partition
        values = {"topic": tp.topic, "consumer": self._consumer, "partition": partition}
        rows = connection.execute(self._queries("lock_partitions"), values).fetchall()
        if not rows:
            # The topic has lost this partition, or the consumer was deleted, which `_states` reports.
            self._states(tp)
        for partition, _, owner, _ in rows:
            if owner is not None:
                raise PartitionLeasedError(
                    f"option consumer: {owner} also consumes {self._consumer!r} partition {partition} of topic "
                    f"{tp.topic!r}: a stream needs its own consumer"
                )
        return [(partition, offset, waits) for partition, offset, _, waits in rows]

    def _advance(self, connection: Connection, topic: str, partition: int, after: int, upto: int) -> None:
        values = {"topic": topic, "consumer": self._consumer, "partition": partition, "after": after, "upto": upto}
        events, first = self._log.extent(connection, topic, partition=partition, after=after, upto=upto)
        connection.execute(self._queries("advance"), {**values, "first": first, "consumed": events})
