"""Topics as streams: what is read after a restart, within limits, and as a registered consumer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery
from sqlalchemy.engine import make_url

from eventsql_orchestration import Consumer, EventSQL, OffsetRange, Topic
from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import (
    ConfigurationError,
    ConsumerNotFoundError,
    DataLossError,
    EventSQLError,
    PartitionLeasedError,
    ValidationError,
)
from eventsql_orchestration.model import STORAGES, Retention, Storage
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.spark.log_planner import Logs
from eventsql_orchestration.spark.reader import read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.spark.stream import StreamReader
from tests.fixtures import SaidBy
from tests.forms import stored
from tests.spark.conftest import drop_the_first_events, ranges_of
from tests.spark.streams import await_end, run_to_end

Publish = Callable[..., None]

ALL = read_schema(headers=True)


def offsets_read(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    """The offsets that the tasks of a batch give."""
    batches = [batch for split in reader.partitions(start, end) for batch in reader.read(split)]
    return sorted(offset for batch in batches for offset in batch["offset"].to_pylist())


@contextmanager
def streaming(dsn: str, topic: str, **options: object) -> Iterator[StreamReader]:
    """A stream's reader as Spark's driver has it."""
    given = {"dsn": dsn, "subscribe": topic, **options}
    reader = EventSQLDataSource({name: str(value) for name, value in given.items() if value is not None}).streamReader(
        ALL
    )
    try:
        yield reader
    finally:
        reader.stop()


def position(platform: EventSQL, topic: str, consumer: str) -> dict[int, int]:
    return {state.partition: state.last_event_id for state in platform.registry.consumer(topic, consumer)}


def drain(frame: DataFrame, checkpoint: Path, sink: Path) -> list[dict[str, Any]]:
    """Run a stream until it has read all there is; gives the progress of its batches."""
    query = run_to_end(
        frame.writeStream.format("json")
        .option("path", str(sink))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    return [json.loads(progress.json) for progress in query.recentProgress if progress.numInputRows]


def stream_of(spark: SparkSession, dsn: str, topic: str, **options: object) -> DataFrame:
    given = {"dsn": dsn, "subscribe": topic, **{name: str(value) for name, value in options.items()}}
    return spark.readStream.format(FORMAT).schema("offset long, partition int").options(**given).load()


def offsets_in(spark: SparkSession, sink: Path) -> list[int]:
    return sorted(row.offset for row in spark.read.schema("offset long").json(str(sink)).collect())


def test_a_stream_that_restarts_reads_exactly_what_is_missing_and_its_consumer_follows(
    *,
    spark: SparkSession,
    platform: EventSQL,
    publish: Publish,
    dsn: str,
    orders: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake", partitioned=True))
    assert sum(lag.events for lag in platform.lag(orders)) == 1_000
    sink = tmp_path / "sink"
    frame = stream_of(spark, dsn, orders, consumer="lake", maxOffsetsPerTrigger=600, numPartitions=2)
    assert [batch["numInputRows"] for batch in drain(frame, checkpoint, sink)] == [600, 400]
    # Spark does not call commit for the last batch of AvailableNow.
    assert position(platform, orders, "lake") == dict.fromkeys(range(4), 1_000)
    assert sum(state.consumed_events for state in platform.registry.consumer(orders, "lake")) == 1_000
    publish(50, first=1_000)
    assert sum(lag.events for lag in platform.lag(orders)) == 50
    (batch,) = drain(stream_of(spark, dsn, orders, consumer="lake"), checkpoint, sink)
    assert batch["sources"][0]["startOffset"][orders] == {"0": 1_001}
    assert batch["sources"][0]["endOffset"][orders] == {"0": 1_051}
    assert sum(lag.events for lag in platform.lag(orders)) == 0
    assert offsets_in(spark, sink) == list(range(1, 1_051))


def test_a_stream_of_one_partition_counts_its_events_alone(platform: EventSQL, dsn: str, orders: str) -> None:
    given = {"dsn": dsn, "subscribe": orders, "partition": "1", "startingOffsets": "earliest"}
    reader = EventSQLDataSource({**given, "maxOffsetsPerTrigger": "30"}).streamReader(ALL)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    splits = ranges_of(reader.partitions(start, end))
    assert start[orders] == {"0": {"1": 1}}
    assert sum(platform.reader.count(orders, after=s.after, upto=s.upto, partition=1) for s in splits) == 30
    assert {split.partition for split in splits} == {1}
    reader.stop()


def test_a_stream_starts_at_the_end_unless_told_otherwise(publish: Publish, dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders}).streamReader(ALL)
    start = reader.initialOffset()
    assert start[orders] == {"0": 1_001}
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
    assert reader.partitions(start, start) == []
    publish(3, first=1_000)
    assert reader.latestOffset(start, reader.getDefaultReadLimit())[orders] == {"0": 1_004}
    assert reader.reportLatestOffset()[orders] == {"0": 1_004}
    reader.stop()


def test_a_stream_to_now_stops_at_what_was_there_when_it_began(publish: Publish, dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders, "startingOffsets": "earliest"}).streamReader(ALL)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    publish(3, first=1_000)
    assert reader.latestOffset(start, reader.getDefaultReadLimit())[orders] == {"0": 1_001}
    reader.stop()


def test_a_stream_whose_topic_was_made_anew_stops(platform: EventSQL, publish: Publish, dsn: str, orders: str) -> None:
    with streaming(dsn, orders, startingOffsets=3) as reader:
        start = reader.initialOffset()
        platform.registry.unregister_topic(orders, force=True)
        platform.registry.register_topic(Topic(orders, partitions=4))
        publish(5)
        with pytest.raises(EventSQLError, match="'orders' was created again"):
            reader.latestOffset(start, ReadAllAvailable())
    with streaming(dsn, orders) as restarted, pytest.raises(EventSQLError, match="'orders' was created again"):
        restarted.partitions(start, start)


def test_a_stream_does_not_move_the_consumer_of_a_topic_that_was_made_anew(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"))
    with streaming(dsn, orders, consumer="lake") as reader:
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        platform.registry.unregister_topic(orders, force=True)
        platform.registry.register_topic(Topic(orders, partitions=4)).register_consumer(Consumer(orders, "lake"))
        with pytest.raises(EventSQLError, match="'orders' was created again"):
            reader.commit(end)
    assert position(platform, orders, "lake") == {-1: 0}


def test_a_stream_that_has_read_more_than_its_topic_has_stops(dsn: str, orders: str) -> None:
    with streaming(dsn, orders) as reader, pytest.raises(EventSQLError, match=r"ends at offset 1000, .* 1501"):
        reader.latestOffset({orders: {"0": 1_501}}, ReadAllAvailable())


def test_a_batch_that_was_planned_on_a_server_that_has_more_is_not_read_in_part(dsn: str, orders: str) -> None:
    with streaming(dsn, orders) as reader, pytest.raises(EventSQLError, match=r"ends at offset 1000, .* 1501"):
        reader.partitions({orders: {"0": 901}}, {orders: {"0": 1_501}})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"endingOffsets": "5"}, ConfigurationError, "option endingOffsets cannot be used here"),
        ({"startingOffsets": "2000"}, ValidationError, "option startingOffsets: 2000 is out of range"),
        ({"maxOffsetsPerTrigger": "0"}, ValidationError, "option maxOffsetsPerTrigger: 0 is out of range"),
    ],
)
def test_a_bad_option_of_a_stream_is_named(
    dsn: str, orders: str, options: dict[str, str], error: type[EventSQLError], message: str
) -> None:
    def first_offset() -> None:
        reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders, **options}).streamReader(ALL)
        try:
            reader.initialOffset()
        finally:
            reader.stop()

    with pytest.raises(error, match=message):
        first_offset()


def test_a_checkpoint_of_another_topic_is_refused(dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders}).streamReader(ALL)
    with pytest.raises(ValidationError, match="has offsets of rides"):
        reader.partitions({"rides": {"0": 1}}, {"rides": {"0": 2}})
    reader.stop()


# Progress as a consumer's


def test_progress_that_was_not_committed_is_written_after_a_restart(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"))
    with streaming(dsn, orders, consumer="lake") as reader:
        # Spark goes on from a batch whose commit it never called.
        reader.latestOffset({orders: {"0": 701}}, ReadAllAvailable())
    assert position(platform, orders, "lake") == {-1: 700}
    with streaming(dsn, orders, consumer="lake") as reader:
        reader.commit({orders: {"0": 501}})
    assert position(platform, orders, "lake") == {-1: 700}


def test_a_stream_without_startingoffsets_goes_on_where_its_consumer_is(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"), start=301)
    with streaming(dsn, orders, consumer="lake") as reader:
        assert reader.initialOffset()[orders] == {"0": 301}
    with streaming(dsn, orders, consumer="lake", startingOffsets=11) as reader:
        assert reader.initialOffset()[orders] == {"0": 11}


def test_a_stream_of_one_partition_moves_its_consumer_there_and_one_of_all_starts_at_the_least_offset(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake", partitioned=True), start=101)
    with streaming(dsn, orders, consumer="lake", partition=2) as reader:
        reader.commit({orders: {"0": {"2": 301}}})
    assert position(platform, orders, "lake") == {0: 100, 1: 100, 2: 300, 3: 100}
    consumed = platform.reader.count(orders, after=100, upto=300, partition=2)
    assert platform.registry.consumer(orders, "lake")[2].consumed_events == consumed > 0
    with streaming(dsn, orders, consumer="lake") as reader:
        assert reader.initialOffset()[orders] == {"0": 101}


def test_a_stream_s_consumer_has_its_filter(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_consumer(
        Consumer(orders, "lake"), filter=EventFilter(keys=frozenset({"kéy-1", "kéy-2"}), metadata={"source": "wéb"})
    )
    with streaming(dsn, orders, consumer="lake") as reader:
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        found = offsets_read(reader, start, end)
        reader.commit(end)
    wanted = [
        event.id
        for event in platform.reader.read(orders)
        if event.key in {"kéy-1", "kéy-2"} and event.metadata.get("source") == "wéb"
    ]
    assert wanted
    assert found == wanted
    assert position(platform, orders, "lake") == {-1: 1_000}


def test_a_consumer_that_somebody_else_leases_is_left_alone(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_consumer(Consumer(orders, "mailer"))
    platform.claims.claim(orders, "mailer", owner="a run")
    with (
        streaming(dsn, orders, consumer="mailer") as reader,
        pytest.raises(PartitionLeasedError, match="'mailer' partition -1"),
    ):
        reader.commit({orders: {"0": 11}})
    assert position(platform, orders, "mailer") == {-1: 0}


def test_a_stream_that_waits_for_events_writes_nothing(
    platform: EventSQL, dsn: str, orders: str, said_by: SaidBy
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"))
    with streaming(dsn, orders, consumer="lake") as reader:
        reader.commit({orders: {"0": 101}})
        (logs,) = reader._open()
        said = said_by(logs.database)
        reader.latestOffset({orders: {"0": 101}}, ReadAllAvailable())
        said_then = said.statements()
    assert said_then
    assert not [each for each in said_then if "UPDATE" in each]


def test_a_stream_whose_consumer_is_deleted_stops(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"))
    with streaming(dsn, orders, consumer="lake") as reader:
        reader.commit({orders: {"0": 101}})
        platform.registry.unregister_consumer(orders, "lake")
        with pytest.raises(ConsumerNotFoundError, match=r"option consumer: .*'lake'"):
            reader.commit({orders: {"0": 201}})


def test_a_stream_that_another_one_with_its_consumer_has_overtaken_stops(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    platform.registry.register_consumer(Consumer(orders, "lake"))
    with streaming(dsn, orders, consumer="lake") as slow, streaming(dsn, orders, consumer="lake") as fast:
        slow.commit({orders: {"0": 101}})
        fast.commit({orders: {"0": 501}})
        with pytest.raises(PartitionLeasedError):
            slow.commit({orders: {"0": 201}})
        fast.commit({orders: {"0": 601}})
        # A stream that is as far, or a new one from an older checkpoint, goes on.
        slow.commit({orders: {"0": 701}})
        with streaming(dsn, orders, consumer="lake") as restarted:
            restarted.commit({orders: {"0": 301}})
            restarted.commit({orders: {"0": 401}})
    assert position(platform, orders, "lake") == {-1: 700}


def test_a_consumer_that_cannot_hold_the_offsets_is_refused(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_consumer(Consumer(orders, "whole"))
    with (
        streaming(dsn, orders, consumer="whole", partition=2) as reader,
        pytest.raises(ValidationError, match="option consumer: 'whole' is not partitioned"),
    ):
        reader.initialOffset()
    with (
        streaming(dsn, orders, consumer="nobody") as reader,
        pytest.raises(ConsumerNotFoundError, match=r"option consumer: .*'nobody'"),
    ):
        reader.initialOffset()


# Several topics and partitions


@pytest.mark.parametrize("storage", STORAGES)
def test_a_stream_of_several_topics_shares_its_limit(
    platform: EventSQL, publish: Publish, dsn: str, orders: str, storage: Storage
) -> None:
    platform.registry.register_topic(Topic("rides", storage=storage))
    publish(100, topic="rides")
    found: list[list[int]] = []
    with streaming(dsn, "orders,rides", startingOffsets="earliest", maxOffsetsPerTrigger=400) as reader:
        limit, at, ends = reader.getDefaultReadLimit(), reader.initialOffset(), []
        while (end := reader.latestOffset(at, limit)) != at:
            found.append(offsets_read(reader, at, end))
            ends.append(end)
            at = end
    assert (ends[0]["orders"], ends[0]["rides"]) == ({"0": 301}, {"0": 101})
    assert [len(batch) for batch in found] == [400, 400, 300]
    assert sorted(offset for batch in found for offset in batch) == sorted([*range(1, 1_001), *range(1, 101)])


def test_partitions_may_have_offsets_of_their_own(platform: EventSQL, dsn: str, orders: str) -> None:
    begin = {"orders": {"0": 700, "1": -2, "2": "latest", "3": 500}}
    with streaming(dsn, orders, startingOffsets=json.dumps(begin)) as reader:
        start = reader.initialOffset()
        assert start[orders] == {"0": {"0": 700, "1": 1, "2": 1_001, "3": 500}}
        end = reader.latestOffset(start, ReadMaxRows(40))
        found = ranges_of(reader.partitions(start, end))
        counts = {
            each.partition: platform.reader.count(orders, partition=each.partition, after=each.after, upto=each.upto)
            for each in found
        }
        assert sum(counts.values()) == 40
        assert counts.keys() == {0, 1, 3}
        assert max(counts.values()) - min(counts.values()) <= 1
    with streaming(dsn, orders) as reader, pytest.raises(ValidationError, match="has offsets of single partitions"):
        reader.partitions(start, end)


def test_a_checkpoint_with_a_partition_that_is_not_read_is_refused(dsn: str, orders: str) -> None:
    begin = '{"orders": {"0": 700, "1": 700}}'
    with streaming(dsn, orders, subscribe=None, assign='{"orders": [0, 1]}', startingOffsets=begin) as reader:
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable())[orders] == {"0": {"0": 1_001, "1": 1_001}}
    for options in ({"subscribe": None, "assign": '{"orders": [0]}'}, {"partition": 0}):
        with streaming(dsn, orders, **options) as reader, pytest.raises(ValidationError, match="'orders' partition 1"):
            reader.latestOffset(start, ReadAllAvailable())


def test_a_topic_that_is_added_to_a_stream_is_read_from_its_beginning(
    platform: EventSQL, publish: Publish, dsn: str, orders: str
) -> None:
    platform.registry.register_topic(Topic("rides"))
    publish(10, topic="rides")
    with streaming(dsn, "orders, rides") as reader:
        end = reader.latestOffset({"orders": {"0": 1_001}}, ReadAllAvailable())
        assert (end["orders"], end["rides"]) == ({"0": 1_001}, {"0": 11})
        assert ranges_of(reader.partitions({"orders": {"0": 1_001}}, end)) == [OffsetRange("rides", -1, 0, 10)]


def test_a_limit_below_one_event_for_each_partition_is_refused(dsn: str, orders: str) -> None:
    bounds = '{"orders": {"0": 1, "1": 1, "2": 1, "3": 1}}'
    with (
        streaming(dsn, orders, startingOffsets=bounds, maxOffsetsPerTrigger=3) as r,
        pytest.raises(ValidationError, match="option maxOffsetsPerTrigger: 3 is too few for 4"),
    ):
        r.getDefaultReadLimit()
    with streaming(dsn, orders, startingOffsets=bounds, maxOffsetsPerTrigger=4) as r:
        assert r.getDefaultReadLimit() == ReadMaxRows(4)


def test_a_stream_may_begin_at_a_time(platform: EventSQL, publish: Publish, dsn: str, orders: str) -> None:
    since = platform.reader.read(orders)[-1].created_at
    publish(10, first=1_000)
    entered = [event.id for event in platform.reader.read(orders) if event.created_at >= since]
    with streaming(dsn, orders, startingTimestamp=since.isoformat()) as reader:
        assert reader.initialOffset()[orders] == {"0": entered[0]}
    late = 9_999_999_999_999
    with (
        streaming(dsn, orders, startingTimestamp=late) as reader,
        pytest.raises(ValidationError, match="option startingTimestamp: topic 'orders' has no event since 2286"),
    ):
        reader.initialOffset()
    with streaming(dsn, orders, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest") as reader:
        assert reader.initialOffset()[orders] == {"0": 1_011}


# Retention


@pytest.fixture
def overtaken(platform: EventSQL, orders: str) -> int:
    """The topic after retention has dropped its first 1,000 events; gives the first offset that is left."""
    return drop_the_first_events(platform, orders)


def test_a_stream_that_retention_overtook_fails_or_goes_on_as_it_is_told(
    *, platform: EventSQL, dsn: str, orders: str, overtaken: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert overtaken > 1_000
    start, end = {orders: {"0": 400}}, {orders: {"0": overtaken + 20}}
    lost = rf"offsets 400 to {overtaken - 1} of topic 'orders'"
    with streaming(dsn, orders) as reader, pytest.raises(DataLossError, match=lost):
        reader.partitions(start, end)
    with streaming(dsn, orders, failOnDataLoss=False) as reader, caplog.at_level(logging.WARNING):
        assert offsets_read(reader, start, end) == list(range(overtaken, overtaken + 20))
    assert "the read goes on with the events that are left" in caplog.text
    with streaming(dsn, orders, startingOffsets="earliest") as reader:
        assert reader.initialOffset()[orders] == {"0": overtaken}


def test_events_that_retention_drops_while_a_batch_is_planned_are_missed(
    *, platform: EventSQL, publish: Publish, dsn: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.registry.set_retention(orders, Retention(events=10))
    platform.retention.run_once()
    publish(20, first=1_000)
    firsts: Callable[..., list[int | None]] = Logs.firsts

    def late(*args: object) -> list[int | None]:
        platform.retention.run_once()
        return firsts(*args)

    monkeypatch.setattr(Logs, "firsts", late)
    with streaming(dsn, orders) as reader, pytest.raises(DataLossError, match="offsets 400 to 900 of topic 'orders'"):
        reader.partitions({orders: {"0": 400}}, {orders: {"0": 901}})


def test_a_stream_that_had_read_everything_has_lost_nothing_to_retention(
    platform: EventSQL, publish: Publish, dsn: str, orders: str
) -> None:
    with streaming(dsn, orders) as reader:
        offset = reader.initialOffset()
        assert offset[orders] == {"0": 1_001}
        platform.registry.set_retention(orders, Retention(events=10))
        platform.retention.run_once()
        # The log goes on in another segment: the stream passes the ids that nobody gets.
        passed = reader.latestOffset(offset, ReadAllAvailable())
        assert passed[orders]["0"] > 1_000_000
        assert reader.partitions(offset, passed) == []
        publish(20, first=1_000)
        platform.retention.run_once()
        end = reader.latestOffset(passed, ReadAllAvailable())
        (found,) = ranges_of(reader.partitions(passed, end))
        assert platform.reader.count(orders, after=found.after, upto=found.upto) == 20


def test_a_stream_with_a_limit_has_lost_nothing_of_a_quiet_topic_to_retention(
    platform: EventSQL, publish: Publish, dsn: str, orders: str
) -> None:
    platform.registry.register_topic(Topic("rides"))
    with streaming(dsn, "orders, rides", maxOffsetsPerTrigger=30) as reader:
        offset, limit = reader.initialOffset(), reader.getDefaultReadLimit()
        platform.registry.set_retention(orders, Retention(events=10))
        platform.retention.run_once()
        publish(40, topic="rides")
        passed = reader.latestOffset(offset, limit)
        assert passed["rides"] == {"0": 31}
        publish(20, topic=orders, first=1_000)
        platform.retention.run_once()
        end = reader.latestOffset(passed, limit)
        assert (
            sum(
                platform.reader.count(each.topic, after=each.after, upto=each.upto)
                for each in ranges_of(reader.partitions(passed, end))
            )
            == 30
        )


def test_ids_of_an_open_transaction_are_not_passed(platform: EventSQL, dsn: str, orders: str) -> None:
    with streaming(dsn, orders) as reader:
        start = reader.initialOffset()
        with platform.database.transaction() as writer:
            writer.execute("SELECT eql_topic FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
            writer.execute(f"SELECT nextval('eventsql.{stored('orders')}_eql_id_seq')")
            assert reader.latestOffset(start, ReadAllAvailable()) == start
        passed = reader.latestOffset(start, ReadAllAvailable())
        assert passed[orders] == {"0": 1_002}
        # The stream now has passed the log's end.
        assert reader.latestOffset(passed, ReadAllAvailable()) == passed


@pytest.mark.parametrize("option", ["default_transaction_read_only=on", "role=pg_read_all_data"])
def test_a_database_that_takes_no_writes_is_read_up_to_its_newest_event(
    session: Connection, dsn: str, orders: str, option: str
) -> None:
    # On a standby, a sequence is ahead of the events.
    session.execute(f"SELECT nextval('eventsql.{stored(orders)}_eql_id_seq')")
    url = make_url(dsn).update_query_dict({"options": f"-c {option}"}).render_as_string(hide_password=False)
    (split, *_) = EventSQLDataSource({"dsn": url, "subscribe": orders}).reader(ALL).partitions()
    assert ranges_of([split]) == [OffsetRange(orders, -1, 0, 1_000)]
    with streaming(url, orders) as reader:
        assert reader.initialOffset()[orders] == {"0": 1_001}


def test_a_failure_of_a_running_stream_is_one_of_this_package(
    *, spark: SparkSession, dsn: str, orders: str, overtaken: int, checkpoint: Path, tmp_path: Path
) -> None:
    frame = stream_of(spark, dsn, orders, startingOffsets=5)
    with pytest.raises(StreamingQueryException) as failure:
        drain(frame, checkpoint, tmp_path / "sink")
    error = eventsql_error(failure.value)
    assert isinstance(error, DataLossError)
    assert "offsets 5 to" in error.message


# Triggers


@pytest.mark.parametrize(
    "trigger",
    [pytest.param({"once": True}, marks=pytest.mark.nightly), {"processingTime": "100 milliseconds"}],
    ids=["once", "processing-time"],
)
def test_a_trigger_reads_every_event_once(
    *, spark: SparkSession, publish: Publish, dsn: str, orders: str, checkpoint: Path, trigger: dict[str, Any]
) -> None:
    frame = stream_of(spark, dsn, orders, startingOffsets="earliest", maxOffsetsPerTrigger=700)
    found: list[int] = []

    def collect(batch: DataFrame, _number: int) -> None:
        found.extend(row.offset for row in batch.select("offset").collect())

    def run() -> None:
        writer = (
            frame.writeStream.foreachBatch(collect).option("checkpointLocation", str(checkpoint)).trigger(**trigger)
        )
        run_to_end(writer, await_end if "once" in trigger else StreamingQuery.processAllAvailable)

    run()
    publish(10, first=1_000)
    run()
    assert sorted(found) == list(range(1, 1_011))
