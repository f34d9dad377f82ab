"""Reading the shards of a set as one: the union of their topics, each event with its shard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import EqualTo, Filter, In, InputPartition, IsNotNull
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StringType, StructField, StructType

from eventsql_orchestration import EventSQL, OffsetRange, Publication, Topic
from eventsql_orchestration.errors import (
    ConfigurationError,
    DataLossError,
    EventSQLError,
    SchemaOutdatedError,
    ShardSetError,
    ShardUnavailableError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import Retention
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import BatchReader, FilteringReader, read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from tests.conftest import Prepared
from tests.shards.conftest import Databases, databases

__all__ = ["databases"]

EVENTS = 600
DOWN = "postgresql://nobody@127.0.0.1:1/nowhere"

ALL = read_schema(headers=True, shards=True)
ONE = read_schema(headers=True)


def prepare(platform: EventSQL) -> None:
    """Make 600 events of 40 keys in a topic of 2 partitions."""
    platform.registry.register_topic(Topic("orders", partitions=2))
    publish(platform, range(EVENTS))


@pytest.fixture
def urls(databases: Databases, prepared: Prepared) -> list[str]:
    return databases(2, prepared(prepare, databases=2))


@pytest.fixture
def platform(urls: list[str]) -> Iterator[EventSQL]:
    """Two shards, prepared."""
    with EventSQL(*urls, transfer=False) as platform:
        yield platform.open()


@pytest.fixture
def dsn(platform: EventSQL, urls: list[str]) -> str:
    return " ".join(urls)


def publish(platform: EventSQL, numbers: Iterable[int], topic: str = "orders") -> None:
    platform.publisher.publish_all(
        Publication(topic, b'{"number": %d}' % number, key=f"key-{number % 40}", metadata={"number": str(number)})
        for number in numbers
    )
    platform.transfer.run_once()


def events_of(platform: EventSQL, topic: str = "orders") -> dict[str, list[Any]]:
    """The events of each shard, by its own reader."""
    return {str(shard.name): shard.reader.read(topic) for shard in platform.shards}


def sizes(platform: EventSQL) -> dict[str, int]:
    return {shard: len(events) for shard, events in events_of(platform).items()}


def reader_of(dsn: str, **options: object) -> BatchReader:
    given = {"dsn": dsn, "subscribe": "orders", **{name: str(value) for name, value in options.items()}}
    reader = EventSQLDataSource(given).reader(ALL)
    assert isinstance(reader, BatchReader)
    return reader


def ranges_of(splits: Sequence[InputPartition]) -> list[tuple[str, OffsetRange]]:
    return [(piece.shard.name, piece.offsets) for split in splits for piece in split.value if piece.shard is not None]


def columns_of(reader: BatchReader, *names: str) -> list[tuple[Any, ...]]:
    batches = [batch for split in reader.partitions() for batch in reader.read(split)]
    return sorted(row for batch in batches for row in zip(*(batch[name].to_pylist() for name in names), strict=True))


def load(spark: SparkSession, dsn: str, **options: object) -> DataFrame:
    given = {"dsn": dsn, "subscribe": "orders", **{name: str(value) for name, value in options.items()}}
    return spark.read.format(FORMAT).options(**given).load()


def test_several_urls_are_one_frame_in_which_each_event_has_its_shard(
    spark: SparkSession, platform: EventSQL, dsn: str
) -> None:
    frame = load(spark, dsn, includeHeaders=True, numPartitions=3)
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "headers", "shard"]
    assert frame.rdd.getNumPartitions() == 3
    expected = [
        Row(
            key=event.key,
            value=bytearray(event.value),
            topic="orders",
            partition=event.partition,
            offset=event.id,
            timestamp=event.buffered_at.replace(tzinfo=None),
            headers=dict(event.metadata),
            shard=shard,
        )
        for shard, events in sorted(events_of(platform).items())
        for event in events
    ]
    assert sorted(frame.collect(), key=lambda row: (row["shard"], row["offset"])) == expected
    assert len(expected) == EVENTS
    assert min(sizes(platform).values()) > 0


def test_the_order_of_the_urls_does_not_matter(platform: EventSQL, dsn: str, urls: list[str]) -> None:
    wanted = sorted((shard, event.id, event.key) for shard, found in events_of(platform).items() for event in found)
    assert columns_of(reader_of(dsn), "shard", "offset", "key") == wanted
    assert columns_of(reader_of("\n".join(reversed(urls))), "shard", "offset", "key") == wanted


def test_tasks_are_even_over_all_shards(platform: EventSQL, dsn: str) -> None:
    splits = reader_of(dsn, numPartitions=7).partitions()
    events = [sum(piece.offsets.upto - piece.offsets.after for piece in split.value) for split in splits]
    assert len(events) == 7
    assert sum(events) == EVENTS
    assert max(events) - min(events) <= 1


def test_only_the_columns_asked_for_are_given(platform: EventSQL, dsn: str) -> None:
    source = EventSQLDataSource({"dsn": dsn, "subscribe": "orders"})
    reader = source.reader(StructType([StructField("shard", StringType())]))
    (split,) = reader.partitions()
    found = [name for batch in reader.read(split) for name in batch["shard"].to_pylist()]
    assert {name: found.count(name) for name in found} == sizes(platform)


def test_one_url_is_read_as_one_database(spark: SparkSession, platform: EventSQL, dsn: str, urls: list[str]) -> None:
    frame = load(spark, urls[0], startingOffsets=1)
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert frame.count() == len(platform.shards[0].reader.read("orders"))
    with pytest.raises(ValidationError, match="there is no column 'shard' where dsn names one database"):
        reader_of(urls[0])


def test_one_database_is_not_asked_about_shards(
    platform: EventSQL, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventsql_orchestration.spark.multi_log_planner.ShardStore", None)
    source = EventSQLDataSource({"dsn": urls[0], "subscribe": "orders"})
    pieces = [piece for split in source.reader(ONE).partitions() for piece in split.value]
    assert [piece.shard for piece in pieces] == [None]
    stream = source.streamReader(ONE)
    try:
        start = stream.initialOffset()
        assert stream.latestOffset(start, ReadAllAvailable()) == start
    finally:
        stream.stop()


def test_values_are_decoded_and_a_misfit_names_its_shard(spark: SparkSession, platform: EventSQL, dsn: str) -> None:
    frame = load(spark, dsn, valueSchema="number INT", numPartitions=1)
    assert frame.columns[-1] == "shard"
    assert sorted(row.number for row in frame.select("value.number").collect()) == list(range(EVENTS))
    schema = frame.schema
    second = platform.shards[1]
    second.publisher.publish(Publication("orders", b"no JSON", key=next(e.key for e in events_of(platform)["shard-2"])))
    second.transfer.run_once()
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": "orders", "mode": "FAILFAST"}).reader(schema)
    assert isinstance(reader, BatchReader)
    with pytest.raises(ValidationError, match=r"shard 'shard-2': column 'value': event \d+ of topic 'orders' is not"):
        columns_of(reader, "offset")


# Filters


def filtering(dsn: str, *filters: Filter, **options: str) -> tuple[FilteringReader, list[Filter]]:
    given = {"dsn": dsn, "subscribe": "orders", **options}
    reader = FilteringReader(ReadOptions.parse(given, streaming=False), ALL)
    return reader, list(reader.pushFilters(list(filters)))


def test_a_filter_on_the_shard_leaves_the_others_alone(platform: EventSQL, dsn: str, urls: list[str]) -> None:
    one = IsNotNull(("shard",)), EqualTo(("shard",), "shard-1")
    reader, left = filtering(dsn, *one)
    assert left == [IsNotNull(("shard",))]
    assert {shard for shard, _ in columns_of(reader, "shard", "offset")} == {"shard-1"}
    # The other one may even be down.
    reader, _ = filtering(f"{urls[0]} {DOWN}", *one)
    assert len(columns_of(reader, "offset")) == sizes(platform)["shard-1"]
    reader, _ = filtering(dsn, In(("shard",), ("shard-1", "shard-2")))
    assert len(columns_of(reader, "offset")) == EVENTS
    reader, _ = filtering(dsn, EqualTo(("shard",), "shard-9"))
    assert reader.partitions() == []
    begin = '{"orders": {"shard-1": 1, "shard-2": "earliest"}}'
    reader, _ = filtering(dsn, EqualTo(("shard",), "shard-9"), startingOffsets=begin)
    assert reader.partitions() == []


def test_spark_pushes_a_filter_on_the_shard(
    pushing: None, spark: SparkSession, platform: EventSQL, dsn: str, urls: list[str]
) -> None:
    frame = load(spark, f"{DOWN} {urls[1]}", pushFilters=True).where("shard = 'shard-2' AND key = 'key-1'")
    wanted = [event for event in events_of(platform)["shard-2"] if event.key == "key-1"]
    assert frame.count() == len(wanted)


# Where a read begins and ends


def test_each_shard_has_offsets_of_its_own(platform: EventSQL, dsn: str) -> None:
    size = sizes(platform)
    starting = {"orders": {"shard-1": 11, "shard-2": "earliest"}}
    ending = {"orders": {"shard-1": -1, "shard-2": 21}}
    reader = reader_of(dsn, startingOffsets=json.dumps(starting), endingOffsets=json.dumps(ending), numPartitions=1)
    assert ranges_of(reader.partitions()) == [
        ("shard-1", OffsetRange("orders", -1, 10, size["shard-1"])),
        ("shard-2", OffsetRange("orders", -1, 0, 20)),
    ]
    by_partition = {"orders": {"shard-1": {"0": 101, "1": "earliest"}, "shard-2": "earliest"}}
    found = columns_of(reader_of(dsn, startingOffsets=json.dumps(by_partition)), "shard", "partition", "offset")
    first = [offset for shard, partition, offset in found if (shard, partition) == ("shard-1", 0)]
    assert min(first) > 100
    assert len(found) == EVENTS - sum(
        event.partition == 0 and event.id <= 100 for event in events_of(platform)["shard-1"]
    )


def test_a_time_holds_on_all_shards(platform: EventSQL, dsn: str) -> None:
    now = datetime.now(UTC).isoformat()
    with pytest.raises(ValidationError, match="option startingTimestamp: topic 'orders' has no event since"):
        reader_of(dsn, startingTimestamp=now).partitions()
    # A shard that got nothing since has nothing to read.
    only = next(event.key for event in events_of(platform)["shard-2"])
    platform.publisher.publish(Publication("orders", b"new", key=only))
    platform.transfer.run_once()
    assert columns_of(reader_of(dsn, startingTimestamp=now), "shard", "value") == [("shard-2", b"new")]
    reader, _ = filtering(dsn, EqualTo(("shard",), "shard-1"), startingTimestamp=now)
    assert reader.partitions() == []
    assert len(columns_of(reader_of(dsn, endingTimestamp=now), "offset")) == EVENTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffsets": "5"}, "option startingOffsets: offset 5 belongs to one shard"),
        ({"endingOffsets": '{"orders": 5}'}, "option endingOffsets: offset 5 belongs to one shard"),
        ({"startingOffsets": '{"orders": {"shard-1": 5}}'}, "option startingOffsets: .* lacks shard shard-2"),
        (
            {"startingOffsets": '{"orders": {"shard-1": 5, "shard-2": 1, "shard-3": 1}}'},
            "option startingOffsets: topic 'orders': there is no shard shard-3: name shard-1, shard-2",
        ),
        (
            {"startingOffsets": '{"orders": {"shard-1": 5, "shard-2": 900}}'},
            "shard 'shard-2': option startingOffsets: 900 is out of range",
        ),
        (
            {"startingOffsets": '{"orders": {"shard-1": {"0": 5}, "shard-2": 1}}'},
            "shard 'shard-1': option startingOffsets: topic 'orders' lacks partition 1",
        ),
        ({"claim": "7", "subscribe": None}, "option claim cannot be used here"),
    ],
)
def test_a_bad_option_is_named(platform: EventSQL, dsn: str, options: dict[str, str | None], message: str) -> None:
    given = {"dsn": dsn, "subscribe": "orders", **options}

    def plan() -> None:
        source = EventSQLDataSource({name: value for name, value in given.items() if value is not None})
        source.reader(ALL).partitions()

    with pytest.raises((ValidationError, ConfigurationError), match=message):
        plan()


# Sets of shards


def test_the_databases_must_be_the_shards_of_one_set(platform: EventSQL, urls: list[str], databases: Databases) -> None:
    blank, *others = databases(3)
    for wrong, error, message in [
        (f"{urls[0]} {urls[0]}", ShardSetError, "option dsn: .* are one database"),
        (f"{urls[0]} {blank}", ShardSetError, "option dsn: .* is none of the shards shard-1, shard-2"),
        (" ".join(others), SchemaOutdatedError, "option dsn: these databases are not a set of shards yet"),
        (f"{urls[0]} mysql://x", ConfigurationError, "option dsn: the database must be PostgreSQL"),
    ]:
        with pytest.raises(error, match=message):
            reader_of(wrong).partitions()


def test_a_shard_that_is_down_is_named(platform: EventSQL, dsn: str, urls: list[str]) -> None:
    with pytest.raises(ShardUnavailableError, match="shard 'shard-2' is down: ") as failure:
        reader_of(f"{urls[0]} {DOWN}").partitions()
    assert failure.value.shard == "shard-2"
    # Also where it goes down between the planning of a read and a task.
    planned = reader_of(dsn, numPartitions=2).partitions()
    reader = reader_of(f"{urls[0]} {DOWN}")
    assert sum(batch.num_rows for batch in reader.read(planned[0])) > 0
    with pytest.raises(ShardUnavailableError, match=r"shard 'shard-2' is down: .* its database cannot be reached"):
        list(reader.read(planned[1]))


def test_a_topic_that_one_shard_lacks_is_an_error(platform: EventSQL, dsn: str) -> None:
    platform.shards[1].registry.register_topic(Topic("rides"))
    with pytest.raises(TopicNotFoundError, match=r"shard 'shard-1': .*'rides'"):
        reader_of(dsn, subscribe="rides").partitions()


def test_retention_of_one_shard_is_a_loss_on_that_one(platform: EventSQL, dsn: str) -> None:
    reader = reader_of(dsn, numPartitions=1)
    (planned,) = reader.partitions()
    second = platform.shards[1]
    second.registry.set_retention("orders", Retention(events=1))
    second.retention.run_once()
    publish(platform, range(EVENTS, EVENTS + 40))
    second.retention.run_once()
    with pytest.raises(DataLossError, match="shard 'shard-2': events from offset 1 on of topic 'orders' were dropped"):
        list(reader.read(planned))
    left = [event.id for event in second.reader.read("orders")]
    assert [offset for shard, offset in columns_of(reader_of(dsn), "shard", "offset") if shard == "shard-2"] == left


def test_an_error_of_a_task_is_found_in_spark_s(spark: SparkSession, platform: EventSQL, urls: list[str]) -> None:

    with pytest.raises(Exception, match="shard-2") as failure:
        load(spark, f"{urls[0]} {DOWN}").count()
    error = eventsql_error(failure.value)
    assert isinstance(error, EventSQLError)
    assert error.message.startswith("shard 'shard-2' is down: ")
