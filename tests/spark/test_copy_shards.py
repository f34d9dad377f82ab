"""A stream from shards to shards: each event once, whatever process dies, and each key in order on its shard."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import ConfigurationError, DatabaseUnavailableError
from eventsql_orchestration.shards.two_phase_coordinator import TwoPhaseCoordinator
from eventsql_orchestration.spark import FORMAT, eventsql_error
from tests.conftest import own_server
from tests.shard_keys import shard_of_key
from tests.shards.conftest import Databases, databases
from tests.spark.processes import driver
from tests.spark.stopping import Stop, await_end_of_transactions, stopping
from tests.spark.streams import STREAM_SECONDS, run_to_end
from tests.waiting import wait_until

__all__ = ["databases"]

EVENTS = 400
LIMIT = 240


@pytest.fixture
def shards(databases: Databases) -> Iterator[EventSQL]:
    """Two shards with a topic of 400 events of 24 keys, and one to copy it to."""
    with prepared(databases(2)) as platform:
        yield platform


@contextmanager
def prepared(dsns: list[str]) -> Iterator[EventSQL]:
    with EventSQL(*dsns, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", partitions=2))
        platform.registry.register_topic(Topic("fares", partitions=3))
        publish(platform, range(EVENTS))
        assert all(shard.reader.count("orders") > LIMIT // 2 for shard in platform.shards)
        yield platform


def publish(platform: EventSQL, numbers: Iterable[int]) -> None:
    platform.publisher.publish_all(
        Publication("orders", b"%d" % number, key=f"key-{number % 24}") for number in numbers
    )
    platform.transfer.run_once()


def urls_of(platform: EventSQL) -> list[str]:
    """In the order of their names: the first is the one that decides."""
    return [shard.database.dsn for shard in sorted(platform.shards, key=lambda shard: str(shard.name))]


def writer(spark: SparkSession, dsns: list[str], checkpoint: Path, **writing: str) -> DataStreamWriter:
    """Copies on from the checkpoint, as two tasks; `running` in seconds keeps the query running."""
    reading = {"dsn": " ".join(dsns), "subscribe": "orders", "startingOffsets": "earliest", "minPartitions": "2"}
    rows = spark.readStream.format(FORMAT).options(**reading, maxOffsetsPerTrigger=str(LIMIT)).load()
    given = {"dsn": " ".join(dsns), "topic": "fares", "checkpointLocation": str(checkpoint), **writing}
    running = given.pop("running", None)
    found = rows.select("key", "value").writeStream.format(FORMAT).options(**given)
    return found.trigger(availableNow=True) if running is None else found.trigger(processingTime=running)


def copy(spark: SparkSession, dsns: list[str], checkpoint: Path, **writing: str) -> None:
    """Copy all that there is."""
    run_to_end(writer(spark, dsns, checkpoint, **writing))


def copies(platform: EventSQL) -> list[int]:
    """The numbers of all copies, each of which lies on the shard of its key, in its partition and in its order."""
    platform.transfer.run_once()
    names = [str(shard.name) for shard in platform.shards]
    found: list[int] = []
    for shard in platform.shards:
        numbers: dict[str, list[int]] = {}
        for event in shard.reader.read("fares"):
            key = str(event.key)
            assert shard_of_key(key, names) == shard.name
            assert event.partition == platform.publisher.partition_of(event.as_publication())
            numbers.setdefault(key, []).append(int(event.value))
        assert all(of_key == sorted(of_key) for of_key in numbers.values())
        found += [number for of_key in numbers.values() for number in of_key]
    return sorted(found)


def counted(dsn: str, table: str, condition: str = "true") -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            sql.SQL("SELECT count(*) FROM {} WHERE {}").format(sql.Identifier("eventsql", table), sql.SQL(condition))
        ).fetchone()
    assert row is not None
    return int(row[0])


def check_nothing_is_left(platform: EventSQL) -> None:
    """Assert that nothing is left, once undecided publications are given up as a later process would."""
    TwoPhaseCoordinator(lambda: {str(shard.name): shard for shard in platform.shards}).finish(abandoned_after=0)
    for dsn in urls_of(platform):
        assert counted(dsn, "spark_decision") == counted(dsn, "spark_part", "eql_published_at IS NULL") == 0


def test_a_stream_goes_on_from_its_checkpoint(spark: SparkSession, shards: EventSQL, checkpoint: Path) -> None:
    dsns = urls_of(shards)
    copy(spark, dsns, checkpoint, writerId="copier")
    assert copies(shards) == list(range(EVENTS))
    publish(shards, range(EVENTS, EVENTS + 10))
    # Whichever URL comes first.
    copy(spark, list(reversed(dsns)), checkpoint, writerId="copier")
    assert copies(shards) == list(range(EVENTS + 10))
    assert counted(dsns[0], "spark_publication") == len(list((checkpoint / "commits").glob("[0-9]*"))) == 3
    check_nothing_is_left(shards)


@pytest.mark.nightly
def test_a_stream_without_its_checkpoint_publishes_nothing_twice(
    spark: SparkSession, shards: EventSQL, checkpoint: Path
) -> None:
    dsns = urls_of(shards)
    copy(spark, dsns, checkpoint, writerId="copier")
    publish(shards, range(EVENTS, EVENTS + 10))
    # Its first batch is the one that was published under its number, and its second one has other events.
    shutil.rmtree(checkpoint)
    with pytest.raises(StreamingQueryException) as failure:
        copy(spark, dsns, checkpoint, writerId="copier")
    refused = eventsql_error(failure.value)
    assert isinstance(refused, ConfigurationError)
    assert "batch 1 of writer 'copier' was published before with 160 events, and has 170 now" in str(refused)
    assert len(list((checkpoint / "commits").glob("[0-9]*"))) == 1
    assert copies(shards) == list(range(EVENTS))
    check_nothing_is_left(shards)


@pytest.mark.nightly
def test_a_batch_whose_drivers_are_killed_in_the_commit_is_replayed_and_published_once(
    spark: SparkSession, shards: EventSQL, checkpoint: Path, tmp_path: Path
) -> None:
    dsns = urls_of(shards)
    stream = {"dsn": " ".join(dsns), "source": "orders", "topic": "fares", "checkpoint": str(checkpoint)}

    def kill_at(dsn: str, step: str, *, at_commit: bool) -> None:
        with driver(tmp_path, {"spark.master": "local[1]"}) as killed, stopping(dsn, step, at_commit=at_commit) as stop:
            killed.start("stream", options={}, **stream)
            killed.await_step(stop.reached, "the stream has come to the step")
            killed.kill()
            stop.end_session()
        await_end_of_transactions(dsns)

    def decided() -> tuple[int, int]:
        return counted(dsns[0], "spark_decision", "eql_decided"), counted(dsns[0], "spark_publication")

    kill_at(dsns[0], "INSERT ON eventsql.spark_publication", at_commit=False)
    assert decided() == (0, 0)
    assert counted(dsns[1], "spark_part", "eql_published_at IS NULL") == 1
    # The second replays what the first has prepared, and comes to the delivery.
    kill_at(dsns[1], "UPDATE ON eventsql.spark_part", at_commit=True)
    assert decided() == (1, 1)
    assert counted(dsns[1], "spark_part", "eql_published_at IS NULL") == 1
    # The batch is what the checkpoint says, whatever has come since.
    publish(shards, range(EVENTS, EVENTS + 10))
    copy(spark, dsns, checkpoint)
    assert counted(dsns[0], "spark_publication") == 2
    assert copies(shards) == list(range(EVENTS + 10))
    check_nothing_is_left(shards)


@pytest.fixture
def second() -> Iterator[EmbeddedPostgres]:
    """A server of its own, which the test stops and starts."""
    with own_server() as embedded:
        yield embedded


def failure_of(query: StreamingQuery) -> str:
    """What a query says that stops because a shard is down, also where it cannot give up what it has staged there."""
    with pytest.raises(StreamingQueryException) as failure:
        query.awaitTermination(STREAM_SECONDS)
    error = eventsql_error(failure.value)
    assert isinstance(error, DatabaseUnavailableError), str(failure.value)
    return str(error)


@pytest.mark.nightly
def test_a_shard_that_goes_down_stops_a_stream_which_goes_on_when_it_is_back(
    spark: SparkSession, databases: Databases, second: EmbeddedPostgres, checkpoint: Path
) -> None:
    port = second.start().port
    with prepared([*databases(1), second.create_database("orders")]) as shards:
        dsns = urls_of(shards)
        lost = next(dsn for dsn in dsns if f":{port}/" in dsn)
        name = next(str(shard.name) for shard in shards.shards if shard.database.dsn == lost)
        # While a part of the first batch is published there.
        stop = Stop(lost, "INSERT ON eventsql.event_buffer")
        query = writer(spark, dsns, checkpoint).start()
        stop.await_reached()
        second.stop(mode="immediate")
        stop.let_go()
        assert f":{port}/orders " in failure_of(query)
        second.start()
        with psycopg.connect(lost, autocommit=True) as connection:
            connection.execute("DROP FUNCTION stop_here CASCADE")
        # Between two batches.
        query = writer(spark, dsns, checkpoint, running="0 seconds").start()
        wait_until(lambda: copies(shards) == list(range(EVENTS)), "everything is copied")
        second.stop(mode="immediate")
        assert f"shard {name!r} is down" in failure_of(query)
        second.start()
        publish(shards, range(EVENTS, EVENTS + 10))
        copy(spark, dsns, checkpoint)
        assert copies(shards) == list(range(EVENTS + 10))
        check_nothing_is_left(shards)
