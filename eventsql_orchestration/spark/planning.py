"""What the driver asks of the logs while it plans a read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from psycopg.errors import InsufficientPrivilege

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.queries import event_table
from eventsql_orchestration.errors import (
    ClaimLostError,
    EventSQLError,
    PartitionOutOfRangeError,
    ValidationError,
)
from eventsql_orchestration.log import segments
from eventsql_orchestration.log.layouts import Layouts
from eventsql_orchestration.log.positions import AtTime, resolve
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import NOT_PARTITIONED, EventFilter, OffsetRange, Topic, check_partition
from eventsql_orchestration.spark.batches import Piece, report_loss
from eventsql_orchestration.spark.read_options import FIRST, Bound, Edge, ReadOptions
from eventsql_orchestration.spark.splits import (
    EVENTS_PER_TASK,
    PROBES,
    SAMPLE,
    Occupied,
    Stretch,
    equal_parts,
    even_tasks,
)

_LEAST_PROBES: Final = 4
"""Parts of each of many ranges that are planned together."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What has an offset of its own in a read: a topic, or one of its partitions."""

    topic: str
    partition: int = NOT_PARTITIONED

    def __str__(self) -> str:
        return f"topic {self.topic!r}" + ("" if self.partition == NOT_PARTITIONED else f" partition {self.partition}")


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a log reaches: `floor` is the first offset that retention has left, 0 where it never dropped anything.

    `end` is the newest event's offset, 0 where there is none, and `newest` the newest offset that was given out. Every
    event up to `settled` can be seen, and none up to there is still to come.
    """

    floor: int
    end: int
    newest: int
    settled: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The range of a live claim that is left to read, and the filter of its consumer."""

    offsets: OffsetRange
    filter: EventFilter | None


class Logs:
    """The logs of the topics of a read. Close it, or use it as a context manager."""

    def __init__(self, options: ReadOptions) -> None:
        """Raises `TopicNotFoundError` or `PartitionOutOfRangeError`."""
        self._options = options
        self._schema = options.source.schema
        self._database = Database(
            options.source.dsn, schema=self._schema, migrate=False, application_name="eventsql-spark"
        )
        self._queries = Queries("spark_read", self._schema)
        self._log_queries = Queries("log", self._schema)
        self._registry = Registry(self._database)
        try:
            self.lanes = self._found_lanes()
        except BaseException:
            self.close()
            raise

    @property
    def database(self) -> Database:
        return self._database

    @property
    def registry(self) -> Registry:
        return self._registry

    def refresh(self) -> None:
        """Find the partitions that topics have got since."""
        if any(self._follows(topic) for topic in self._options.topics):
            self.lanes = self._found_lanes()

    def check_edges(self) -> None:
        """Raises `ValidationError` where partitions have bounds of their own, and one of them has none."""
        for edge in (self._options.starting, self._options.ending):
            for topic in self._options.topics:
                given = edge.by_partition(topic)
                lanes = [lane.partition for lane in self.lanes if lane.topic == topic]
                if given is not None and (missing := [each for each in lanes if each not in given]):
                    raise ValidationError(
                        f"option {edge.option}: topic {topic!r} lacks partition {', '.join(map(str, missing))}"
                    )

    def _found_lanes(self) -> list[Lane]:
        return [lane for name in self._options.topics for lane in self._lanes_of(self._registry.topic(name))]

    def _edges(self, topic: str) -> Iterator[tuple[str, Iterable[int]]]:
        """The options that give bounds to single partitions of a topic, and these partitions."""
        for edge in (self._options.starting, self._options.ending):
            given = edge.by_partition(topic)
            if given is not None:
                yield edge.option, given

    def _follows(self, topic: str) -> bool:
        """Whether each partition of a topic has an offset of its own, whatever partitions it has."""
        return self._options.topics[topic] is None and any(self._edges(topic))

    def _lanes_of(self, topic: Topic) -> list[Lane]:
        asked = self._options.topics[topic.name]
        wanted = dict.fromkeys(asked or (), "partition")
        for option, given in self._edges(topic.name):
            wanted |= dict.fromkeys(given, option)
        if asked is None and not wanted:
            return [Lane(topic.name)]
        # Events keep the partition that they were published to, also where the topic has fewer by now.
        every = [topic.partitions, *(each.partitions for each in Layouts(self._database).of(topic.name))]
        for partition, option in sorted(wanted.items()):
            try:
                check_partition(topic.name, partition, max(every))
            except PartitionOutOfRangeError as error:
                raise PartitionOutOfRangeError(f"option {option}: {error}") from None
        if asked is None:
            wanted |= dict.fromkeys(range(max(every)), "")
        return [Lane(topic.name, partition) for partition in sorted(wanted)]

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def extent(self, topic: str) -> Extent:
        with self._database.connection() as connection:
            floor = self._floor(connection, topic)
            (end,) = connection.execute(self._log_queries("end", topic=topic), prepare=False).fetchone() or (0,)
            newest = max(end, segments.newest_id(connection, self._schema, topic))
        settled = end if newest == end else max(end, self._settled(topic))
        return Extent(floor, end, newest, settled)

    def floor(self, topic: str) -> int:
        """The first offset that retention has left, 0 where it never dropped anything."""
        with self._database.connection() as connection:
            return self._floor(connection, topic)

    def _floor(self, connection: Connection, topic: str) -> int:
        kept = segments.segments(connection, self._schema, topic) or ()
        return next((each.start for each in kept if not each.detaching), 0)

    def _settled(self, topic: str) -> int:
        """Every event up to here can be seen, and none up to here is still to come; 0 where nobody can tell now.

        Ids that were given out in vain, at the end of a segment above all, would otherwise look unread once retention
        has dropped them.
        """
        try:
            with self._database.transaction() as connection:
                # Its writer has ended, and another cannot begin.
                held = connection.execute(self._log_queries("lock_topic"), {"topic": topic}).fetchone()
                return segments.newest_id(connection, self._schema, topic) if held else 0
        except EventSQLError as error:
            # A role that only reads has no right to lock.
            if isinstance(error.__cause__, InsufficientPrivilege):
                return 0
            raise

    def start(self, edge: Edge, lane: Lane, extent: Extent) -> int:
        """The first offset to read. Raises `ValidationError` for one that is out of range."""
        match edge.at(lane.topic, lane.partition):
            case "earliest":
                return max(FIRST, extent.floor)
            case "latest":
                return extent.settled + 1
            case int(offset):
                offset = max(FIRST, self._within(edge, lane, offset, extent))
                if offset < extent.floor:
                    self.lost(lane, offset, extent.floor)
                return max(offset, extent.floor)
            case time:
                return self._at(edge, lane, time, extent)

    def end(self, edge: Edge, lane: Lane, extent: Extent) -> int:
        """The first offset not to read any more. Raises `ValidationError` for one that is out of range."""
        match edge.at(lane.topic, lane.partition):
            case int(offset):
                return max(FIRST, self._within(edge, lane, offset, extent))
            case datetime() as time:
                return self._first_since(lane, time)
            case _:
                return extent.end + 1

    def _within(self, edge: Edge, lane: Lane, offset: int, extent: Extent) -> int:
        if offset > extent.newest + 1:
            raise ValidationError(
                f"option {edge.option}: {offset} is out of range: topic {lane.topic!r} ends at offset {extent.end}"
            )
        return offset

    def _at(self, edge: Edge, lane: Lane, time: Bound, extent: Extent) -> int:
        assert isinstance(time, datetime), "the other bounds are an offset and a word"
        first = self._first_since(lane, time)
        if first > extent.end and not self._options.start_late:
            raise ValidationError(
                f"option {edge.option}: topic {lane.topic!r} has no event since {time.isoformat()}; a stream with "
                "startingOffsetsByTimestampStrategy=latest begins at the log's end instead"
            )
        return first

    def _first_since(self, lane: Lane, time: datetime) -> int:
        with self._database.connection() as connection:
            found = resolve(connection, self._schema, lane.topic, AtTime(time), {lane.partition: 0})
        return found[lane.partition].offset + 1

    def lost(self, lane: Lane, first: int, floor: int) -> None:
        """Say that offsets are not in the log any more: `DataLossError`, or a warning, as failOnDataLoss has it."""
        report_loss(
            f"offsets {first} to {floor - 1} of {lane} are not in the log any more: retention has dropped them",
            fail=self._options.fail_on_data_loss,
        )

    def claimed(self, claim: int) -> Claimed:
        """Raises `ClaimLostError` for a claim that is not live."""
        with self._database.connection() as connection:
            row = connection.execute(self._queries("claim"), {"claim": claim}).fetchone()
        if row is None:
            raise ClaimLostError(f"option claim: there is no claim {claim}, or its consumer is gone")
        topic, consumer, partition, after, upto, live, position, chosen = row
        if not live:
            raise ClaimLostError(
                f"option claim: claim {claim} of consumer {consumer!r} is committed or released: read the range itself"
            )
        offsets = OffsetRange(topic, partition, min(max(after, position), upto), upto)
        return Claimed(offsets, EventFilter.from_json(chosen))

    def waiting(self, lane: Lane, after: int, upto: int, most: int) -> int:
        """How many events a range holds, at most `most`."""
        ((events,),) = self._rows("count_upto", lane, after=after, upto=upto, most=most)
        return int(events)

    def offset_of_nth(self, lane: Lane, after: int, upto: int, nth: int) -> int | None:
        """The offset of the `nth` event of a range, None where it holds fewer."""
        rows = self._rows("offset_of_nth", lane, after=after, upto=upto, skip=nth - 1)
        return rows[0][0] if rows else None

    def tasks(
        self, ranges: Sequence[OffsetRange], rows: Mapping[str, Sequence[str]] | None = None
    ) -> list[tuple[Piece, ...]]:
        """What each task reads: together exactly the ranges, but for what holds no event.

        `rows` gives the conditions on the events of a topic.
        """
        probes = max(_LEAST_PROBES, PROBES // max(1, len(ranges)))
        occupied = [self._occupied(offsets, probes) for offsets in ranges]
        cut = even_tasks(occupied, self._number_of_tasks(sum(each.events for each in occupied)))
        parts: dict[int, list[tuple[int, int]]] = {}
        for task in cut:
            for index, bounds in task:
                parts.setdefault(index, []).append(bounds)
        firsts = {
            (index, bounds): first
            for index, all_bounds in parts.items()
            for bounds, first in zip(all_bounds, self._firsts(ranges[index], all_bounds), strict=True)
        }
        tasks = [
            tuple(
                Piece(
                    OffsetRange(ranges[index].topic, ranges[index].partition, *bounds),
                    event_table(ranges[index].topic),
                    first,
                    (rows or {}).get(ranges[index].topic, ()),
                )
                for index, bounds in task
                if (first := firsts[index, bounds]) is not None
            )
            for task in cut
        ]
        return [task for task in tasks if task]

    def _number_of_tasks(self, events: int) -> int:
        options = self._options
        if options.tasks is not None:
            return options.tasks
        return max(options.least_tasks or 1, -(-events // (options.max_events_per_task or EVENTS_PER_TASK)))

    def _occupied(self, offsets: OffsetRange, probes: int) -> Occupied:
        parts = equal_parts(offsets.after, offsets.upto, probes)
        lows, highs = [low for low, _ in parts], [high for _, high in parts]
        lane = Lane(offsets.topic, offsets.partition)
        rows = self._rows("occupied", lane, after=lows, upto=highs, sample=SAMPLE) if parts else []
        return Occupied(offsets.after, offsets.upto, [Stretch.estimate(*row) for row in rows])

    def _firsts(self, offsets: OffsetRange, parts: Sequence[tuple[int, int]]) -> list[int | None]:
        lane = Lane(offsets.topic, offsets.partition)
        lows, highs = [low for low, _ in parts], [high for _, high in parts]
        return [first for (first,) in self._rows("firsts", lane, after=lows, upto=highs)]

    def _rows(self, name: str, lane: Lane, **values: object) -> list[tuple[Any, ...]]:
        if lane.partition != NOT_PARTITIONED:
            name += "_in_partition"
        with self._database.connection() as connection:
            query = self._queries(name, topic=lane.topic)
            # Planned for its values: a generic plan does not see how little of a log they name.
            return connection.execute(query, {"partition": lane.partition, **values}, prepare=False).fetchall()
