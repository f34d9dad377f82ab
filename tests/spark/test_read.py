"""Reading topics with Spark, in batches and as streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType
from sqlalchemy.engine import make_url

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, OffsetRange, Publication, Topic
from eventsql_orchestration.errors import (
    ClaimNotFoundError,
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    InvalidNameError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.spark import eventsql_error, range_options
from eventsql_orchestration.spark.adbc import known_database
from eventsql_orchestration.spark.log_tasks import TYPES, Piece, Projection, read_batches
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.ranges import Occupied, Stretch, equal_parts, even_tasks, shares
from eventsql_orchestration.spark.reader import read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from eventsql_orchestration.spark.writer import Staged
from tests.forms import stored
from tests.spark.conftest import ranges_of
from tests.waiting import wait_until

Read = Callable[..., DataFrame]

ALL = read_schema(headers=True)


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
    return ranges_of(EventSQLDataSource(given).reader(ALL).partitions())


# Batches


def test_a_read_gives_what_the_platform_s_own_reader_gives(platform: EventSQL, orders: str, read: Read) -> None:
    frame = read(orders, includeHeaders=True, numPartitions=3)
    assert frame.rdd.getNumPartitions() == 3
    assert in_order(frame) == rows_of(platform, orders)


def test_a_read_without_headers_has_the_other_columns(platform: EventSQL, orders: str, read: Read) -> None:
    assert read(orders).columns == ["key", "value", "topic", "partition", "offset", "timestamp"]
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
            wanted = [Piece(OffsetRange(orders, NOT_PARTITIONED, 0, 10), f"{orders}_event", 1)]
            for columns in (["key", "offset"], ["topic"], ["offset", "topic"]):
                (batch,) = read_batches(limited, wanted, Projection(columns))
                assert batch.schema.names == columns
                assert batch.num_rows == 10
            with pytest.raises(DatabaseError, match="permission denied"):
                list(read_batches(limited, wanted, Projection(["key", "value"])))
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


def test_arrow_types_are_those_that_spark_insists_on() -> None:
    assert to_arrow_schema(ALL, timezone="UTC").types == [TYPES[name] for name in ALL.fieldNames()]
    for name in ALL.fieldNames():
        assert to_arrow_schema(StructType([ALL[name]]), timezone="UTC").field(name).nullable


def test_events_that_come_while_a_query_is_planned_belong_to_the_next(
    publish: Callable[..., None], dsn: str, orders: str
) -> None:
    splits = splits_of(dsn, orders, numPartitions=4)
    publish(10, first=1_000)
    assert splits[-1].upto == 1_000
    assert splits_of(dsn, orders)[-1].upto == 1_010


@pytest.mark.in_rows
def test_splits_are_even_where_offsets_are_rare(
    platform: EventSQL, publish: Callable[..., None], dsn: str, orders: str
) -> None:
    # Every id of the second half is followed by 99 that were given out in vain.
    with platform.database.connection() as connection:
        connection.execute(f"ALTER SEQUENCE eventsql.{stored('orders')}_eql_id_seq INCREMENT BY 100")
    publish(1_000, first=1_000)
    counts = [
        platform.reader.count(orders, after=split.after, upto=split.upto)
        for split in splits_of(dsn, orders, numPartitions=8)
    ]
    assert sum(counts) == 2_000
    assert max(counts) <= 2_000 / 8 * 1.1


def test_splits_are_even_over_events_and_not_over_offsets(
    platform: EventSQL, publish: Callable[..., None], dsn: str, orders: str
) -> None:
    # A third of the events after a gap that is far wider than all of them.
    with platform.database.connection() as connection:
        connection.execute(f"ALTER SEQUENCE eventsql.{stored('orders')}_eql_id_seq RESTART WITH 5000000000")
    publish(500, first=1_000)
    splits = splits_of(dsn, orders, numPartitions=6)
    assert [split.after for split in splits[1:]] == [split.upto for split in splits[:-1]]
    assert (splits[0].after, splits[-1].upto) == (0, platform.reader.end(orders))
    counts = [platform.reader.count(orders, after=split.after, upto=split.upto) for split in splits]
    assert counts == [250] * 6


occupied_stretches = st.lists(st.integers(min_value=1, max_value=10**7), unique=True, max_size=40).map(
    lambda edges: list(zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False))
)


@given(ranges=st.lists(occupied_stretches, max_size=4), tasks=st.integers(1, 50), slack=st.integers(0, 1_000))
def test_tasks_cover_ranges_exactly_and_evenly(ranges: list[list[tuple[int, int]]], tasks: int, slack: int) -> None:
    occupied = [
        Occupied(0, (found[-1][1] if found else 0) + slack, [Stretch(low, high, high - low + 1) for low, high in found])
        for found in ranges
    ]
    cut = even_tasks(occupied, tasks)
    for index, (each, found) in enumerate(zip(occupied, ranges, strict=True)):
        parts = [bounds for task in cut for number, bounds in task if number == index]
        assert bool(parts) == bool(found)
        if parts:
            assert (parts[0][0], parts[-1][1]) == (0, each.upto)
            assert all(before[1] == after[0] for before, after in pairwise(parts))
    held = [
        sum(
            max(0, min(last, high) - max(first, low + 1) + 1)
            for index, (low, high) in task
            for first, last in ranges[index]
        )
        for task in cut
    ]
    assert len(cut) == min(tasks, sum(each.events for each in occupied))
    assert not held or max(held) - min(held) <= 1


@given(waiting=st.lists(st.integers(0, 1_000), min_size=1, max_size=20), most=st.integers(20, 5_000))
def test_a_limit_is_shared_and_never_exceeded(waiting: list[int], most: int) -> None:
    given_to = shares(waiting, most)
    assert sum(given_to) == min(most, sum(waiting))
    assert all(part <= there for part, there in zip(given_to, waiting, strict=True))
    assert all(part > 0 for part, there in zip(given_to, waiting, strict=True) if there)


@given(after=st.integers(0, 1_000), width=st.integers(0, 1_000), parts=st.integers(1, 300))
def test_equal_parts_cover_a_range_exactly(after: int, width: int, parts: int) -> None:
    found = equal_parts(after, after + width, parts)
    assert [offset for low, high in found for offset in range(low, high)] == list(range(after, after + width))
    assert len(found) == min(parts, width)


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"assign": '{"orders": [0]}'}, ConfigurationError, "option subscribe cannot be used here: assign is given"),
        ({"subscribe": None, "assign": '{"orders": 0}'}, ValidationError, "option assign: .* list of partitions"),
        ({"subscribe": None, "assign": '{"orders": [7]}'}, PartitionOutOfRangeError, "assign: .*partitions 0 to 3"),
        ({"subscribe": None, "assign": "orders"}, ValidationError, "option assign is not a JSON object"),
        ({"subscribe": None, "assign": "[" * 100_000}, ValidationError, "option assign is not a JSON object"),
        ({"startingOffsets": '{"rides": 5}'}, ValidationError, "option startingOffsets: topic 'rides' is not read"),
        (
            {"subscribe": "orders,rides", "startingOffsets": '{"orders": 5}'},
            ValidationError,
            "option startingOffsets: topic rides is missing",
        ),
        ({"startingOffsets": '{"orders": {"0": 5}}'}, ValidationError, "startingOffsets: .* lacks partition 1, 2, 3"),
        (
            {"partition": "0", "startingOffsets": '{"orders": {"0": 5, "1": 5}}'},
            ValidationError,
            "startingOffsets: partition 1 of topic 'orders' is not read",
        ),
        (
            {"startingOffsets": '{"orders": {}}'},
            ValidationError,
            "startingOffsets: name the partitions of topic 'orders'",
        ),
        ({"startingOffsets": "1", "startingTimestamp": "5"}, ConfigurationError, "option startingTimestamp cannot"),
        (
            {"startingTimestamp": "5", "startingOffsetsByTimestamp": '{"orders": 5}'},
            ConfigurationError,
            "option startingOffsetsByTimestamp cannot be used here",
        ),
        ({"startingTimestamp": "9" * 30}, ValidationError, "option startingTimestamp: 9+ is out of range"),
        ({"startingTimestamp": "yesterday"}, ValidationError, "option startingTimestamp: 'yesterday' is not a time"),
        ({"startingTimestamp": "2026-01-01T00:00:00"}, ValidationError, "option startingTimestamp: .* is not a time"),
        (
            {"startingTimestamp": "0001-01-01T00:00:00+14:00"},
            ValidationError,
            "option startingTimestamp: .* is not a time",
        ),
        (
            {"startingTimestamp": "9999999999999"},
            ValidationError,
            "option startingTimestamp: topic 'orders' has no event",
        ),
        ({"endingOffsetsByTimestamp": "7"}, ValidationError, "option endingOffsetsByTimestamp is not a JSON object"),
        ({"failOnDataLoss": "perhaps"}, ValidationError, "option failOnDataLoss: 'perhaps'"),
        ({"filter": '["ann"]'}, ValidationError, "option filter is not a JSON object"),
        ({"filter": '{"value": "ann"}'}, ValidationError, "option filter: "),
        ({"subscribe": None, "claim": "1", "filter": "{}"}, ConfigurationError, "option filter cannot be used here"),
        ({"mode": "DROPMALFORMED"}, ValidationError, "option mode: 'dropmalformed' is not known"),
        ({"consumer": "mailer"}, ConfigurationError, "option consumer cannot be used here: it is for streams"),
        ({"numPartitions": "2", "minPartitions": "2"}, ConfigurationError, "option minPartitions cannot be used here"),
        ({"claim": "1"}, ConfigurationError, "option subscribe cannot be used here"),
        ({"subscribe": None, "claim": "1"}, ClaimNotFoundError, "option claim: there is no claim 1"),
        ({"dsn": None}, ConfigurationError, "option dsn is missing"),
        ({"dsn": "mysql://host/db"}, ConfigurationError, "must be PostgreSQL"),
        ({"schema": "No Schema"}, ConfigurationError, "schema"),
        ({"subscribe": None}, ConfigurationError, "option subscribe is missing"),
        ({"subscribe": "No-Topic"}, InvalidNameError, "option subscribe"),
        ({"subscribe": "nothing"}, TopicNotFoundError, "'nothing' does not exist"),
        ({"startingOffset": "5"}, ConfigurationError, "startingoffset is not known: did you mean startingOffsets"),
        ({"startingOffsets": "five"}, ValidationError, "option startingOffsets: 'five' is not a number"),
        ({"startingOffsets": "latest"}, ValidationError, "option startingOffsets: 'latest' is for streams"),
        ({"startingOffsets": "-2"}, ValidationError, "option startingOffsets: -2 is out of range"),
        ({"startingOffsets": "1002"}, ValidationError, "option startingOffsets: 1002 is out of range.*at offset 1000"),
        ({"endingOffsets": "earliest"}, ValidationError, "option endingOffsets: 'earliest'"),
        ({"endingOffsets": "1002"}, ValidationError, "option endingOffsets: 1002 is out of range.*at offset 1000"),
        ({"endingOffsets": str(2**63)}, ValidationError, "option endingOffsets: .* is out of range"),
        ({"startingOffsets": "9", "endingOffsets": "8"}, ValidationError, "8 lies before startingOffsets"),
        ({"partition": "4"}, PartitionOutOfRangeError, "option partition or assign: .*partitions 0 to 3"),
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


def test_tasks_load_neither_the_database_room_nor_pandas() -> None:
    program = "import sys, eventsql_orchestration.spark.source; print({'sqlalchemy', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"set()\n"


def test_a_read_does_not_load_pandas_either(dsn: str, orders: str) -> None:
    program = f"""
import sys
from eventsql_orchestration.model import OffsetRange
from eventsql_orchestration.spark.log_tasks import Piece, Projection, read_batches
from eventsql_orchestration.spark.options import Source

columns = ["key", "value", "topic", "partition", "offset", "timestamp"]
pieces = [Piece(OffsetRange({orders!r}, -1, 0, 10), {stored(orders)!r}, 1)]
(batch,) = read_batches(Source({dsn!r}, "eventsql", "the database"), pieces, Projection(columns))
print(batch.num_rows, "pandas" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"10 False\n"


def test_the_tasks_of_a_process_ask_for_the_servers_types_once_and_keep_no_connection(
    platform: EventSQL, dsn: str, orders: str
) -> None:
    source, before = Source(dsn, "eventsql", "the database"), known_database.cache_info()
    wanted = [Piece(OffsetRange(orders, NOT_PARTITIONED, 0, 10), f"{orders}_event", 1)]
    for _ in range(3):
        (batch,) = read_batches(source, wanted, Projection(["offset"]))
        assert batch.num_rows == 10
    after = known_database.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)
    with platform.database.connection() as connection:

        def gone() -> bool:
            return (
                connection.execute(
                    "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = ''"
                ).fetchall()
                == []
            )

        # The server notices a moment later that a connection is closed.
        wait_until(gone, "no connection is left")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (StructType([StructField("id", LongType())]), "no column 'id', there are key, value"),
        (StructType([StructField("value", StringType())]), r"column 'value' is binary \(or a struct .*\), not string"),
        (StructType([StructField("offset", LongType(), nullable=False)]), "column 'offset' is nullable"),
        (StructType([StructField("key", StringType())] * 2), "column 'key' occurs twice"),
        (StructType([]), "no column is named"),
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
    assert error.message == "option startingOffsets: 'five' is not a number: write an offset, earliest or latest"
    assert eventsql_error(RuntimeError("of another kind")) is None


def test_the_error_says_that_the_server_went_away_in_mid_read(platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("wide"))
    platform.publisher.publish_all(Publication("wide", bytes(1_000_000)) for _ in range(50))
    platform.transfer.run_once()
    source = Source(dsn, "eventsql", "the database")
    batches = read_batches(
        source, [Piece(OffsetRange("wide", NOT_PARTITIONED, 0, 50), "wide_event", 1)], Projection(["value"])
    )
    next(batches)
    with platform.database.connection() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND query LIKE 'COPY%wide_event%' AND pid <> pg_backend_pid()"
        )
    with pytest.raises(DatabaseUnavailableError, match=r"wide\(0, 50\] could not be read: the database"):
        list(batches)


def test_the_error_says_that_the_topic_was_deleted_after_the_read_was_planned(
    platform: EventSQL, publish: Callable[..., None], dsn: str, orders: str
) -> None:
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": orders}).reader(ALL)
    (split,) = reader.partitions()
    platform.registry.unregister_topic(orders, force=True)
    with pytest.raises(DatabaseError, match="'orders' was deleted, or its log got another form"):
        list(reader.read(split))
    # Nor are events of another topic of this name those of the planned range.
    platform.registry.register_topic(Topic(orders, partitions=4))
    publish(5)
    with pytest.raises(DatabaseError, match="'orders' was deleted, or its log got another form"):
        list(reader.read(split))


def test_tasks_on_other_machines_get_the_password_of_the_drivers_environment(
    dsn: str, orders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make_url(dsn)
    given = {"dsn": url._replace(password=None).render_as_string()}
    monkeypatch.setenv("PGPASSWORD", str(url.password))
    reader = EventSQLDataSource({**given, "subscribe": orders}).reader(ALL)
    splits = reader.partitions()
    writer = EventSQLDataSource({**given, "topic": orders}).writer(
        StructType().add("value", BinaryType()), overwrite=False
    )
    monkeypatch.delenv("PGPASSWORD")
    assert sum(batch.num_rows for split in splits for batch in reader.read(split)) == 1_000
    assert isinstance(writer.write(iter([pa.RecordBatch.from_pydict({"value": [b"one"]})])), Staged)


def test_no_plan_shows_the_password(dsn: str, orders: str, read: Read, spark: SparkSession) -> None:
    password = psycopg.conninfo.conninfo_to_dict(dsn)["password"]
    assert isinstance(password, str)
    frame = read(orders)
    assert password not in frame._jdf.queryExecution().toString()
    assert password not in repr(EventSQLDataSource({"dsn": dsn, "subscribe": orders}).reader(ALL).__dict__)
