"""Values that are JSON, decoded by a read: as Spark's own from_json decodes them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.spark import FORMAT, eventsql_error
from eventsql_orchestration.spark.source import EventSQLDataSource

Read = Callable[..., DataFrame]

SCHEMA = (
    "id BIGINT, price DOUBLE, exact DECIMAL(6,2), paid BOOLEAN, name STRING, on DATE, small TINYINT, "
    "stops ARRAY<STRUCT<place: STRING, number: INT>>, tags MAP<STRING, STRING>, rider STRUCT<name: STRING, `a b`: INT>"
)

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
    '{"small": 200, "name": "wrapped"}',
    '{"small": 255, "name": "wrapped"}',
    '{"small": 256, "name": "kept"}',
    '{"small": -129, "name": "kept"}',
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
        (7, r"event 7 of topic 'documents' has another 'id': 1\.5 is no whole number"),
        (11, "event 11 of topic 'documents' has another 'stops': .* is no array"),
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
        ("id BIGINT> , x STRUCT<y: INT", ValidationError, "option valueSchema is no list of columns"),
        (" ", ValidationError, "option valueSchema is empty"),
        ("data BINARY", ValidationError, "'value.data' cannot be decoded from JSON"),
        ("counts MAP<INT, INT>", ValidationError, "the keys of 'value.counts' must be strings"),
    ],
)
def test_a_value_schema_that_cannot_be_used_is_named(
    documents: str, read: Read, schema: str, error: type[ConfigurationError], message: str
) -> None:
    with pytest.raises(PySparkException) as failure:
        read(documents, valueSchema=schema).collect()
    with pytest.raises(error, match=message):
        raise eventsql_error(failure.value) or failure.value


def test_a_value_schema_that_is_no_ddl_is_shown(documents: str, read: Read) -> None:
    with pytest.raises(PySparkException, match="STRUCT<id WHOLE NUMBER>"):
        read(documents, valueSchema="id WHOLE NUMBER").collect()
