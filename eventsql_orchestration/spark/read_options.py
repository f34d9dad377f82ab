"""The options of a read, checked: topics and partitions, begin and end, number of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.spark.offset_bounds import OffsetBounds, is_whole, object_in, parse_bounds
from eventsql_orchestration.spark.options import (
    ENDS,
    READ,
    STARTS,
    Given,
    Source,
    TaskOptions,
    checked_topic,
    naming_option,
)
from eventsql_orchestration.validation import MAX_BIGINT, check_name


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read.

    `topics` has the partitions of each topic, None for the whole topic. It is empty with a `claim`, whose row names the
    topic.
    """

    source: Source
    topics: Mapping[str, tuple[int, ...] | None]
    claim: int | None
    starting: OffsetBounds
    ending: OffsetBounds
    start_late: bool
    tasks: TaskOptions
    max_events: int | None
    headers: bool
    fail_on_data_loss: bool
    filter: EventFilter | None
    push_filters: bool
    consumer: str | None
    fail_fast: bool

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        """Raises `ConfigurationError` or `ValidationError`."""
        given = Given(options, READ)
        source = given.source()
        several = len(source.urls) > 1
        if streaming:
            given.refuse("a stream has no end", *ENDS)
            given.refuse("a stream keeps its progress in its checkpoint", "claim")
            given.refuse("a stream has the filter of its consumer", "filter")
            given.refuse("Spark pushes no filters to a stream", "pushFilters")
        else:
            given.refuse("it is for streams, endingOffsets ends a batch", "maxOffsetsPerTrigger")
            given.refuse("it is for streams, a batch consumes nothing", "consumer")
            given.refuse("it is for streams", "startingOffsetsByTimestampStrategy")
        claim = given.number("claim", 1, MAX_BIGINT)
        if several:
            given.refuse("a claim belongs to one shard, and dsn names several: name that shard's URL alone", "claim")
        topics = _topics(given, claimed=claim is not None)
        starting = parse_bounds(given, STARTS, topics, default="latest" if streaming else "earliest", several=several)
        ending = parse_bounds(given, ENDS, topics, default="latest", several=several)
        if not streaming and "latest" in starting.bounds:
            raise ValidationError(f"option {starting.option}: 'latest' is for streams: a batch would read no event")
        if "earliest" in ending.bounds:
            raise ValidationError(f"option {ending.option}: 'earliest' is before every event: the read would be empty")
        consumer = given.text("consumer")
        with naming_option("option consumer"):
            if consumer is not None:
                check_name("consumer name", consumer)
        return cls(
            source=source,
            topics=topics,
            claim=claim,
            starting=starting,
            ending=ending,
            start_late=given.word("startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
            tasks=TaskOptions.of(given),
            max_events=given.number("maxOffsetsPerTrigger", 1, MAX_BIGINT),
            headers=given.flag("includeHeaders"),
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            filter=_filter(given),
            push_filters=given.flag("pushFilters"),
            consumer=consumer,
            fail_fast=given.word("mode", ("permissive", "failfast")) == "failfast",
        )

    def on(self, shard: str) -> ReadOptions:
        return replace(self, starting=self.starting.on(shard), ending=self.ending.on(shard))


def _topics(given: Given, *, claimed: bool) -> dict[str, tuple[int, ...] | None]:
    if claimed:
        given.refuse("the claim names the topic and the range", "subscribe", "assign", "partition", *STARTS, *ENDS)
        given.refuse("the claim has the filter of its consumer", "filter")
        return {}
    given.exclusive("assign", "subscribe", "partition")
    if (assigned := given.text("assign")) is not None:
        return _assigned(assigned)
    text = given.text("subscribe")
    if text is None:
        raise ConfigurationError(
            "option subscribe is missing: name the topics to read, or give assign or claim, or aggregates to read the "
            "event store"
        )
    partition = given.number("partition", NOT_PARTITIONED, MAX_BIGINT, default=NOT_PARTITIONED)
    partitions = None if partition == NOT_PARTITIONED else (partition,)
    return {checked_topic("subscribe", name.strip()): partitions for name in text.split(",")}


def _assigned(text: str) -> dict[str, tuple[int, ...] | None]:
    topics: dict[str, tuple[int, ...] | None] = {}
    for topic, partitions in object_in("assign", text, '{"orders": [0, 2]}').items():
        if not isinstance(partitions, list) or not partitions or not all(map(is_whole, partitions)):
            raise ValidationError(f"option assign: topic {topic!r} needs a list of partitions, such as [0, 2]")
        whole = partitions == [NOT_PARTITIONED]
        topics[checked_topic("assign", topic)] = None if whole else tuple(sorted(set(partitions)))
    if not topics:
        raise ValidationError("option assign names no topic")
    return topics


def _filter(given: Given) -> EventFilter | None:
    text = given.text("filter")
    if text is None:
        return None
    conditions = object_in("filter", text, '{"keys": ["ann"]}')
    with naming_option("option filter"):
        return EventFilter.from_json(conditions)
