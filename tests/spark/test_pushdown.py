"""Filters that Spark pushes down, and those that it keeps: the rows are the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from eventsql_orchestration import Connection, Consumer, EventSQL, OffsetRange, Topic
from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.model import FIRST_TIME, LAST_TIME, Retention
from eventsql_orchestration.spark.filters import Conditions, push
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import BatchReader, FilteringReader, read_schema
from eventsql_orchestration.spark.source import EventSQLDataSource
from tests.spark.conftest import ranges_of

Read = Callable[..., DataFrame]

CONDITIONS = [
    "offset > 990 OR offset < 3",
    "offset > 500 AND offset <= 510",
    "offset IN (1, 77, 5000)",
    "NOT offset IN (1, 77) AND offset < 80",
    "partition = 2",
    "partition IN (0, 3) AND offset >= 900",
    "partition IN (-1, 0, 32767, 2147483647) AND offset <= 100",
    "partition <> 1 AND offset BETWEEN 10 AND 110",
    "key = 'kéy-1'",
    "key <> 'kéy-1' AND offset <= 100",
    "key IS NULL AND offset <= 100",
    "key <=> NULL AND offset <= 100",
    "NOT key <=> 'kéy-1' AND offset <= 100",
    "key LIKE 'kéy-_' AND key LIKE '%3'",
    "key LIKE 'k%' AND key LIKE '%é%' AND offset <= 100",
    "key > 'kéy-4'",
    "key = 'it''s \\\\ {0} %s'",
    "topic = 'orders' AND offset < 9",
    "topic IN ('rides', 'none')",
    "topic IN ('orders', 'rides') AND topic IN ('rides', 'none')",
    "timestamp < '2001-01-01' OR offset = 7",
    "timestamp >= '2001-01-01' AND offset = 7",
    "timestamp >= '0001-01-03' AND NOT timestamp <= '0001-01-03 00:00:00.000001' AND offset > 999",
    "timestamp < '9999-12-30 23:59:59.999999' AND offset > 999",
    "timestamp IN ('0001-01-03', '9999-12-30 23:59:59.999999')",
    "headers['source'] = 'wéb' AND offset <= 100",
    "length(value) > 10 AND offset > 0 AND partition >= 1",
]


def offsets_of(frame: DataFrame) -> list[int]:
    return sorted(row.offset for row in frame.select("offset").collect())


def test_a_query_gives_the_same_rows_if_spark_or_the_database_filters(
    spark: SparkSession, platform: EventSQL, session: Connection, orders: str, read: Read
) -> None:
    session.execute(
        "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_created_at) "
        "SELECT 'orders', 0, '', '{}', time FROM unnest('{-infinity,infinity}'::timestamptz[]) time"
    )
    platform.transfer.run_once()
    # Spark says of each event which conditions it meets.
    met = [f"({condition}) AS met_{number}" for number, condition in enumerate(CONDITIONS)]
    rows = read(orders, includeHeaders=True).selectExpr("offset", *met).collect()
    kept = [sorted(row.offset for row in rows if row[f"met_{number}"]) for number in range(len(CONDITIONS))]
    assert sum(map(bool, kept)) == len(CONDITIONS) - 3
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = [
            offsets_of(read(orders, includeHeaders=True, pushFilters=True).where(condition)) for condition in CONDITIONS
        ]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert pushed == kept


def test_pushed_filters_are_not_applied_by_spark_again(pushing: None, orders: str, read: Read) -> None:
    frame = read(orders, pushFilters=True).where(
        "key = 'kéy-1' AND partition = 2 AND offset > 10 AND length(value) > 3"
    )
    plan = frame._jdf.queryExecution().executedPlan().toString()
    (remaining,) = [line for line in plan.splitlines() if "Filter" in line and "BatchScan" not in line]
    assert "length(value" in remaining
    assert "partition" not in remaining
    assert "offset" not in remaining


def test_a_reader_without_filters_works_while_they_are_pushed(pushing: None, orders: str, read: Read) -> None:
    assert read(orders).count() == 1_000
    assert read(orders, pushFilters=True).count() == 1_000


def test_a_frame_that_several_queries_use_gives_each_its_rows(pushing: None, orders: str, read: Read) -> None:
    # Spark 4.3 would let the first query's filters decide what the others read.
    frame = read(orders, schema="offset bigint")
    first, last = frame.where("offset <= 10"), frame.where("offset > 970")
    assert first.union(last).count() == 40
    assert (first.count(), frame.count()) == (10, 1_000)


def filtering(dsn: str, *filters: Filter, **options: str) -> tuple[FilteringReader, list[Filter]]:
    given = {"dsn": dsn, "subscribe": "orders", **options}
    reader = FilteringReader(ReadOptions.parse(given, streaming=False), read_schema(headers=True))
    return reader, list(reader.pushFilters(list(filters)))


def offsets_read(reader: BatchReader) -> list[int]:
    batches = [batch for split in reader.partitions() for batch in reader.read(split)]
    return [offset for batch in batches for offset in batch["offset"].to_pylist()]


def test_filters_narrow_what_is_planned(platform: EventSQL, dsn: str, orders: str) -> None:
    platform.registry.register_topic(Topic("rides"))
    reader, left = filtering(
        dsn,
        IsNotNull(("topic",)),
        In(("topic",), ("orders", "none")),
        GreaterThan(("offset",), 100),
        LessThanOrEqual(("offset",), 200),
        In(("partition",), (1, 3, 9)),
        subscribe="orders,rides",
    )
    assert left == [IsNotNull(("topic",))]
    assert ranges_of(reader.partitions()) == [OffsetRange("orders", 1, 100, 200), OffsetRange("orders", 3, 100, 200)]


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (GreaterThan(("offset",), 990), range(991, 1_001)),
        (GreaterThanOrEqual(("offset",), 991), range(991, 1_001)),
        (LessThan(("offset",), 11), range(1, 11)),
        (LessThanOrEqual(("offset",), 10), range(1, 11)),
        (EqualTo(("offset",), 7), [7]),
        (EqualNullSafe(("offset",), 7), [7]),
        (In(("offset",), (9, 3)), [3, 9]),
    ],
)
def test_a_filter_on_offsets_is_exact(dsn: str, orders: str, condition: Filter, wanted: Sequence[int]) -> None:
    reader, left = filtering(dsn, condition)
    assert left == []
    assert offsets_read(reader) == [*wanted]


def test_a_topic_without_partitions_has_its_events_in_partition_minus_one(
    platform: EventSQL, publish: Callable[..., None], dsn: str
) -> None:
    platform.registry.register_topic(Topic("rides"))
    publish(9, topic="rides")
    found = [filtering(dsn, EqualTo(("partition",), each), subscribe="rides")[0] for each in (-1, 0)]
    assert [offsets_read(reader) for reader in found] == [list(range(1, 10)), []]


def test_conditions_that_postgresql_would_evaluate_otherwise_are_left_to_spark() -> None:
    left_to_spark = [
        EqualTo(("key",), "a\x00b"),
        EqualTo(("value",), b"abc"),
        EqualTo(("headers", "source"), "web"),
        EqualTo(("timestamp",), FIRST_TIME),
        GreaterThan(("timestamp",), LAST_TIME),
        In(("timestamp",), (FIRST_TIME + timedelta(1), LAST_TIME)),
        GreaterThan(("offset",), 1.5),
        In(("key",), ("a", None)),
        StringContains(("topic",), "a"),
        Not(EqualTo(("topic",), "orders")),
    ]
    conditions, left = push([*left_to_spark, StringStartsWith(("key",), "a")])
    assert left == left_to_spark
    assert len(conditions.rows) == 1


# Claims


@pytest.fixture
def claim(platform: EventSQL, orders: str) -> Claim:
    platform.registry.register_consumer(
        Consumer(orders, "mailer", partitioned=True),
        filter=EventFilter(key_prefix="kéy-", metadata={"source": "wéb", "number": "37"}),
    )
    claim = platform.claims.claim(orders, "mailer", 1, owner="a run", max_events=200)
    assert isinstance(claim, Claim)
    return claim


def test_a_claim_is_read_through_its_consumer_s_filter(
    spark: SparkSession, platform: EventSQL, dsn: str, claim: Claim
) -> None:
    platform.registry.register_consumer(
        Consumer("orders", "mailer", partitioned=True), filter=EventFilter(metadata={"source": "wéb"})
    )
    frame = spark.read.format("eventsql").options(dsn=dsn, claim=str(claim.id)).load()
    wanted = platform.reader.read("orders", partition=1, after=claim.range.after, upto=claim.range.upto)
    assert offsets_of(frame) == [event.id for event in wanted if event.metadata.get("source") == "wéb"]
    assert 0 < frame.count() < len(wanted)


def test_a_read_has_the_filter_of_its_option(platform: EventSQL, dsn: str, orders: str) -> None:
    chosen = EventFilter(key_prefix="kéy-", metadata={"source": "wéb"})
    reader, _ = filtering(dsn, filter=json.dumps(chosen.as_json()))
    wanted = [event.id for event in platform.reader.read(orders) if chosen.matches(event)]
    assert 0 < len(wanted) < 1_000
    assert offsets_read(reader) == wanted


def test_a_consumer_s_filter_reads_metadata_of_any_json(platform: EventSQL) -> None:
    (condition,) = Conditions().with_consumer(EventFilter(metadata={"a": "b"}), "eventsql").rows
    texts = [r'{"a": "b", "half": "\ud800"}', r'{"a": "b", "nul": "\u0000"}', '{"a": ["b"]}', '["a"]', "null"]
    with platform.database.connection() as connection:
        rows = connection.execute(
            f"SELECT {condition} FROM unnest(%s::json[]) WITH ORDINALITY AS e (eql_metadata, number) ORDER BY number"
            .encode(), [texts],
        ).fetchall()  # fmt: skip
    assert [taken for (taken,) in rows] == [True, True, False, False, False]


def test_an_asset_reads_its_claim_through_the_filter_and_a_range_whole(
    spark: SparkSession, platform: EventSQL, dsn: str, claim: Claim
) -> None:
    platform.registry.register_consumer(
        Consumer("orders", "mailer", partitioned=True), filter=EventFilter(key_prefix="kéy-")
    )
    resource = EventSQLResource(dsn=dsn)
    try:
        of_claim = resource.read_range(spark, claim, columns="key string, offset bigint")
        of_range = resource.read_range(spark, claim.remaining, columns="offset bigint")
    finally:
        resource.platform.close()
    assert of_claim.columns == ["key", "offset"]
    events = platform.reader.read("orders", partition=1, after=claim.range.after, upto=claim.range.upto)
    wanted = [event.id for event in events if event.key is not None]
    assert 0 < len(wanted) < len(events)
    assert offsets_of(of_claim) == wanted
    assert offsets_of(of_range) == [event.id for event in events]


def test_a_claim_is_read_after_the_offset_of_its_consumer(session: Connection, dsn: str, claim: Claim) -> None:
    reader = FilteringReader(
        ReadOptions.parse({"dsn": dsn, "claim": str(claim.id)}, streaming=False), read_schema(headers=False)
    )
    upto = claim.range.upto
    for offset in (upto - 50, upto + 50):
        # As EventSQL's Java library would, which knows no leases.
        session.execute("UPDATE eventsql.consumer SET eql_last_event_id = %s WHERE eql_partition = 1", [offset])
        assert ranges_of(reader.partitions()) == ([replace(claim.range, after=offset)] if offset < upto else [])


def test_a_claim_goes_on_with_the_events_that_a_forced_retention_has_left(
    platform: EventSQL, publish: Callable[..., None], dsn: str, claim: Claim
) -> None:
    platform.registry.set_retention("orders", Retention(events=10))
    platform.retention.run_once()
    publish(20, first=1_000)
    platform.retention.run_once(force=True)
    assert platform.reader.read("orders")[0].id > claim.range.upto
    reader = EventSQLDataSource({"dsn": dsn, "claim": str(claim.id)}).reader(read_schema(headers=False))
    assert isinstance(reader, BatchReader)
    assert offsets_read(reader) == []


def test_a_claim_that_is_over_is_not_read(platform: EventSQL, dsn: str, claim: Claim) -> None:
    platform.claims.release(claim)
    reader = EventSQLDataSource({"dsn": dsn, "claim": str(claim.id)}).reader(read_schema(headers=False))
    with pytest.raises(ClaimLostError, match=f"option claim: claim {claim.id} .* is committed or released"):
        reader.partitions()


def test_a_filter_on_timestamps_is_exact(platform: EventSQL, dsn: str, orders: str, read: Read) -> None:
    middle = platform.reader.read(orders)[500].buffered_at
    reader, left = filtering(dsn, GreaterThan(("timestamp",), middle - timedelta(microseconds=1)))
    assert left == []
    assert offsets_read(reader) == [event.id for event in platform.reader.read(orders) if event.buffered_at >= middle]
