"""Reads of a topic that got another number of partitions: its events keep theirs, and none is missed or read twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from pyspark.sql.datasource import EqualTo, In
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from eventsql_orchestration import Consumer, EventSQL, Publication, Topic
from eventsql_orchestration.errors import PartitionOutOfRangeError, ValidationError
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import BatchReader, FilteringReader, Reading, read_schema
from eventsql_orchestration.spark.stream import StreamReader

Publish = Callable[..., None]

ALL = ReadAllAvailable()


@pytest.fixture
def repartitioned(platform: EventSQL, orders: str, publish: Publish) -> str:
    """1,000 events over 4 partitions, and 500 over 2."""
    platform.repartitioner.repartition(orders, 2)
    publish(500, first=1_000)
    return orders


def options(dsn: str, topic: str, *, streaming: bool, **given: str) -> ReadOptions:
    return ReadOptions.parse({"dsn": dsn, "subscribe": topic, **given}, streaming=streaming)


def batch(dsn: str, topic: str, **given: str) -> BatchReader:
    return BatchReader(options(dsn, topic, streaming=False, **given), read_schema(headers=False))


def offsets(reader: Reading, splits: object) -> list[int]:
    assert isinstance(splits, list)
    return sorted(
        offset for split in splits for batch in reader.read(split) for offset in batch.column("offset").to_pylist()
    )


def published(platform: EventSQL, topic: str, *partitions: int) -> list[int]:
    return [event.id for event in platform.reader.read(topic) if not partitions or event.partition in partitions]


def test_a_topic_is_read_whole(platform: EventSQL, repartitioned: str, dsn: str) -> None:
    reader = batch(dsn, repartitioned, numPartitions="3")
    assert offsets(reader, reader.partitions()) == published(platform, repartitioned)


def test_a_partition_that_the_topic_has_no_more_is_read(platform: EventSQL, repartitioned: str, dsn: str) -> None:
    reader = batch(dsn, repartitioned, partition="3")
    found = offsets(reader, reader.partitions())
    assert found == published(platform, repartitioned, 3)
    assert found
    with pytest.raises(PartitionOutOfRangeError, match="option partition or assign: partition 4 is out of range"):
        batch(dsn, repartitioned, partition="4").partitions()


@pytest.mark.parametrize("condition", [EqualTo(("partition",), 3), In(("partition",), (1, 3, 9, -1))])
def test_a_filter_on_such_a_partition_finds_its_events(
    platform: EventSQL, repartitioned: str, dsn: str, condition: EqualTo | In
) -> None:
    reader = FilteringReader(
        options(dsn, repartitioned, streaming=False, pushFilters="true"), read_schema(headers=False)
    )
    assert list(reader.pushFilters([condition])) == []
    wanted = condition.value if isinstance(condition.value, tuple) else (condition.value,)
    assert offsets(reader, reader.partitions()) == published(platform, repartitioned, *wanted)


def test_offsets_of_single_partitions_are_those_of_all_that_hold_events(
    platform: EventSQL, repartitioned: str, dsn: str
) -> None:
    with pytest.raises(ValidationError, match="topic 'orders' lacks partition 2, 3"):
        batch(dsn, repartitioned, startingOffsets='{"orders": {"0": -2, "1": -2}}').partitions()
    reader = batch(dsn, repartitioned, startingOffsets='{"orders": {"0": -2, "1": -2, "2": -2, "3": 900}}')
    expected = {*published(platform, repartitioned, 0, 1, 2)}
    expected |= {offset for offset in published(platform, repartitioned, 3) if offset >= 900}
    assert offsets(reader, reader.partitions()) == sorted(expected)


@pytest.fixture
def from_offsets(orders: str, dsn: str) -> Iterator[StreamReader]:
    """A stream of the topic that begins at an offset of each of its four partitions."""
    starting = '{"orders": {"0": -2, "1": -2, "2": -2, "3": -2}}'
    reader = StreamReader(options(dsn, orders, streaming=True, startingOffsets=starting), read_schema(headers=False))
    yield reader
    reader.stop()


def test_a_running_stream_with_offsets_of_partitions_goes_on_with_new_ones(
    platform: EventSQL, publish: Publish, orders: str, from_offsets: StreamReader
) -> None:
    start = from_offsets.initialOffset()
    middle = from_offsets.latestOffset(start, ALL)
    first = offsets(from_offsets, from_offsets.partitions(start, middle))
    platform.repartitioner.repartition(orders, 6)
    publish(200, first=1_000)
    end = from_offsets.latestOffset(middle, ALL)
    assert sorted(end["orders"]["0"]) == list("012345")
    second = offsets(from_offsets, from_offsets.partitions(middle, end))
    assert first == published(platform, orders)[:1_000]
    assert second == published(platform, orders)[1_000:]


def test_a_stream_to_now_reads_nothing_of_a_partition_that_has_come_since(
    platform: EventSQL, publish: Publish, orders: str, from_offsets: StreamReader
) -> None:
    start = from_offsets.initialOffset()
    from_offsets.prepareForTriggerAvailableNow()
    platform.repartitioner.repartition(orders, 6)
    publish(200, first=1_000)
    end = from_offsets.latestOffset(start, ALL)
    assert sorted(end["orders"]["0"]) == list("012345")
    assert offsets(from_offsets, from_offsets.partitions(start, end)) == published(platform, orders)[:1_000]
    assert from_offsets.latestOffset(end, ALL) == end


def test_a_key_keeps_its_order_from_batch_to_batch_though_it_has_changed_its_partition(
    platform: EventSQL, dsn: str
) -> None:
    def publish() -> None:
        platform.publisher.publish_all(Publication("moving", b"", key=f"key-{key % 40}") for key in range(200))
        platform.transfer.run_once()

    platform.registry.register_topic(Topic("moving", partitions=2))
    publish()
    platform.repartitioner.repartition("moving", 5)
    publish()
    starting = json.dumps({"moving": dict.fromkeys("01234", 1)})
    reading = options(dsn, "moving", streaming=True, startingOffsets=starting)
    columns = read_schema(headers=False)
    reader = StreamReader(reading, StructType([columns["key"], columns["offset"]]))
    batches: list[dict[str, list[int]]] = []
    try:
        start = reader.initialOffset()
        while (end := reader.latestOffset(start, ReadMaxRows(60))) != start:
            batches.append({})
            for split in reader.partitions(start, end):
                for batch in reader.read(split):
                    for row in batch.to_pylist():
                        batches[-1].setdefault(row["key"], []).append(row["offset"])
            start = end
    finally:
        reader.stop()
    assert sum(len(offsets) for batch in batches for offsets in batch.values()) == 400
    for key in {key for batch in batches for key in batch}:
        of_key = [sorted(batch.get(key, [])) for batch in batches]
        assert [offset for offsets in of_key for offset in offsets] == sorted(each for one in of_key for each in one)


def test_a_stream_whose_option_knows_fewer_partitions_goes_on_from_its_checkpoint(
    platform: EventSQL, publish: Publish, orders: str, dsn: str
) -> None:
    starting = '{"orders": {"0": -2, "1": -2, "2": -2, "3": -2}}'
    reading = options(dsn, orders, streaming=True, startingOffsets=starting)
    before = StreamReader(reading, read_schema(headers=False))
    checkpoint = before.latestOffset(before.initialOffset(), ALL)
    before.stop()
    platform.repartitioner.repartition(orders, 6)
    publish(200, first=1_000)
    after = StreamReader(reading, read_schema(headers=False))
    try:
        with pytest.raises(ValidationError, match="lacks partition 4, 5"):
            after.initialOffset()
        end = after.latestOffset(checkpoint, ALL)
        assert offsets(after, after.partitions(checkpoint, end)) == published(platform, orders)[1_000:]
    finally:
        after.stop()


@pytest.mark.parametrize("partitions", [(2,), (6,), (6, 2)])
def test_a_stream_s_consumer_gets_the_partitions_of_its_topic(
    platform: EventSQL, publish: Publish, orders: str, dsn: str, partitions: tuple[int, ...]
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake", partitioned=True))
    reader = StreamReader(options(dsn, orders, streaming=True, consumer="lake"), read_schema(headers=False))
    try:
        start = reader.initialOffset()
        publish(100, first=1_000)
        for number in partitions:
            platform.repartitioner.repartition(orders, number)
            publish(200, first=1_100)
        end = reader.latestOffset(start, ALL)
        assert offsets(reader, reader.partitions(start, end)) == published(platform, orders)
        reader.commit(end)
    finally:
        reader.stop()
    states = platform.registry.consumer(orders, "lake")
    assert [state.partition for state in states] == list(range(partitions[-1]))
    assert {state.last_event_id for state in states} == {end["orders"]["0"] - 1}
    assert not platform.shards[0].layouts.unsettled(orders)


def test_a_stream_reads_nothing_of_a_lost_partition_that_its_consumer_has_consumed(
    platform: EventSQL, repartitioned: str, dsn: str
) -> None:
    platform.registry.register_consumer(Consumer(repartitioned, "lake", partitioned=True), start=1_501)
    given = options(dsn, repartitioned, streaming=True, consumer="lake", partition="3")
    reader = StreamReader(given, read_schema(headers=False))
    try:
        assert reader.initialOffset()[repartitioned] == {"0": {"3": 1_501}}
    finally:
        reader.stop()


def test_a_stream_goes_on_without_a_partition_that_the_topic_has_lost_with_its_events(
    platform: EventSQL, repartitioned: str, dsn: str
) -> None:
    start = {repartitioned: {"0": {str(partition): 1_501 for partition in range(4)}}}
    given = {"dsn": dsn, "assign": f'{{"{repartitioned}": [0, 1]}}'}
    reader = StreamReader(ReadOptions.parse(given, streaming=True), read_schema(headers=False))
    with pytest.raises(ValidationError, match="partition 3"):
        reader.latestOffset(start, ALL)
    # As retention does, once it has dropped the events of the former layout.
    with platform.database.connection() as connection:
        connection.execute("DELETE FROM eventsql.topic_layout WHERE eql_partitions = 4")
    assert reader.latestOffset(start, ALL)[repartitioned] == {"0": {"0": 1_501, "1": 1_501}}
    reader.stop()
