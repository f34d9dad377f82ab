"""The driver's questions to the logs of one database while it plans a read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar, cast

from psycopg.errors import InsufficientPrivilege, ReadOnlySqlTransaction

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.rows import query_first
from eventsql_orchestration.errors import ClaimLostError, ClaimNotFoundError, EventSQLError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange, Topic, check_partition
from eventsql_orchestration.sharding import ShardSet
from eventsql_orchestration.spark.log_tasks import report_loss
from eventsql_orchestration.spark.offset_bounds import FIRST, Bound, OffsetBounds
from eventsql_orchestration.spark.options import naming_option
from eventsql_orchestration.spark.ranges import SAMPLE, Interval, Occupied, Stretch, equal_parts
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.shards import ALONE, ReadShard, naming
from eventsql_orchestration.storage import segments
from eventsql_orchestration.storage.log_form import stored_table
from eventsql_orchestration.storage.ranges import LogRanges
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.layouts import Layouts
from eventsql_orchestration.topics.offsets import offset_of
from eventsql_orchestration.topics.positions import AtTime
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import MAX_BIGINT

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_its_shard(method: _Method) -> _Method:
    """Add the shard's name to the errors of a method of `Logs`."""

    @wraps(method)
    def named(logs: Logs, *args: object, **kwargs: object) -> object:
        with naming(logs.shard):
            return method(logs, *args, **kwargs)

    return cast("_Method", named)


@dataclass(frozen=True, slots=True)
class TopicPartition:
    """The unit that has an offset: a topic or one of its partitions, and its shard if there are several."""

    topic: str
    partition: int = NOT_PARTITIONED
    shard: str | None = None

    @property
    def log(self) -> tuple[str | None, str]:
        """The shard and the topic: all partitions share one log."""
        return self.shard, self.topic

    @property
    def whole(self) -> str:
        """The name of the log, for a message."""
        return f"topic {self.topic!r}" + ("" if self.shard is None else f" of shard {self.shard!r}")

    def __str__(self) -> str:
        return f"topic {self.topic!r}" + ("" if self.partition == NOT_PARTITIONED else f" partition {self.partition}")


@dataclass(frozen=True, slots=True)
class Extent:
    """The bounds of a log.

    `floor` is the first offset that retention has left, 0 if it never dropped anything. `end` is the newest event's
    offset, 0 without events. `newest` is the newest offset that was given out. All events up to `settled` are visible,
    and no other event up to there will appear.
    """

    floor: int
    end: int
    newest: int
    settled: int


class Logs:
    """The logs of the topics of a read in one database."""

    def __init__(self, options: ReadOptions, database: Database, shard: ReadShard | None = None) -> None:
        """`shard` is the database's shard if there are several; then `options` are the options of that shard.

        Raises `TopicNotFoundError` or `PartitionOutOfRangeError`.
        """
        self._options = options
        self.shard = shard
        self.database = database
        self._schema = database.schema
        self._queries = Queries("spark_read", self._schema)
        self._log_queries = Queries("log", self._schema)
        self._log = LogReader(self._schema)
        self._ranges = LogRanges(self._schema)
        self.registry = Registry(database)
        self._own: ShardSet | None = None
        self.created: dict[str, str] = {}
        """The time when each topic was created: the identity of its log."""
        self.topic_partitions = [tp for topic in self._found_topics() for tp in self._partitions_of(topic)]

    @property
    def name(self) -> str | None:
        """The shard's name, if there are several databases."""
        return None if self.shard is None else self.shard.name

    @property
    def mark(self) -> str:
        """The name of this database in a checkpoint: the shard's name, if it is a shard."""
        return ALONE if self._own is None else self._own.own

    @_on_its_shard
    def refresh(self) -> None:
        """Find topics that were created again, and new partitions of topics whose partitions each have an offset."""
        topics = self._found_topics()
        if any(each is None and self._partition_bounds(topic) for topic, each in self._options.topics.items()):
            self.topic_partitions = [tp for topic in topics for tp in self._partitions_of(topic)]

    @_on_its_shard
    def check_bounds(self) -> None:
        """Raise `ValidationError` if some partitions have bounds of their own and others have none."""
        for topic in self._options.topics:
            known = [tp.partition for tp in self.topic_partitions if tp.topic == topic]
            for option, given in self._partition_bounds(topic).items():
                if missing := [str(partition) for partition in known if partition not in given]:
                    raise ValidationError(f"option {option}: topic {topic!r} lacks partition {', '.join(missing)}")

    def _partition_bounds(self, topic: str) -> dict[str, Mapping[int, Bound]]:
        """The bounds of single partitions of a topic, by the option that gives them."""
        every = (self._options.starting, self._options.ending)
        return {bounds.option: given for bounds in every if (given := bounds.by_partition(topic)) is not None}

    def _found_topics(self) -> list[Topic]:
        topics = [self.registry.topic(name) for name in self._options.topics]
        self._own = next((topic.shards for topic in topics), None)
        self.created = {each.name: each.created_at.astimezone(UTC).isoformat() for each in topics if each.created_at}
        return topics

    def _partitions_of(self, topic: Topic) -> list[TopicPartition]:
        asked, bounds = self._options.topics[topic.name], self._partition_bounds(topic.name)
        if asked is None and not bounds:
            return [TopicPartition(topic.name, shard=self.name)]

        most = Layouts(self.database).most_partitions(topic)
        read = range(most) if asked is None else asked
        for option, named in {"partition or assign": asked or (), **bounds}.items():
            with naming_option(f"option {option}"):
                for partition in named:
                    check_partition(topic.name, partition, most)
                    if partition not in read:
                        raise ValidationError(f"partition {partition} of topic {topic.name!r} is not read")
        return [TopicPartition(topic.name, partition, self.name) for partition in read]

    @_on_its_shard
    def has_partition(self, topic: str, partition: int) -> bool:
        """Whether a topic has a partition, or may have events of it."""
        return partition < Layouts(self.database).most_partitions(self.registry.topic(topic))

    @_on_its_shard
    def extents(self) -> dict[tuple[str | None, str], Extent]:
        """The bounds of each log."""
        return {(self.name, topic): self._extent(topic) for topic in self._options.topics}

    def _extent(self, topic: str) -> Extent:
        floor = self.floor(topic)
        with self.database.connection() as connection:
            end = self._log.end(connection, topic)
            newest = max(end, segments.newest_id(connection, self._schema, topic))
        settled = end if newest == end else max(end, self._settled(topic))
        return Extent(floor, end, newest, settled)

    @_on_its_shard
    def floor(self, topic: str) -> int:
        """The first offset that retention has left, 0 if it never dropped anything."""
        with self.database.connection() as connection:
            return segments.floor(connection, self._schema, topic)

    def _settled(self, topic: str) -> int:
        """All events up to here are visible, and no other event up to here will appear; 0 if that is not known now.

        Without this, unused ids, such as the ids at the end of a segment, would look unread after retention has dropped
        them.
        """
        try:
            with self.database.transaction() as connection:
                # No writer is active while this holds the topic.
                held = connection.execute(self._log_queries("lock_topic"), {"topic": topic}).fetchone()
                return segments.newest_id(connection, self._schema, topic) if held else 0
        except EventSQLError as error:
            # A read-only role may not lock, and nobody can on a standby.
            if isinstance(error.__cause__, InsufficientPrivilege | ReadOnlySqlTransaction):
                return 0
            raise

    @_on_its_shard
    def start(self, tp: TopicPartition, extent: Extent) -> int:
        """The first offset to read; after the log's end for a time without later events.

        Raises `ValidationError` for an offset that is out of range.
        """
        bounds = self._options.starting
        match bounds.at(tp.topic, tp.partition):
            case "earliest":
                return max(FIRST, extent.floor)
            case "latest":
                return extent.settled + 1
            case int(offset):
                return _within(bounds, tp, offset, extent)
            case datetime() as time:
                return self._first_since(tp, time)

    @_on_its_shard
    def end(self, tp: TopicPartition, extent: Extent) -> int:
        """The end of the read, exclusive. Raises `ValidationError` for an offset that is out of range."""
        bounds = self._options.ending
        match bounds.at(tp.topic, tp.partition):
            case int(offset):
                return _within(bounds, tp, offset, extent)
            case datetime() as time:
                return self._first_since(tp, time)
            case _:
                # Retention may have emptied the log.
                return max(extent.end + 1, extent.floor)

    def _first_since(self, tp: TopicPartition, time: datetime) -> int:
        with self.database.connection() as connection:
            return offset_of(connection, self._schema, tp.topic, AtTime(time)) + 1

    @_on_its_shard
    def check_complete(self, offsets: OffsetRange, floor: int) -> None:
        """Raise `DataLossError` if offsets of a range are below `floor`, or log a warning, as failOnDataLoss says."""
        first, last = offsets.after + 1, min(floor - 1, offsets.upto)
        if first <= last:
            lost_of = TopicPartition(offsets.topic, offsets.partition)
            report_loss(
                f"retention has dropped offsets {first} to {last} of {lost_of}",
                fail=self._options.fail_on_data_loss,
                shard=self.shard,
            )

    def begins_at_offset(self, tp: TopicPartition) -> bool:
        """Whether the read begins at an offset that was given, so that nothing behind it may be missing."""
        return isinstance(self._options.starting.at(tp.topic, tp.partition), int)

    def claimed(self, claim: int) -> tuple[OffsetRange, EventFilter | None]:
        """The unread range of a claim, and the filter of its consumer.

        Raises `ClaimNotFoundError`, and `ClaimLostError` for a claim that is not live.
        """
        row = query_first(self.database, self._queries("claim"), {"claim": claim})
        if row is None:
            raise ClaimNotFoundError(f"option claim: there is no claim {claim}, or its consumer is gone")
        topic, consumer, partition, after, upto, live, position, chosen = row
        if not live:
            raise ClaimLostError(
                f"option claim: claim {claim} of consumer {consumer!r} is committed or released: read the range itself"
            )
        offsets = OffsetRange(topic, partition, min(max(after, position), upto), upto)
        return offsets, EventFilter.from_json(chosen)

    @_on_its_shard
    def waiting(self, tp: TopicPartition, after: int, upto: int, most: int) -> int:
        """The number of events in a range, but at most `most`."""
        with self.database.connection() as connection:
            return self._log.count(connection, tp.topic, partition=tp.partition, after=after, upto=upto, most=most)

    @_on_its_shard
    def end_of_layout(self, topic: str, after: Mapping[TopicPartition, int]) -> int:
        """The last offset of the topic's oldest layout in which one of these partitions has events after its offset."""
        for layout in Layouts(self.database).of(topic):
            # The offset after which the layout begins is the end of the layout before it.
            end = layout.after
            if any(offset < end and self.waiting(tp, offset, end, 1) for tp, offset in after.items()):
                return end
        return MAX_BIGINT

    @_on_its_shard
    def offset_of_nth(self, tp: TopicPartition, after: int, upto: int, nth: int) -> int | None:
        """The offset of the `nth` event of a range; None if it has fewer."""
        with self.database.connection() as connection:
            return self._log.nth(connection, tp.topic, nth, partition=tp.partition, after=after, upto=upto)

    @_on_its_shard
    def occupied(self, offsets: OffsetRange, probes: int) -> Occupied:
        """Where a range holds events, and about how many. Looks into `probes` parts of it."""
        parts = equal_parts(offsets.after, offsets.upto, probes)
        if not parts:
            return Occupied(offsets.after, offsets.upto, [])
        with self.database.connection() as connection:
            found = self._ranges.samples(connection, offsets.topic, offsets.partition, parts, sample=SAMPLE)
        return Occupied(offsets.after, offsets.upto, [Stretch.estimate(*each) for each in found])

    @_on_its_shard
    def table(self, topic: str) -> str:
        """The name of the table that holds a topic's log, for `copy_out`."""
        with self.database.connection() as connection:
            return stored_table(connection, self._schema, topic)

    @_on_its_shard
    def firsts(self, offsets: OffsetRange, parts: Sequence[Interval]) -> list[int | None]:
        """The first event in each part of a range; None for a part without events."""
        with self.database.connection() as connection:
            return self._ranges.firsts(connection, offsets.topic, offsets.partition, parts)

    @_on_its_shard
    def fence(self, generation: int, topic: str) -> int | None:
        """The end of a topic's log when a generation of shards began: keys that moved have no event after it.

        None if that generation has not begun here.
        """
        row = query_first(self.database, self._queries("fence"), {"generation": generation, "topic": topic})
        return None if row is None else int(row[0])


def _within(bounds: OffsetBounds, tp: TopicPartition, offset: int, extent: Extent) -> int:
    if offset > extent.newest + 1:
        raise ValidationError(
            f"option {bounds.option}: {offset} is out of range: topic {tp.topic!r} ends at offset {extent.end}"
        )
    return max(FIRST, offset)
