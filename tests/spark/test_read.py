"""Reading topics with Spark, in batches and as streams."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, OffsetRange, Publication, Topic
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    InvalidNameError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.spark import FORMAT, eventsql_error, range_options
from eventsql_orchestration.spark.batches import TYPES, read_batches
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.reader import COLUMNS, Split, read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.spark.splits import EVENTS_PER_SPLIT, equal_parts, even_splits

Read = Callable[..., DataFrame]

ALL = read_schema(headers=True)


@pytest.fixture
def orders(platform: EventSQL) -> str:
    """A topic of 1,000 events over 4 partitions, some without key or metadata."""
    platform.registry.register_topic(Topic("orders", partitions=4))
    publish(platform, 1_000)
    return "orders"


def publish(platform: EventSQL, events: int, *, topic: str = "orders", first: int = 0) -> None:
    platform.publisher.publish_all(
        Publication(
            topic,
            f"válue {number}".encode() + bytes([number % 256]),
            key=None if number % 5 == 0 else f"kéy-{number % 7}",
            metadata={} if number % 3 == 0 else {"source": "wéb", "number": str(number), "": '\\"{}'},
        )
        for number in range(first, first + events)
    )
    platform.transfer.run_once()


def rows_of(platform: EventSQL, topic: str, **wanted: Any) -> list[Row]:
    """What Spark should give for the events that the platform's own reader gives."""
    return [
        Row(
            key=event.key,
            value=bytearray(event.value),
            topic=event.topic,
            partition=event.partition,
            offset=event.id,
            timestamp=event.buffered_at.replace(tzinfo=None),
            headers=dict(event.metadata),
        )
        for event in platform.reader.read(topic, **wanted)
    ]


def in_order(frame: DataFrame) -> list[Row]:
    return sorted(frame.collect(), key=lambda row: row["offset"])


def splits_of(dsn: str, topic: str, **options: object) -> list[OffsetRange]:
    given = {"dsn": dsn, "subscribe": topic, **{name: str(value) for name, value in options.items()}}
    splits = EventSQLDataSource(given).reader(ALL).partitions()
    assert all(isinstance(split, Split) for split in splits)
    return [split.offsets for split in splits if isinstance(split, Split)]


# Batches


def test_a_read_gives_what_the_platform_s_own_reader_gives(platform: EventSQL, orders: str, read: Read) -> None:
    frame = read(orders, includeHeaders=True, numPartitions=3)
    assert frame.rdd.getNumPartitions() == 3
    assert in_order(frame) == rows_of(platform, orders)


def test_a_read_without_headers_has_the_other_columns(platform: EventSQL, orders: str, read: Read) -> None:
    assert read(orders).columns == [name for name in COLUMNS if name != "headers"]
    assert read(orders).count() == 1_000


def test_a_range_of_one_partition_is_read_exactly(platform: EventSQL, orders: str, read: Read) -> None:
    wanted = OffsetRange(orders, 2, 100, 900)
    frame = read(orders, includeHeaders=True, numPartitions=4, **range_options(wanted))
    assert in_order(frame) == rows_of(platform, orders, partition=2, after=100, upto=900)


def test_kafka_s_offsets_include_the_first_and_exclude_the_last(orders: str, read: Read) -> None:
    frame = read(orders, schema="offset long", startingOffsets=10, endingOffsets=13)
    assert [row.offset for row in in_order(frame)] == [10, 11, 12]


def test_each_task_gives_its_events_in_their_order(platform: EventSQL, orders: str, read: Read) -> None:
    offsets = [row.offset for row in read(orders, schema="offset long", numPartitions=1).collect()]
    assert offsets == [event.id for event in platform.reader.read(orders)]


def test_a_topic_without_events_is_an_empty_table(platform: EventSQL, read: Read) -> None:
    platform.registry.register_topic(Topic("quiet"))
    assert read("quiet", includeHeaders=True).collect() == []


def test_columns_come_in_the_order_asked_for(orders: str, read: Read) -> None:
    frame = read(orders, schema="headers map<string,string>, topic string, offset long", endingOffsets=2)
    assert frame.collect() == [Row(headers={}, topic=orders, offset=1)]


def test_only_the_columns_asked_for_are_fetched(dsn: str, orders: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        database = connection.info.dbname
        role = sql.Identifier(f"reader_{database}")
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(role))
        try:
            connection.execute(sql.SQL("GRANT USAGE ON SCHEMA eventsql TO {}").format(role))
            connection.execute(sql.SQL("GRANT SELECT (eql_id, eql_key) ON eventsql.orders_event TO {}").format(role))
            limited = Source(
                f"postgresql://reader_{database}:secret@{connection.info.host}:{connection.info.port}/{database}",
                "eventsql",
                "the database",
            )
            wanted = OffsetRange(orders, NOT_PARTITIONED, 0, 10)
            for columns in (["key", "offset"], ["topic"], ["offset", "topic"]):
                (batch,) = read_batches(limited, wanted, columns)
                assert batch.schema.names == columns
                assert batch.num_rows == 10
            with pytest.raises(DatabaseError, match="permission denied"):
                list(read_batches(limited, wanted, ["key", "value"]))
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


def test_arrow_types_are_those_that_spark_insists_on() -> None:
    assert to_arrow_schema(ALL, timezone="UTC").types == [TYPES[name] for name in ALL.fieldNames()]
    for name in ALL.fieldNames():
        assert to_arrow_schema(StructType([ALL[name]]), timezone="UTC").field(name).nullable


def test_events_that_come_while_a_query_is_planned_belong_to_the_next(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    splits = splits_of(dsn, orders, numPartitions=4)
    publish(platform, 10, first=1_000)
    assert splits[-1].upto == 1_000
    assert splits_of(dsn, orders)[-1].upto == 1_010


def test_splits_are_even_over_events_and_not_over_offsets(platform: EventSQL, dsn: str, orders: str) -> None:
    # A third of the events after a gap that is far wider than all of them.
    with platform.database.connection() as connection:
        connection.execute("ALTER SEQUENCE eventsql.orders_event_eql_id_seq RESTART WITH 5000000000")
    publish(platform, 500, first=1_000)
    splits = splits_of(dsn, orders, numPartitions=6)
    assert [split.after for split in splits[1:]] == [split.upto for split in splits[:-1]]
    assert (splits[0].after, splits[-1].upto) == (0, platform.reader.end(orders))
    counts = [platform.reader.count(orders, after=split.after, upto=split.upto) for split in splits]
    assert counts == [250] * 6


occupied_stretches = st.lists(st.integers(min_value=1, max_value=10**7), unique=True, max_size=40).map(
    lambda edges: list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@given(occupied=occupied_stretches, splits=st.one_of(st.none(), st.integers(1, 50)), slack=st.integers(0, 1_000))
def test_splits_cover_a_range_exactly(occupied: list[tuple[int, int]], splits: int | None, slack: int) -> None:
    upto = (occupied[-1][1] if occupied else 0) + slack
    parts = even_splits(0, upto, occupied, splits)
    if not occupied:
        assert parts == []
        return
    assert parts[0][0] == 0
    assert parts[-1][1] == upto
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    events = sum(last - first + 1 for first, last in occupied)
    held = [sum(max(0, min(last, high) - max(first, low + 1) + 1) for first, last in occupied) for low, high in parts]
    assert len(parts) == min(splits or -(-events // EVENTS_PER_SPLIT), events)
    assert max(held) - min(held) <= 1


@given(after=st.integers(0, 1_000), width=st.integers(0, 1_000), parts=st.integers(1, 300))
def test_equal_parts_cover_a_range_exactly(after: int, width: int, parts: int) -> None:
    found = equal_parts(after, after + width, parts)
    assert [offset for low, high in found for offset in range(low, high)] == list(range(after, after + width))
    assert len(found) == min(parts, width)


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dsn": None}, ConfigurationError, "option dsn is missing"),
        ({"dsn": "mysql://host/db"}, ConfigurationError, "must be PostgreSQL"),
        ({"schema": "No Schema"}, ConfigurationError, "schema"),
        ({"subscribe": None}, ConfigurationError, "option subscribe is missing"),
        ({"subscribe": "No-Topic"}, InvalidNameError, "option subscribe"),
        ({"subscribe": "nothing"}, TopicNotFoundError, "'nothing' does not exist"),
        ({"startingOffset": "5"}, ConfigurationError, "startingoffset is not known: is startingOffsets meant"),
        ({"startingOffsets": "five"}, ValidationError, "option startingOffsets: 'five' is not a number"),
        ({"startingOffsets": "latest"}, ValidationError, "option startingOffsets: 'latest'"),
        ({"startingOffsets": "-2"}, ValidationError, "option startingOffsets: -2 is out of range"),
        ({"startingOffsets": "1002"}, ValidationError, "option startingOffsets: 1002 is out of range.*at offset 1000"),
        ({"endingOffsets": "earliest"}, ValidationError, "option endingOffsets: 'earliest'"),
        ({"endingOffsets": "1002"}, ValidationError, "option endingOffsets: 1002 is out of range.*at offset 1000"),
        ({"endingOffsets": str(2**63)}, ValidationError, "option endingOffsets: .* is out of range"),
        ({"startingOffsets": "9", "endingOffsets": "8"}, ValidationError, "8 lies before startingOffsets"),
        ({"partition": "4"}, PartitionOutOfRangeError, "option partition: .*partitions 0 to 3"),
        ({"partition": "two"}, ValidationError, "option partition: 'two' is not a whole number"),
        ({"numPartitions": "0"}, ValidationError, "option numPartitions: 0 is out of range"),
        ({"numPartitions": " "}, ValidationError, "option numPartitions is empty"),
        ({"includeHeaders": "maybe"}, ValidationError, "option includeHeaders: 'maybe'"),
        ({"maxOffsetsPerTrigger": "5"}, ConfigurationError, "option maxOffsetsPerTrigger cannot be used here"),
    ],
)
def test_a_bad_option_is_named(
    *,
    dsn: str,
    orders: str,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, str | None],
    error: type[EventSQLError],
    message: str,
) -> None:
    monkeypatch.delenv("EVENTSQL_DSN", raising=False)
    wanted = {name: value for name, value in ({"dsn": dsn, "subscribe": orders} | options).items() if value is not None}
    with pytest.raises(error, match=message):
        EventSQLDataSource(wanted).reader(ALL).partitions()


def test_the_database_may_be_named_by_the_environment(dsn: str, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    monkeypatch.setenv("EVENTSQL_SCHEMA", "eventsql")
    assert len(EventSQLDataSource({"subscribe": orders}).reader(ALL).partitions()) == 1


def test_the_options_can_be_had_without_loading_spark() -> None:
    program = "import sys, eventsql_orchestration.spark as s; s.spark_config(); sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (StructType([StructField("id", LongType())]), "no column 'id', there are key, value"),
        (StructType([StructField("value", StringType())]), "column 'value' is binary, not string"),
        (StructType([StructField("offset", LongType(), nullable=False)]), "column 'offset' is nullable"),
        (StructType([]), "ask for at least one of the columns"),
    ],
)
def test_a_column_that_no_read_gives_is_named(dsn: str, schema: StructType, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EventSQLDataSource({"dsn": dsn, "subscribe": "orders"}).reader(schema)


def test_the_error_of_this_package_can_be_had_from_spark_s(orders: str, read: Read) -> None:
    with pytest.raises(PySparkException) as failure:
        read(orders, startingOffsets="five").collect()
    error = eventsql_error(failure.value)
    assert isinstance(error, ValidationError)
    assert error.message == "option startingOffsets: 'five' is not a number: take an offset or earliest"
    assert eventsql_error(RuntimeError("of another kind")) is None


def test_a_server_that_goes_away_in_mid_read_is_said_to(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("wide"))
    platform.publisher.publish_all(Publication("wide", bytes(1_000_000)) for _ in range(50))
    platform.transfer.run_once()
    source = Source(dsn, "eventsql", "the database")
    batches = read_batches(source, OffsetRange("wide", NOT_PARTITIONED, 0, 50), ["value"])
    next(batches)
    with platform.database.connection() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'COPY%wide_event%' AND pid <> pg_backend_pid()"
        )
    with pytest.raises(DatabaseUnavailableError, match=r"wide\(0, 50\] could not be read: the database"):
        list(batches)


def test_no_plan_shows_the_password(dsn: str, orders: str, read: Read, spark: SparkSession) -> None:
    password = psycopg.conninfo.conninfo_to_dict(dsn)["password"]
    assert isinstance(password, str)
    frame = read(orders)
    assert password not in frame._jdf.queryExecution().toString()
    assert password not in repr(EventSQLDataSource({"dsn": dsn, "subscribe": orders}).reader(ALL).__dict__)


# Streams


def drain(frame: DataFrame, checkpoint: Path, sink: Path) -> list[dict[str, Any]]:
    """Run a stream until it has read all there is; gives the progress of its batches."""
    query = (
        frame.writeStream.format("json")
        .option("path", str(sink))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(200)
        return [json.loads(progress.json) for progress in query.recentProgress if progress.numInputRows]
    finally:
        query.stop()


def stream_of(spark: SparkSession, dsn: str, topic: str, **options: object) -> DataFrame:
    given = {"dsn": dsn, "subscribe": topic, **{name: str(value) for name, value in options.items()}}
    return spark.readStream.format(FORMAT).schema("offset long, partition int").options(**given).load()


def offsets_in(spark: SparkSession, sink: Path) -> list[int]:
    return sorted(row.offset for row in spark.read.schema("offset long").json(str(sink)).collect())


def test_a_stream_that_restarts_reads_exactly_what_is_missing(
    *, spark: SparkSession, platform: EventSQL, dsn: str, orders: str, checkpoint: Path, tmp_path: Path
) -> None:
    sink = tmp_path / "sink"
    frame = stream_of(spark, dsn, orders, startingOffsets=101, maxOffsetsPerTrigger=400, numPartitions=2)
    assert [batch["numInputRows"] for batch in drain(frame, checkpoint, sink)] == [400, 400, 100]
    publish(platform, 50, first=1_000)
    (batch,) = drain(stream_of(spark, dsn, orders, numPartitions=2), checkpoint, sink)
    assert batch["sources"][0]["startOffset"] == {orders: {"0": 1_001}}
    assert batch["sources"][0]["endOffset"] == {orders: {"0": 1_051}}
    assert offsets_in(spark, sink) == list(range(101, 1_051))


def test_a_stream_of_one_partition_counts_its_events_alone(platform: EventSQL, dsn: str, orders: str) -> None:
    given = {"dsn": dsn, "subscribe": orders, "partition": "1", "startingOffsets": "earliest"}
    reader = EventSQLDataSource({**given, "maxOffsetsPerTrigger": "30"}).streamReader(ALL)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    splits = [split.offsets for split in reader.partitions(start, end) if isinstance(split, Split)]
    assert start == {orders: {"0": 1}}
    assert sum(platform.reader.count(orders, after=s.after, upto=s.upto, partition=1) for s in splits) == 30
    assert {split.partition for split in splits} == {1}
    reader.stop()


def test_a_stream_starts_at_the_end_unless_told_otherwise(platform: EventSQL, dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders}).streamReader(ALL)
    start = reader.initialOffset()
    assert start == {orders: {"0": 1_001}}
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
    assert reader.partitions(start, start) == []
    publish(platform, 3, first=1_000)
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == {orders: {"0": 1_004}}
    assert reader.reportLatestOffset() == {orders: {"0": 1_004}}
    reader.stop()


def test_a_stream_to_now_stops_at_what_was_there_when_it_began(platform: EventSQL, dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders, "startingOffsets": "earliest"}).streamReader(ALL)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    publish(platform, 3, first=1_000)
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == {orders: {"0": 1_001}}
    reader.stop()


def test_a_stream_whose_topic_was_made_anew_stops(platform: EventSQL, dsn: str, orders: str) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders}).streamReader(ALL)
    start = reader.initialOffset()
    platform.registry.unregister_topic(orders, force=True)
    platform.registry.register_topic(Topic(orders, partitions=4))
    publish(platform, 3)
    with pytest.raises(EventSQLError, match="ends at offset 3, and this stream has read on to 1001"):
        reader.latestOffset(start, reader.getDefaultReadLimit())
    reader.stop()


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
    with pytest.raises(ValidationError, match="the checkpoint is one of rides, not of orders"):
        reader.partitions({"rides": {"0": 1}}, {"rides": {"0": 2}})
    reader.stop()
