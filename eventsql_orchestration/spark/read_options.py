"""The options of a read, checked: which topics and partitions, from where to where, in how many tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias

from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED, check_topic_name
from eventsql_orchestration.rules import check_name
from eventsql_orchestration.spark.options import DATABASE, MAX_BIGINT, Given, Source

FIRST: Final = 1
"""The first offset that any topic can have."""

_MAX_TASKS: Final = 100_000
_MAX_MILLISECONDS: Final = 10**14

_STARTS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_ENDS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")

_READ: Final = (
    *DATABASE,
    "subscribe",
    "assign",
    "claim",
    "partition",
    *_STARTS,
    "startingOffsetsByTimestampStrategy",
    *_ENDS,
    "minPartitions",
    "numPartitions",
    "maxRecordsPerPartition",
    "maxOffsetsPerTrigger",
    "includeHeaders",
    "failOnDataLoss",
    "pushFilters",
    "consumer",
    "valueSchema",
    "mode",
)

Bound: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""An offset, a time, or an end of the log."""

_KAFKA_NUMBERS: Final[Mapping[int, Bound]] = {-2: "earliest", -1: "latest"}


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a read begins or ends, and the option that says so.

    `topics` has what is given for single topics, or for the single partitions of one. `given` is false where no option
    says anything.
    """

    option: str
    whole: Bound
    topics: Mapping[str, Bound | Mapping[int, Bound]] = field(default_factory=dict)
    given: bool = True

    def by_partition(self, topic: str) -> Mapping[int, Bound] | None:
        given = self.topics.get(topic)
        return given if isinstance(given, Mapping) else None

    def at(self, topic: str, partition: int) -> Bound:
        given = self.topics.get(topic, self.whole)
        return given[partition] if isinstance(given, Mapping) else given


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read.

    `topics` gives the partitions of each topic, None for the topic as a whole; with a `claim`, whose row says it, there
    are none. `tasks` is the number of tasks, `least_tasks` the smallest, None where nothing was asked for.
    """

    source: Source
    topics: Mapping[str, tuple[int, ...] | None]
    claim: int | None
    starting: Edge
    ending: Edge
    start_late: bool
    tasks: int | None
    least_tasks: int | None
    max_events_per_task: int | None
    max_events: int | None
    headers: bool
    fail_on_data_loss: bool
    push_filters: bool
    consumer: str | None
    fail_fast: bool

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        given = Given(options, _READ)
        if streaming:
            for name in _ENDS:
                given.refuse(name, "a stream has no end")
            given.refuse("claim", "a stream keeps its progress in its checkpoint")
            given.refuse("pushFilters", "Spark pushes no filters to a stream")
        else:
            given.refuse("maxOffsetsPerTrigger", "it is for streams, endingOffsets ends a batch")
            given.refuse("consumer", "it is for streams, a batch consumes nothing")
            given.refuse("startingOffsetsByTimestampStrategy", "it is for streams")
        claim = given.number("claim", 1, MAX_BIGINT)
        topics = _topics(given, claimed=claim is not None)
        starting = _edge(given, _STARTS, topics, default="latest" if streaming else "earliest")
        ending = _edge(given, _ENDS, topics, default="latest")
        if not streaming and "latest" in _bounds(starting):
            raise ValidationError(f"option {starting.option}: 'latest' is for streams, a batch would read nothing")
        if "earliest" in _bounds(ending):
            raise ValidationError(f"option {ending.option}: 'earliest' is before every event, nothing would be read")
        given.exclusive("minPartitions", "numPartitions")
        given.exclusive("maxRecordsPerPartition", "numPartitions")
        return cls(
            source=given.source(),
            topics=topics,
            claim=claim,
            starting=starting,
            ending=ending,
            start_late=given.word("startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
            tasks=given.number("numPartitions", 1, _MAX_TASKS),
            least_tasks=given.number("minPartitions", 1, _MAX_TASKS),
            max_events_per_task=given.number("maxRecordsPerPartition", 1, MAX_BIGINT),
            max_events=given.number("maxOffsetsPerTrigger", 1, MAX_BIGINT),
            headers=given.flag("includeHeaders"),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            push_filters=given.flag("pushFilters"),
            consumer=_consumer(given),
            fail_fast=given.word("mode", ("permissive", "failfast")) == "failfast",
        )


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """What the columns of a read depend on. `value` is the DDL of the structs that values are decoded to."""

    headers: bool
    value: str | None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SchemaOptions:
        given = Given(options, _READ)
        return cls(given.flag("includeHeaders"), given.text("valueSchema"))


def _consumer(given: Given) -> str | None:
    name = given.text("consumer")
    if name is not None:
        try:
            check_name("consumer name", name)
        except ValidationError as error:
            raise type(error)(f"option consumer: {error}") from None
    return name


def _topics(given: Given, *, claimed: bool) -> dict[str, tuple[int, ...] | None]:
    if claimed:
        for name in ("subscribe", "assign", "partition", *_STARTS, *_ENDS):
            given.refuse(name, "the claim says what is read")
        return {}
    given.exclusive("subscribe", "assign")
    given.exclusive("partition", "assign")
    if (assigned := given.text("assign")) is not None:
        return _assigned(assigned)
    text = given.text("subscribe")
    if text is None:
        raise ConfigurationError("option subscribe is missing: it names the topics to read; assign or claim may do so")
    partition = given.number("partition", NOT_PARTITIONED, MAX_BIGINT, default=NOT_PARTITIONED)
    partitions = None if partition == NOT_PARTITIONED else (partition,)
    return {_topic("subscribe", name.strip()): partitions for name in text.split(",")}


def _assigned(text: str) -> dict[str, tuple[int, ...] | None]:
    topics: dict[str, tuple[int, ...] | None] = {}
    for topic, partitions in _json_object("assign", text, '{"orders": [0, 2]}').items():
        if not isinstance(partitions, list) or not partitions or not all(map(_is_whole, partitions)):
            raise ValidationError(f"option assign: topic {topic!r} needs a list of partitions, such as [0, 2]")
        whole = partitions == [NOT_PARTITIONED]
        topics[_topic("assign", topic)] = None if whole else tuple(sorted(set(partitions)))
    if not topics:
        raise ValidationError("option assign names no topic")
    return topics


def _topic(option: str, name: str) -> str:
    try:
        return check_topic_name(name)
    except ValidationError as error:
        raise type(error)(f"option {option}: {error}") from None


def _edge(given: Given, names: tuple[str, str, str], topics: Collection[str], *, default: Bound) -> Edge:
    for name in names[1:]:
        given.exclusive(names[0], name)
    given.exclusive(names[1], names[2])
    by_offset, by_time, by_times = names
    if (text := given.text(by_offset)) is not None:
        if text.lstrip().startswith("{"):
            return Edge(by_offset, default, _by_topic(by_offset, text, topics, _offset))
        return Edge(by_offset, _offset(by_offset, text))
    if (text := given.text(by_time)) is not None:
        return Edge(by_time, _time(by_time, text))
    if (text := given.text(by_times)) is not None:
        return Edge(by_times, default, _by_topic(by_times, text, topics, _time))
    return Edge(by_offset, default, given=False)


def _by_topic(option: str, text: str, topics: Collection[str], parse: Any) -> dict[str, Bound | Mapping[int, Bound]]:
    found: dict[str, Bound | Mapping[int, Bound]] = {}
    for topic, bound in _json_object(option, text, '{"orders": 23}').items():
        if topic not in topics:
            raise ValidationError(f"option {option}: topic {topic!r} is not read, {', '.join(topics)} is")
        if not isinstance(bound, dict):
            found[topic] = parse(option, bound)
            continue
        if not all(name.isdecimal() for name in bound):
            raise ValidationError(f"option {option}: the partitions of topic {topic!r} are whole numbers")
        found[topic] = {int(partition): parse(option, each) for partition, each in bound.items()}
    if missing := sorted(set(topics) - found.keys()):
        raise ValidationError(f"option {option}: topic {', '.join(missing)} is missing")
    return found


def _json_object(option: str, text: str, example: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValidationError(f"option {option} is not a JSON object: take one such as {example}")
    return value


def _offset(option: str, value: object) -> Bound:
    if isinstance(value, str) and value.lower() in ("earliest", "latest"):
        return "earliest" if value.lower() == "earliest" else "latest"
    offset = _whole(value)
    if offset is None:
        raise ValidationError(f"option {option}: {value!r} is not a number: take an offset, earliest or latest")
    if not isinstance(value, str) and offset in _KAFKA_NUMBERS:
        return _KAFKA_NUMBERS[offset]
    if not 0 <= offset <= MAX_BIGINT:
        raise ValidationError(f"option {option}: {offset} is out of range: offsets begin with {FIRST}")
    return offset


def _time(option: str, value: object) -> Bound:
    milliseconds = _whole(value)
    if milliseconds is not None:
        if not 0 <= milliseconds <= _MAX_MILLISECONDS:
            raise ValidationError(f"option {option}: {milliseconds} is out of range for milliseconds since 1970")
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
    try:
        time: datetime | None = datetime.fromisoformat(str(value))
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ValidationError(
            f"option {option}: {value!r} is no time: take milliseconds since 1970, or 2026-01-31T12:00:00+00:00"
        )
    return time.astimezone(UTC)


def _whole(value: object) -> int | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounds(edge: Edge) -> list[Bound]:
    """Every bound that an edge has."""
    found: list[Bound] = [] if edge.topics else [edge.whole]
    for given in edge.topics.values():
        found += given.values() if isinstance(given, Mapping) else [given]
    return found
