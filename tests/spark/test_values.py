"""Values that are JSON, decoded by a read: as Spark's own from_json decodes them."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable
from datetime import UTC, date, datetime

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import LongType, StructType

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.spark.json_values import ValueDecoder
from eventsql_orchestration.spark.source import EventSQLDataSource

Read = Callable[..., DataFrame]

SCHEMA = (
    "id BIGINT, price DOUBLE, exact DECIMAL(6,2), large DECIMAL(38,10), paid BOOLEAN, name STRING, on DATE, "
    "small TINYINT, stops ARRAY<STRUCT<place: STRING, number: INT>>, tags MAP<STRING, STRING>, "
    "rider STRUCT<name: STRING, `a b`: INT>, at TIMESTAMP, local TIMESTAMP_NTZ, numbers ARRAY<INT>, "
    "counts MAP<STRING, INT>, squares ARRAY<ARRAY<INT>>"
)

DATES = [
    "2026-1-5", " 2026-01-31 ", "2026-01-31T10:00:00+05:00", "2026-01-31 x", "2026-01-31x", "31.1.2026", "2026-02-30",
]  # fmt: skip

TIMES = [
    '"2026-01-31T10:00:00"', '"2026-01-31 10:00:00.5"', '" 2026-01-31T10:00 "', '"2026-01-31"', '"2026-01-31T10"',
    '"2026-01-31T10:00:00.1234567"', '"2026-02-30T10:00:00"', "1700000000", "-1", "1700000000.5", "true",
]  # fmt: skip

ZONED_TIMES = ["2026-01-31T10:00:00Z", "2026-01-31T10:00:00+05:30", "2026-01-31T10:00:00-0100"]

DOCUMENTS = [
    json.dumps(
        {
            "id": 2**53 + 1,
            "price": 1.5,
            "exact": 12.34,
            "paid": True,
            "name": "Zoë \U0001f695",
            "on": "2026-01-31",
            "small": -128,
            "stops": [{"place": "a", "number": 1}, None, {"place": None}],
            "tags": {"x": "1", "y": None},
            "rider": {"name": "r", "a b": 7, "unknown": [1]},
            "unknown": {"deep": [1, 2]},
        }
    ),
    "{}",
    '{"id": null, "stops": [], "tags": {}}',
    '{"id": 1, "name": {"an": ["object", 1, true]}}',
    '{"id": 2, "name": 17}',
    '{"id": "3", "price": 4}',
    '{"id": 1.5, "name": "kept"}',
    '{"id": 9223372036854775808, "name": "kept"}',
    '{"paid": "true", "name": "kept"}',
    '{"price": "NaN"}',
    '{"stops": {"place": "no list"}, "name": "kept"}',
    '{"rider": [1], "name": "kept"}',
    ' {"id": 5} ',
    '{"exact": 3}',
    '{"price": "-INF"}',
    '{"price": "1.5", "name": "kept"}',
    '{"price": true, "name": "kept"}',
    '{"small": 200, "name": "wrapped"}',
    '{"small": 255, "name": "wrapped"}',
    '{"small": 127, "name": "kept"}',
    '{"small": 256, "name": "kept"}',
    '{"small": -129, "name": "kept"}',
    '{"exact": 1.005, "name": "rounded up"}',
    '{"exact": -0.125, "name": "rounded up"}',
    '{"exact": 9999.995, "name": "kept"}',
    '{"exact": "12.34", "large": "1e3"}',
    '{"exact": "a", "large": true, "name": "kept"}',
    '{"large": 1234567890123456789012345678.1234567891}',
    '{"large": 12345678901234567890123456789, "name": "kept"}',
    '{"numbers": [1, "x", 2], "name": "kept"}',
    '{"numbers": [1, null, 2]}',
    '{"counts": {"a": 1, "b": 1.5}, "name": "kept"}',
    '{"counts": {"a": null}}',
    '{"squares": [[1], [2, true]], "name": "kept"}',
    '{"stops": [{"place": "a", "number": "x"}, {"number": 2}]}',
    '{"stops": [{"place": "a"}, 17], "name": "kept"}',
    *(f'{{"on": "{text}", "name": "kept"}}' for text in DATES),
    *(f'{{"at": {text}, "local": {text}, "name": "kept"}}' for text in TIMES),
    *(f'{{"at": "{text}", "name": "kept"}}' for text in ZONED_TIMES),
]

MALFORMED = ["nothing", '{"id": 1', "", "[1, 2]", "17"]


@pytest.fixture
def documents(platform: EventSQL) -> str:
    platform.registry.register_topic(Topic("documents"))
    values = [text.encode() for text in [*DOCUMENTS, *MALFORMED]]
    platform.publisher.publish_all(Publication("documents", value) for value in values)
    platform.transfer.run_once()
    return "documents"


def test_values_are_decoded_as_from_json_decodes_them(documents: str, read: Read) -> None:
    ours = {row.offset: row.value for row in read(documents, valueSchema=SCHEMA).collect()}
    parsed = f.from_json(f.col("value").cast("string"), SCHEMA).alias("value")
    theirs = {row.offset: row.value for row in read(documents).select("offset", parsed).collect()}
    assert len(ours) == len(DOCUMENTS) + len(MALFORMED)
    for offset, text in enumerate(DOCUMENTS, start=1):
        assert str(ours[offset]) == str(theirs[offset]), text
    # from_json gives null for a text without any JSON, and reads an array's elements; here each is a row of nulls.
    for offset in range(len(DOCUMENTS) + 1, len(ours) + 1):
        assert set(ours[offset]) == {None}


def test_decoded_fields_can_be_asked_for_by_schema(documents: str, read: Read) -> None:
    frame = read(documents, schema="value STRUCT<id: BIGINT>, offset BIGINT", startingOffsets=5, endingOffsets=6)
    assert [(row.value.id, row.offset) for row in frame.collect()] == [(2, 5)]


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (7, r"event 7 of topic 'documents' has another 'id': 1\.5 is not a whole number"),
        (11, "event 11 of topic 'documents' has another 'stops': .* is not an array"),
        (len(DOCUMENTS) + 1, f"event {len(DOCUMENTS) + 1} of topic 'documents' is not JSON"),
        (len(DOCUMENTS) + 4, f"event {len(DOCUMENTS) + 4} of topic 'documents' is not a JSON object"),
    ],
)
def test_a_value_that_does_not_fit_is_named_in_mode_failfast(
    dsn: str, documents: str, read: Read, offset: int, message: str
) -> None:
    window = {"startingOffsets": str(offset), "endingOffsets": str(offset + 1)}
    schema = read(documents, schema="value STRUCT<id: BIGINT, stops: ARRAY<STRUCT<place: STRING, number: INT>>>").schema
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": documents, "mode": "FAILFAST", **window}).reader(schema)
    (split,) = reader.partitions()
    with pytest.raises(ValidationError, match=message):
        list(reader.read(split))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), r'"\ud800"'),
        (pa.string(), r'{"a": "\ud800"}'),
        (pa.map_(pa.string(), pa.int64()), r'{"\ud800": 1}'),
        (pa.timestamp("us", tz="UTC"), '"0001-01-01T00:00:00+14:00"'),
        (pa.timestamp("us", tz="UTC"), "1" + 30 * "0"),
        (pa.float64(), "1" + 400 * "0"),
        (pa.decimal128(38, 10), "1e100"),
    ],
)
def test_no_value_that_json_allows_stops_a_read(kind: pa.DataType, value: str) -> None:
    values = pa.array([f'{{"field": {value}}}'.encode()])
    struct = pa.struct([("field", kind)])
    assert ValueDecoder(struct, fail_fast=False).decode(values, "orders", None).to_pylist() == [{"field": None}]
    with pytest.raises(ValidationError) as caught:
        ValueDecoder(struct, fail_fast=True).decode(values, "orders", [7])
    # Spark sends the error as UTF-8.
    assert caught.value.message.encode()


def reads(depth: int) -> bool:
    try:
        json.loads("[" * depth + "]" * depth)
    except RecursionError:
        return False
    return True


@pytest.mark.parametrize("kind", [pa.string(), pa.bool_()])
def test_no_depth_of_json_stops_a_read(kind: pa.DataType) -> None:
    # Python reads some depths that it cannot write as text again.
    deepest = bisect_left(range(1_000_000), x=True, key=lambda depth: not reads(depth))
    values = [f'{{"field": {"[" * depth}{"]" * depth}}}'.encode() for depth in range(deepest - 50, deepest + 50)]
    struct = pa.struct([("field", kind)])
    found = ValueDecoder(struct, fail_fast=False).decode(pa.array(values), "orders", None).to_pylist()
    assert found[-1] == {"field": None}
    with pytest.raises(ValidationError, match="event 7 of topic 'orders' is JSON of too many levels"):
        ValueDecoder(struct, fail_fast=True).decode(pa.array(values[-1:]), "orders", [7])


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (pa.date32(), "20260131", date(2026, 1, 31)),
        (pa.date32(), "2026-W05-1", date(2026, 1, 26)),
        (pa.timestamp("us", tz="UTC"), "20260131T100000", datetime(2026, 1, 31, 10, tzinfo=UTC)),
        (pa.timestamp("us", tz="UTC"), "2026-01-31T10:00:00,5", datetime(2026, 1, 31, 10, 0, 0, 500_000, UTC)),
        (pa.timestamp("us"), "2026-01-31T10:00:00+05:30", datetime(2026, 1, 31, 10, tzinfo=UTC).replace(tzinfo=None)),
    ],
)
def test_times_that_from_json_does_not_read_stop_no_stream(kind: pa.DataType, text: str, expected: date) -> None:
    decoder = ValueDecoder(pa.struct([("field", kind)]), fail_fast=True)
    assert decoder.decode(pa.array([f'{{"field": "{text}"}}'.encode()]), "orders", [7]).to_pylist() == [
        {"field": expected}
    ]


def test_a_time_without_a_zone_is_in_utc_wherever_the_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ValueDecoder(pa.struct([("field", pa.timestamp("us", tz="UTC"))]), fail_fast=True)
    try:
        with monkeypatch.context() as changed:
            changed.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            found = decoder.decode(pa.array([b'{"field": "2026-01-31T10:00:00"}']), "orders", [7]).to_pylist()
    finally:
        time.tzset()
    assert found == [{"field": datetime(2026, 1, 31, 10, tzinfo=UTC)}]


@pytest.mark.parametrize("fail_fast", [False, True])
def test_a_field_that_cannot_be_null_is_decoded_and_named_if_a_value_lacks_it(*, fail_fast: bool) -> None:
    place = pa.struct([pa.field("city", pa.string(), nullable=False)])
    type_ = pa.struct([pa.field("id", pa.int64(), nullable=False), ("place", place)])
    decoder = ValueDecoder(type_, fail_fast=fail_fast)
    values = pa.array([b'{"id": 1}', None, b'{"id": 2, "place": {"city": "Oslo"}}'])
    expected = [{"id": 1, "place": None}, None, {"id": 2, "place": {"city": "Oslo"}}]
    assert decoder.decode(values, "orders", [7, 8, 9]).to_pylist() == expected
    for wrong in (b"{}", b'{"id": "x"}', b"nothing"):
        with pytest.raises(ValidationError, match="event 7 of topic 'orders'"):
            decoder.decode(pa.array([wrong]), "orders", [7])
    lacking = pa.array([b'{"id": 1, "place": {}}'])
    if fail_fast:
        with pytest.raises(ValidationError, match="'place': has another 'city'"):
            decoder.decode(lacking, "orders", [7])
    else:
        assert decoder.decode(lacking, "orders", [7]).to_pylist() == [{"id": 1, "place": None}]


@pytest.mark.parametrize("mode", ["PERMISSIVE", "FAILFAST"])
def test_the_value_of_an_erased_event_is_null(platform: EventSQL, dsn: str, mode: str) -> None:
    platform.registry.register_topic(Topic("people"))
    platform.publisher.publish_all(
        Publication("people", b'{"id": %d}' % number, key=f"person-{number}") for number in range(3)
    )
    platform.transfer.run_once()
    assert platform.eraser.execute("people", ["person-1"]).events == 1
    schema = StructType().add("value", StructType().add("id", LongType()))
    reader = EventSQLDataSource({"dsn": dsn, "subscribe": "people", "mode": mode}).reader(schema)
    (split,) = reader.partitions()
    (batch,) = reader.read(split)
    assert batch["value"].to_pylist() == [{"id": 0}, None, {"id": 2}]


def test_a_value_that_does_not_fit_fails_a_query_in_mode_failfast(documents: str, read: Read) -> None:
    with pytest.raises(PySparkException) as failure:
        read(documents, valueSchema=SCHEMA, mode="FAILFAST", startingOffsets=7).select("value").collect()
    error = eventsql_error(failure.value)
    assert isinstance(error, ValidationError)
    assert "event 7 of topic 'documents' has another 'id'" in error.message


def test_a_stream_decodes_values_too(spark: SparkSession, dsn: str, documents: str) -> None:
    stream = spark.readStream.format(FORMAT).options(dsn=dsn, subscribe=documents, valueSchema="id BIGINT").load()
    assert stream.schema["value"].dataType.simpleString() == "struct<id:bigint>"


@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        ("id BIGINT> , x STRUCT<y: INT", ValidationError, "option valueSchema is not a list of columns"),
        (" ", ValidationError, "option valueSchema is empty"),
        ("data BINARY", ValidationError, "'value.data' cannot be decoded from JSON"),
        ("counts MAP<INT, INT>", ValidationError, "the keys of 'value.counts' must be strings"),
        ("id BIGINT, id STRING", ValidationError, "'value.id' occurs twice"),
        ("rider STRUCT<name: STRING, name: STRING>", ValidationError, "'value.rider.name' occurs twice"),
    ],
)
def test_a_value_schema_that_cannot_be_used_is_named(
    documents: str, read: Read, schema: str, error: type[ConfigurationError], message: str
) -> None:
    with pytest.raises(PySparkException) as failure:
        read(documents, valueSchema=schema).collect()
    with pytest.raises(error, match=message):
        raise eventsql_error(failure.value) or failure.value


def test_times_have_a_zone_whatever_the_session_calls_a_timestamp(
    spark: SparkSession, documents: str, read: Read
) -> None:
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        (row,) = (
            read(documents, valueSchema="id BIGINT", endingOffsets=2).selectExpr("typeof(timestamp) AS kind").collect()
        )
    finally:
        spark.conf.unset("spark.sql.timestampType")
    assert row.kind == "timestamp"


def test_a_value_schema_that_is_no_ddl_is_shown(documents: str, read: Read) -> None:
    with pytest.raises(PySparkException, match="STRUCT<id WHOLE NUMBER>"):
        read(documents, valueSchema="id WHOLE NUMBER").collect()
