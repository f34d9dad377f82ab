"""What a batch reads: several topics, by offsets and by times, one snapshot, and what retention leaves of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

from eventsql_orchestration import Connection, EventSQL, OffsetRange, Topic
from eventsql_orchestration.errors import DatabaseError, DataLossError, EventSQLError
from eventsql_orchestration.model import Retention
from eventsql_orchestration.spark.log_planner import Logs
from eventsql_orchestration.spark.reader import BatchReader, read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from tests.forms import in_blocks, stored
from tests.spark.conftest import drop_the_first_events, publish_some, ranges_of

Publish = Callable[..., None]
Read = Callable[..., DataFrame]


@pytest.fixture
def rides(platform: EventSQL, publish: Publish) -> str:
    platform.registry.register_topic(Topic("rides"))
    publish(300, topic="rides")
    return "rides"


def reader_of(dsn: str, **options: object) -> BatchReader:
    given = {"dsn": dsn, **{name: str(value) for name, value in options.items()}}
    reader = EventSQLDataSource(given).reader(read_schema(headers=False))
    assert isinstance(reader, BatchReader)
    return reader


def offsets_read(reader: BatchReader) -> list[int]:
    batches = [batch for split in reader.partitions() for batch in reader.read(split)]
    return sorted(offset for batch in batches for offset in batch["offset"].to_pylist())


def test_events_of_a_transaction_that_is_open_while_a_read_is_planned_belong_to_the_next(
    platform: EventSQL, publish: Publish, dsn: str
) -> None:
    platform.registry.register_topic(Topic("rides", storage="rows"))
    publish(10, topic="rides")
    reader = reader_of(dsn, subscribe="rides", startingOffsets=9, endingOffsets=12)
    with platform.database.transaction() as writer:
        writer.execute("SELECT eql_topic FROM eventsql.event_buffer_lock WHERE eql_topic = 'rides' FOR UPDATE")
        writer.execute(
            "INSERT INTO eventsql.rides_event (eql_partition, eql_value, eql_metadata, eql_buffered_at) "
            "VALUES (-1, '', '{}', now())"
        )
        planned = reader.partitions()
    batches = [batch for split in planned for batch in reader.read(split)]
    assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == [9, 10]
    assert offsets_read(reader) == [9, 10, 11]


# Topics and partitions


def test_several_topics_are_one_table(orders: str, rides: str, read: Read) -> None:
    frame = read("orders, rides", schema="topic string, offset bigint")
    assert {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()} == {orders: 1_000, rides: 300}


def test_tasks_are_even_over_topics(dsn: str, orders: str, rides: str) -> None:
    reader = reader_of(dsn, subscribe="orders,rides", minPartitions=13)
    events = [sum(piece.offsets.upto - piece.offsets.after for piece in split.value) for split in reader.partitions()]
    assert events == [100] * 13


def test_a_task_reads_about_as_many_events_as_it_is_told(dsn: str, orders: str) -> None:
    assert len(reader_of(dsn, subscribe=orders, maxRecordsPerPartition=250).partitions()) == 4
    assert len(reader_of(dsn, subscribe=orders, maxRecordsPerPartition=250, minPartitions=5).partitions()) == 5
    assert len(reader_of(dsn, subscribe=orders, minPartitions=1).partitions()) == 1


def test_assigned_partitions_are_read_alone(platform: EventSQL, dsn: str, orders: str, rides: str) -> None:
    reader = reader_of(dsn, assign='{"orders": [0, 2], "rides": [-1]}')
    wanted = [event.id for event in platform.reader.read(orders) if event.partition in (0, 2)]
    assert offsets_read(reader) == sorted([*wanted, *range(1, 301)])


def test_topics_and_partitions_may_have_bounds_of_their_own(dsn: str, orders: str, rides: str) -> None:
    starting = {"orders": {"0": 10, "1": -2, "2": "earliest", "3": 999}, "rides": 290}
    ending = {"orders": 1_000, "rides": "latest"}
    reader = reader_of(
        dsn,
        subscribe="orders,rides",
        startingOffsets=json.dumps(starting),
        endingOffsets=json.dumps(ending),
        numPartitions=1,
    )
    assert ranges_of(reader.partitions()) == [
        OffsetRange("orders", 0, 9, 999),
        OffsetRange("orders", 1, 0, 999),
        OffsetRange("orders", 2, 0, 999),
        *([OffsetRange("orders", 3, 998, 999)] if _partition_holds(dsn, 999, 3) else []),
        OffsetRange("rides", -1, 289, 300),
    ]


def _partition_holds(dsn: str, offset: int, partition: int) -> bool:
    with psycopg.connect(dsn) as connection:
        query = "SELECT eql_partition FROM eventsql.orders_event WHERE eql_id = %s"
        return connection.execute(query, [offset]).fetchone() == (partition,)


# Times


def test_a_range_of_times_is_read(platform: EventSQL, publish: Publish, dsn: str, orders: str) -> None:
    middle = datetime.now(UTC)
    publish(10, first=1_000)
    later = datetime.now(UTC)
    publish(10, first=1_010)
    bounds = {"startingTimestamp": middle.isoformat(), "endingTimestamp": later.isoformat()}
    assert offsets_read(reader_of(dsn, subscribe=orders, **bounds)) == list(range(1_001, 1_011))
    assert offsets_read(reader_of(dsn, subscribe=orders, startingTimestamp=later.isoformat())) == list(
        range(1_011, 1_021)
    )
    milliseconds = int((middle - timedelta(days=1)).timestamp() * 1_000)
    by_topic = json.dumps({"orders": milliseconds})
    assert len(offsets_read(reader_of(dsn, subscribe=orders, startingOffsetsByTimestamp=by_topic))) == 1_020
    assert offsets_read(reader_of(dsn, subscribe=orders, endingOffsetsByTimestamp=by_topic)) == []


@pytest.mark.in_rows
def test_times_without_a_zone_are_in_utc(
    platform: EventSQL, dsn: str, orders: str, read: Read, spark: SparkSession
) -> None:
    wanted = {event.id: event.buffered_at.replace(tzinfo=None) for event in platform.reader.read(orders)}
    with platform.database.connection() as connection:
        # As EventSQL's library for Java makes its tables, on a server that lives elsewhere.
        connection.execute("SET TIME ZONE 'UTC'")
        connection.execute("ALTER TABLE eventsql.orders_event ALTER eql_buffered_at TYPE timestamp")
        name = connection.execute("SELECT current_database()").fetchone()
        assert name is not None
        connection.execute(f"ALTER DATABASE {name[0]} SET timezone TO 'Asia/Tokyo'")
    found = {row.offset: row.timestamp for row in read(orders, schema="timestamp timestamp, offset bigint").collect()}
    assert found == wanted


# Retention


def test_events_that_retention_drops_before_a_task_reads_are_missed(
    platform: EventSQL, dsn: str, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    strict, lenient = (reader_of(dsn, subscribe=orders, failOnDataLoss=fail) for fail in (True, False))
    planned = strict.partitions()
    drop_the_first_events(platform, orders)
    with pytest.raises(DataLossError, match=r"events from offset 1 on of topic 'orders' were dropped after the read"):
        list(strict.read(planned[0]))
    with caplog.at_level(logging.WARNING):
        assert [batch.num_rows for batch in lenient.read(planned[0])] == []
    assert "the read goes on with the events that are left" in caplog.text


def test_offsets_that_retention_has_dropped_are_missed(
    platform: EventSQL, dsn: str, orders: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = drop_the_first_events(platform, orders)
    with pytest.raises(DataLossError, match=rf"offsets 5 to {first - 1} of topic 'orders'"):
        reader_of(dsn, subscribe=orders, startingOffsets=5).partitions()
    with caplog.at_level(logging.WARNING):
        assert len(offsets_read(reader_of(dsn, subscribe=orders, startingOffsets=5, failOnDataLoss=False))) == 20
    assert "the read goes on" in caplog.text
    assert len(offsets_read(reader_of(dsn, subscribe=orders))) == 20
    assert offsets_read(reader_of(dsn, subscribe=orders, endingOffsets=5)) == []


def test_offsets_of_a_log_that_retention_has_emptied_are_missed(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.set_retention(orders, Retention(seconds=1e-6))
    platform.retention.run_once()
    with pytest.raises(DataLossError):
        reader_of(dsn, subscribe=orders, startingOffsets=5).partitions()
    assert offsets_read(reader_of(dsn, subscribe=orders, startingOffsets=5, failOnDataLoss=False)) == []
    assert offsets_read(reader_of(dsn, subscribe=orders)) == []


@pytest.mark.parametrize(("starts", "fails"), [(5, True), ("earliest", False)])
def test_offsets_that_retention_drops_while_a_read_is_planned_are_missed_if_they_were_asked_for(
    *,
    platform: EventSQL,
    dsn: str,
    orders: str,
    monkeypatch: pytest.MonkeyPatch,
    starts: object,
    fails: bool,
) -> None:
    firsts: Callable[..., list[int | None]] = Logs.firsts

    def late(*args: object) -> list[int | None]:
        drop_the_first_events(platform, orders)
        return firsts(*args)

    monkeypatch.setattr(Logs, "firsts", late)
    reader = reader_of(dsn, subscribe=orders, startingOffsets=starts, endingOffsets=900, numPartitions=3)
    lost = pytest.raises(DataLossError, match=r"offsets 5 to 899 of topic 'orders'")
    with lost if fails else nullcontext():
        assert offsets_read(reader) == []


def test_a_read_may_begin_at_offset_0(dsn: str, orders: str) -> None:
    assert len(offsets_read(reader_of(dsn, subscribe=orders, startingOffsets=0))) == 1_000


def test_a_read_that_begins_behind_the_last_event_is_empty(session: Connection, dsn: str, orders: str) -> None:
    session.execute(f"SELECT nextval('eventsql.{stored(orders)}_eql_id_seq')")
    assert offsets_read(reader_of(dsn, subscribe=orders, startingOffsets=1_002)) == []


def test_a_task_on_a_standby_that_is_behind_fails(platform: EventSQL, dsn: str, orders: str) -> None:
    """A task whose events are all there reads them."""
    reader = reader_of(dsn, subscribe=orders, numPartitions=3, failOnDataLoss=False)
    complete, *behind = reader.partitions()
    with platform.database.connection() as connection:
        # As if the standby lacked the newest events.
        connection.execute(f"DELETE FROM eventsql.{stored(orders)} WHERE eql_id > 500")
    assert sum(batch.num_rows for batch in reader.read(complete)) == 333
    for split in behind:
        with pytest.raises(DatabaseError, match="lacks events"):
            list(reader.read(split))
    assert offsets_read(reader) == list(range(1, 501))


@pytest.mark.parametrize("retained", [False, True])
def test_a_task_on_a_standby_that_has_nothing_of_a_log_yet_fails(
    platform: EventSQL, dsn: str, orders: str, *, retained: bool
) -> None:
    """It does not look as if retention had dropped the events."""
    if retained:
        drop_the_first_events(platform, orders)
    reader = reader_of(dsn, subscribe=orders, numPartitions=2, failOnDataLoss=False)
    planned = reader.partitions()
    with platform.database.connection() as connection:
        connection.execute(f"DELETE FROM eventsql.{stored(orders)}")
    for split in planned:
        with pytest.raises(DatabaseError, match="lacks events"):
            list(reader.read(split))


def test_events_of_a_log_in_both_forms_that_retention_drops_before_a_task_reads_are_missed(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    def publish_in_a_new_segment(first: int) -> None:
        platform.retention.run_once()
        publish_some(platform, 20, topic=orders, first=first)

    platform.registry.set_retention(orders, Retention(events=1_000))
    publish_in_a_new_segment(1_000)
    platform.registry.set_storage(orders, "rows" if in_blocks() else "blocks")
    publish_in_a_new_segment(1_020)
    strict, lenient = (reader_of(dsn, subscribe=orders, failOnDataLoss=fail) for fail in (True, False))
    (planned,) = strict.partitions()
    platform.registry.set_retention(orders, Retention(events=30))
    platform.retention.run_once()
    with pytest.raises(DataLossError, match="were dropped"):
        list(strict.read(planned))
    assert sum(batch.num_rows for batch in lenient.read(planned)) == 40


def test_a_log_that_retention_empties_before_a_task_reads_is_missed(platform: EventSQL, dsn: str, orders: str) -> None:
    strict, lenient = (reader_of(dsn, subscribe=orders, failOnDataLoss=fail) for fail in (True, False))
    (planned,) = strict.partitions()
    platform.registry.set_retention(orders, Retention(seconds=1e-6))
    platform.retention.run_once()
    with pytest.raises(DataLossError, match="were dropped"):
        list(strict.read(planned))
    assert list(lenient.read(planned)) == []


def test_retention_does_not_take_what_a_task_is_reading(
    platform: EventSQL, dsn: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(dsn, subscribe=orders)
    (split,) = reader.partitions()
    batches = reader.read(split)
    first = next(batches)
    monkeypatch.setattr("eventsql_orchestration.maintenance.retention.WAIT_SECONDS", 1)
    with pytest.raises(EventSQLError, match="open transaction"):
        drop_the_first_events(platform, orders)
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 1_000


# SQL


def test_a_topic_is_a_view_in_sql_that_keeps_the_snapshot_of_its_first_query(
    spark: SparkSession, publish: Publish, dsn: str, orders: str
) -> None:
    create = (
        "CREATE OR REPLACE TEMPORARY VIEW recent USING eventsql "
        f"OPTIONS (dsn '{dsn}', subscribe 'orders', startingOffsets '991')"
    )
    counted = "SELECT count(*), min(offset) FROM recent WHERE topic = 'orders'"
    spark.sql(create)
    try:
        assert spark.sql(counted).collect() == [(10, 991)]
        publish(5, first=1_000)
        assert spark.sql(counted).collect() == [(10, 991)]
        spark.sql(create)
        assert spark.sql(counted).collect() == [(15, 991)]
    finally:
        spark.catalog.dropTempView("recent")


def test_a_view_may_name_its_columns(spark: SparkSession, platform: EventSQL, dsn: str, orders: str) -> None:
    spark.sql(
        "CREATE TEMPORARY VIEW keys (key STRING, offset BIGINT) USING eventsql "
        f"OPTIONS (dsn '{dsn}', subscribe 'orders', endingOffsets '11')"
    )
    try:
        found = spark.sql("SELECT * FROM keys ORDER BY offset").collect()
    finally:
        spark.catalog.dropTempView("keys")
    assert found == [(event.key, event.id) for event in platform.reader.read(orders, limit=10)]
