"""Streams over the shards of a set: where each shard is, what a shard that joins means, progress as a consumer's."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from eventsql_orchestration import Consumer, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.errors import DataLossError, ShardSetError, ShardUnavailableError, ValidationError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.shards.add_shard import ShardAddition
from eventsql_orchestration.shards.shard_state import ShardStore
from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.reader import read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.spark.stream import StreamReader
from tests.shards.conftest import Databases, databases
from tests.spark.streams import run_to_end

__all__ = ["databases"]

DOWN = "postgresql://nobody@127.0.0.1:1/nowhere"
ALL = read_schema(headers=True, shards=True)
ONE = read_schema(headers=True)

Add: TypeAlias = Callable[..., None]


@pytest.fixture
def urls(databases: Databases) -> list[str]:
    """Three databases that hold nothing."""
    return databases(3)


@pytest.fixture
def platform(urls: list[str]) -> Iterator[EventSQL]:
    """The first two are shards, with 400 events of 40 keys in one topic."""
    with EventSQL(*urls[:2], transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", partitions=2))
        publish(platform, range(400))
        yield platform


@pytest.fixture
def dsn(platform: EventSQL, urls: list[str]) -> str:
    return " ".join(urls[:2])


@pytest.fixture
def add() -> Add:
    """Adds the last of some databases to the others; only prepares it with `prepare=True`."""

    def add_last(*dsns: str, prepare: bool = False) -> None:
        with ExitStack() as stack:
            shards = [stack.enter_context(Shard(dsn, transfer=False)) for dsn in dsns]
            ShardAddition(shards[:-1], shards[-1]).execute(only_prepare=prepare)

    return add_last


def publish(platform: EventSQL, numbers: Iterable[int]) -> None:
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key=f"key-{number % 40}") for number in numbers
    )
    platform.transfer.run_once()


def ends_of(platform: EventSQL) -> dict[str, int]:
    """The next offset of each shard."""
    return {str(shard.name): shard.reader.read("orders")[-1].id + 1 for shard in platform.shards}


@contextmanager
def streaming(dsn: str, **options: object) -> Iterator[StreamReader]:
    """A stream's reader as Spark's driver has it."""
    given = {"dsn": dsn, "subscribe": "orders", **{name: str(value) for name, value in options.items()}}
    reader = EventSQLDataSource(given).streamReader(ALL if " " in dsn else ONE)
    try:
        yield reader
    finally:
        reader.stop()


def events_in(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> dict[str, int]:
    """How many events of each shard a batch gives."""
    found: defaultdict[str, int] = defaultdict(int)
    splits: Sequence[InputPartition] = reader.partitions(start, end)
    for split in splits:
        for batch in reader.read(split):
            for name in batch["shard"].to_pylist():
                found[name] += 1
    return dict(found)


def drain(spark: SparkSession, dsn: str, checkpoint: Path, **options: object) -> list[list[tuple[str, int]]]:
    """Run a stream until it has read all there is; gives the keys and numbers of each of its batches."""
    given = {"dsn": dsn, "subscribe": "orders", **{name: str(value) for name, value in options.items()}}
    frame = spark.readStream.format(FORMAT).schema("key string, value binary").options(**given).load()
    batches: list[list[tuple[str, int]]] = []

    def collect(batch: DataFrame, _number: int) -> None:
        batches.append([(row.key, int(bytes(row.value))) for row in batch.collect()])

    run_to_end(
        frame.writeStream.foreachBatch(collect).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    )
    return batches


def numbers(batches: list[list[tuple[str, int]]]) -> list[int]:
    return sorted(number for batch in batches for _, number in batch)


@pytest.mark.nightly
def test_a_stream_that_restarts_reads_exactly_what_is_missing_on_each_shard(
    spark: SparkSession, platform: EventSQL, dsn: str, urls: list[str], checkpoint: Path
) -> None:
    batches = drain(spark, dsn, checkpoint, startingOffsets="earliest", maxOffsetsPerTrigger=300)
    assert [len(batch) for batch in batches] == [300, 100]
    publish(platform, range(400, 430))
    # Whichever URL comes first.
    batches += drain(spark, " ".join(reversed(urls[:2])), checkpoint)
    assert numbers(batches) == list(range(430))
    (last,) = {path.name for path in (checkpoint / "offsets").iterdir() if path.name.isdecimal()} - {"0", "1"}
    offset = json.loads((checkpoint / "offsets" / last).read_text().splitlines()[-1])
    assert offset["orders"] == ends_of(platform)


def test_shards_share_a_limit_as_evenly_as_they_have_events(platform: EventSQL, dsn: str) -> None:
    ends = ends_of(platform)
    nearly = {"orders": {"shard-1": ends["shard-1"] - 10, "shard-2": 1}}
    with streaming(dsn, startingOffsets=json.dumps(nearly)) as reader:
        start = reader.initialOffset()
        assert start["orders"] == nearly["orders"]
        end = reader.latestOffset(start, ReadMaxRows(100))
        assert events_in(reader, start, end) == {"shard-1": 10, "shard-2": 90}
    with streaming(dsn, maxOffsetsPerTrigger=1) as reader, pytest.raises(ValidationError, match="1 is too few for 2"):
        reader.getDefaultReadLimit()


def test_a_stream_starts_at_the_end_of_each_shard(platform: EventSQL, dsn: str) -> None:
    with streaming(dsn) as reader:
        start = reader.initialOffset()
        assert start["orders"] == ends_of(platform)
        publish(platform, range(400, 440))
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end == reader.reportLatestOffset()
        assert end["orders"] == ends_of(platform)
        assert sum(events_in(reader, start, end).values()) == 40


def test_one_topic_may_have_an_offset_for_each_shard_and_another_one_word_for_all(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("rides"))
    platform.publisher.publish_all(Publication("rides", b"v", key=f"key-{number}") for number in range(40))
    platform.transfer.run_once()
    starting = {"orders": {"shard-1": 5, "shard-2": 7}, "rides": "earliest"}
    with streaming(dsn, subscribe="orders,rides", startingOffsets=json.dumps(starting)) as reader:
        start = reader.initialOffset()
        assert start["orders"] == starting["orders"]
        assert start["rides"] == {"shard-1": 1, "shard-2": 1}


@pytest.mark.nightly
def test_a_shard_that_was_added_between_two_starts_is_read_from_its_beginning(
    *, spark: SparkSession, platform: EventSQL, dsn: str, urls: list[str], checkpoint: Path, add: Add
) -> None:
    assert numbers(drain(spark, dsn, checkpoint, startingOffsets="earliest")) == list(range(400))
    publish(platform, range(400, 500))
    add(*urls)
    with EventSQL(*urls, transfer=False) as grown:
        publish(grown, range(500, 900))
        assert len(grown.shards[2].reader.read("orders")) > 20
    batches = drain(spark, " ".join(urls), checkpoint, maxOffsetsPerTrigger=200)
    assert numbers(batches) == list(range(400, 900))
    in_batch: defaultdict[str, list[int]] = defaultdict(list)
    for batch in batches:
        for key in {key for key, _ in batch}:
            in_batch[key].append(min(number for name, number in batch if name == key))
    # A key's later batches have its later events, wherever it lives by now.
    assert all(found == sorted(found) for found in in_batch.values())


def test_a_key_s_older_events_come_before_those_of_the_shard_that_it_moved_to(
    platform: EventSQL, dsn: str, urls: list[str], add: Add
) -> None:
    every = " ".join(urls)
    with streaming(dsn, startingOffsets="earliest") as reader:
        start = reader.initialOffset()
    before = ends_of(platform)
    add(*urls, prepare=True)
    with streaming(every) as reader:
        assert reader.initialOffset()["orders"] == {**before, "shard-3": 1}
        add(*urls)
        with EventSQL(*urls, transfer=False) as grown:
            publish(grown, range(400, 800))
            ends = ends_of(grown)
        first = reader.latestOffset(start, ReadAllAvailable())
        assert first["orders"] == {**ends, "shard-3": 1}
        second = reader.latestOffset(first, ReadAllAvailable())
        assert second["orders"] == ends
        assert events_in(reader, first, second) == {"shard-3": ends["shard-3"] - 1}
    # Nothing waits where the old shards have been read.
    with streaming(every) as reader:
        assert reader.latestOffset(first, ReadAllAvailable()) == second
    # The last event of one old shard is enough to wait for.
    for name, end in before.items():
        unread = {**ends, name: end - 1, "shard-3": 1}
        with streaming(every) as reader:
            assert reader.latestOffset({"orders": unread}, ReadAllAvailable()) == first


def test_a_stream_goes_on_when_its_database_becomes_a_shard(urls: list[str], add: Add) -> None:
    with EventSQL(urls[0], transfer=False) as alone:
        alone.registry.register_topic(Topic("orders"))
        publish(alone, range(100))
    with streaming(urls[0], startingOffsets="earliest") as reader:
        before = reader.initialOffset()
        assert before["orders"] == {"0": 1}
    add(*urls[:2])
    with streaming(" ".join(urls[:2])) as reader:
        end = reader.latestOffset(before, ReadAllAvailable())
        assert end["orders"] == {"shard-1": 101, "shard-2": 1}
        assert events_in(reader, before, end) == {"shard-1": 100}
    # Of one shard alone, the checkpoint says which it is.
    with streaming(urls[0]) as reader:
        assert reader.latestOffset(before, ReadAllAvailable())["orders"] == {"shard-1": 101}
    with streaming(urls[1], startingOffsets="earliest") as reader:
        second = reader.initialOffset()
        assert second["orders"] == {"shard-2": 1}
    with (
        streaming(urls[0]) as reader,
        pytest.raises(ValidationError, match=r"option dsn: .* offsets of shard 'shard-2'"),
    ):
        reader.partitions(second, second)


def test_a_running_stream_is_told_that_it_lacks_the_url_of_a_shard(
    platform: EventSQL, dsn: str, urls: list[str], add: Add
) -> None:
    with streaming(dsn) as reader:
        start = reader.initialOffset()
        add(*urls, prepare=True)
        assert reader.latestOffset(start, ReadAllAvailable()) == start
        add(*urls)
        with pytest.raises(ShardSetError, match="option dsn: shard shard-3 was added, which no URL names"):
            reader.latestOffset(start, ReadAllAvailable())


def test_a_checkpoint_of_all_shards_is_not_one_of_a_single_one(platform: EventSQL, dsn: str, urls: list[str]) -> None:
    with streaming(dsn) as reader:
        offset = reader.initialOffset()
    with (
        streaming(urls[0]) as reader,
        pytest.raises(ValidationError, match=r"option dsn: .* offsets of shard 'shard-2'"),
    ):
        reader.latestOffset(offset, ReadAllAvailable())
    of_one = {"orders": {"0": 1}}
    with streaming(dsn) as reader, pytest.raises(ValidationError, match="a database that was not a shard"):
        reader.latestOffset(of_one, ReadAllAvailable())


def test_a_shard_that_is_down_stops_a_stream_and_is_named(platform: EventSQL, urls: list[str]) -> None:
    with (
        streaming(f"{DOWN} {urls[1]}") as reader,
        pytest.raises(ShardUnavailableError, match="shard 'shard-1' is down"),
    ):
        reader.initialOffset()


def test_retention_that_overtook_a_stream_on_one_shard_is_told(
    platform: EventSQL, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = platform.shards[1]
    second.registry.set_retention("orders", Retention(events=1))
    second.retention.run_once()
    publish(platform, range(400, 440))
    second.retention.run_once()
    start, end = {"orders": {"shard-1": 1, "shard-2": 5}}, {"orders": ends_of(platform)}
    with streaming(dsn) as reader, pytest.raises(DataLossError, match=r"shard 'shard-2': .*offsets 5 to"):
        reader.partitions(start, end)
    with streaming(dsn, failOnDataLoss=False) as reader, caplog.at_level(logging.WARNING):
        assert events_in(reader, start, end) == {
            str(shard.name): len(shard.reader.read("orders")) for shard in platform.shards
        }
    assert "shard 'shard-2': retention has dropped offsets 5 to" in caplog.text


# Progress as a consumer's


def test_a_consumer_s_progress_is_written_on_each_shard(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_consumer(Consumer("orders", "lake", partitioned=True))
    assert sum(lag.events for lag in platform.lag("orders")) == 400
    with streaming(dsn, consumer="lake") as reader:
        start = reader.initialOffset()
        assert start["orders"] == {"shard-1": 1, "shard-2": 1}
        end = reader.latestOffset(start, ReadAllAvailable())
        reader.commit(end)
    assert sum(lag.events for lag in platform.lag("orders")) == 0
    with streaming(dsn, consumer="lake") as reader:
        assert reader.initialOffset() == end


def test_a_stream_s_consumer_that_is_held_back_on_a_new_shard_makes_progress(
    platform: EventSQL, urls: list[str], add: Add
) -> None:
    platform.registry.register_consumer(Consumer("orders", "lake", partitioned=True))
    add(*urls)
    with EventSQL(*urls, transfer=False) as grown:
        publish(grown, range(400, 800))
        with streaming(" ".join(urls), consumer="lake") as reader:
            offset = reader.initialOffset()
            for _ in range(2):
                offset = reader.latestOffset(offset, ReadAllAvailable())
            assert offset["orders"] == ends_of(grown)
            reader.commit(offset)
        assert sum(lag.events for lag in grown.lag("orders")) == 0
        assert grown.held_back() == []
        assert ShardStore(grown.shards[2].database).held() == []
