"""The forms in which assets return events: frames of Spark, pandas and Arrow, and iterables of publications.

Neither pandas nor pyspark is loaded here: the module of an object's class tells what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.types as pt  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration import Event, Publication
from eventsql_orchestration.errors import PartitionOutOfRangeError, ValidationError
from eventsql_orchestration.model import MAX_PARTITIONS, NOT_PARTITIONED

HEADERS: Final = pa.map_(pa.string(), pa.string())

BATCH: Final = 1_000
BATCH_BYTES: Final = 4 * 1024 * 1024
"""The most publications that are staged at once, and the most bytes of their values."""

LOADED: Final = pa.schema(
    {
        "key": pa.string(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
)
"""The columns of events that are read, as Spark's data source has them."""

_TYPES: Final = {"value": pa.binary(), "key": pa.string(), "partition": pa.int64(), "headers": HEADERS}
_ACCEPTED: Final = {
    "value": "binary or string",
    "key": "string",
    "partition": "a whole number",
    "headers": "map<string, string>",
}
_GIVEN_BY_THE_LOG: Final = ("topic", "offset", "timestamp", "shard")
_FIELDS: Final = ("value", "key", "partition", "metadata")


def _is_from(module: str, type_: object) -> bool:
    name = getattr(type_, "__module__", None) or ""
    return isinstance(name, str) and (name == module or name.startswith(f"{module}."))


def is_spark_frame(type_: object) -> bool:
    """Whether a class is Spark's DataFrame, classic or of Spark Connect."""
    return getattr(type_, "__name__", None) == "DataFrame" and _is_from("pyspark.sql", type_)


def is_pandas_frame(type_: object) -> bool:
    """Whether a class is the DataFrame of pandas."""
    return getattr(type_, "__name__", None) == "DataFrame" and _is_from("pandas", type_)


def event_batches(value: object, topic: str) -> Iterator[pa.RecordBatch]:
    """The value of an asset as batches with a column `value` and optionally `key`, `partition` and `headers`.

    An iterable is read lazily. Raises `ValidationError`, and `InvalidPublicationError` for a publication that cannot be
    stored.
    """
    if is_pandas_frame(type(value)):
        frame: Any = value
        try:
            # Without rows, the type of a column says nothing: a filter that leaves no row keeps no type.
            value = pa.Table.from_pandas(frame if len(frame) else frame.astype(object), preserve_index=False)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise ValidationError(f"the frame of pandas cannot be published to topic {topic!r}: {error}") from None
    if isinstance(value, pa.RecordBatch):
        value = pa.Table.from_batches([value])
    if isinstance(value, pa.Table):
        value = value.to_reader()
    if isinstance(value, pa.RecordBatchReader):
        _check_columns(value.schema, topic)
        return (_conform(batch, topic) for batch in value)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValidationError(
            f"{type(value).__name__} cannot be published to topic {topic!r}: return a DataFrame of Spark or pandas, "
            "an Arrow table or RecordBatchReader, or an iterable of publications"
        )
    return _publications(value, topic)


def events_as_arrow(batches: Iterable[tuple[str | None, Sequence[Event]]], *, shards: bool) -> pa.RecordBatchReader:
    """Events as a reader with the columns `LOADED`, and the column `shard` if `shards`. Batches are read lazily."""
    schema = LOADED.append(pa.field("shard", pa.string())) if shards else LOADED
    return pa.RecordBatchReader.from_batches(schema, (_as_arrow(events, schema, shard) for shard, events in batches))


def _as_arrow(events: Sequence[Event], schema: pa.Schema, shard: str | None) -> pa.RecordBatch:
    columns = {
        "key": [event.key for event in events],
        "value": [event.value for event in events],
        "topic": [event.topic for event in events],
        "partition": [event.partition for event in events],
        "offset": [event.id for event in events],
        "timestamp": [event.buffered_at for event in events],
        "shard": [shard] * len(events),
    }
    return pa.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


def _check_columns(schema: pa.Schema, topic: str) -> None:
    for field in schema:
        if field.name in _GIVEN_BY_THE_LOG:
            continue
        if field.name not in _TYPES:
            raise ValidationError(
                f"column {field.name!r} is not a part of an event of topic {topic!r}: return {', '.join(_TYPES)}, and "
                "put other data into value"
            )
        if not _fits(field.name, field.type):
            raise ValidationError(f"column {field.name!r} must be {_ACCEPTED[field.name]}, not {field.type}")
    repeated = {name for name in schema.names if schema.names.count(name) > 1}
    if repeated:
        raise ValidationError(f"column {min(repeated)!r} occurs twice")
    if "value" not in schema.names:
        raise ValidationError(f"column 'value' is missing: it holds the event of topic {topic!r}")


def _fits(name: str, type_: pa.DataType) -> bool:
    if pt.is_dictionary(type_):
        type_ = type_.value_type
    if pt.is_null(type_):
        return True
    text = (pt.is_string, pt.is_large_string, pt.is_string_view)
    accepted = {
        "value": (*text, pt.is_binary, pt.is_large_binary, pt.is_binary_view),
        "key": text,
        "partition": (pt.is_integer,),
        "headers": (pt.is_map, pt.is_struct),
    }
    return any(accepts(type_) for accepts in accepted[name])


def _conform(batch: pa.RecordBatch, topic: str) -> pa.RecordBatch:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if "topic" in columns:
        for named in columns["topic"].unique().to_pylist():
            if named != topic:
                raise ValidationError(f"column 'topic': {named!r} is not the topic of the asset, which is {topic!r}")
    kept = {name: _cast(name, columns[name]) for name in _TYPES if name in columns}
    return pa.RecordBatch.from_pydict(kept)


def _cast(name: str, column: Any) -> Any:
    try:
        if pt.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pt.is_struct(column.type):
            # pandas makes structs of dictionaries: a name that a dictionary lacks is null in its struct.
            return pa.array([None if row is None else _entries(row) for row in column.to_pylist()], HEADERS)
        return column.cast(_TYPES[name])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ValidationError(f"column {name!r} cannot be published: {error}") from None


def _entries(row: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, text) for name, text in row.items() if text is not None]


def _publications(values: Iterable[object], topic: str) -> Iterator[pa.RecordBatch]:
    batch: list[Publication] = []
    size = 0
    for number, value in enumerate(values, start=1):
        batch.append(_publication(value, number, topic))
        size += len(batch[-1].value)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield _batch(batch)
            batch, size = [], 0
    if batch:
        yield _batch(batch)


def _batch(publications: Sequence[Publication]) -> pa.RecordBatch:
    columns = {
        "value": [each.value for each in publications],
        "key": [each.key for each in publications],
        "partition": [each.partition for each in publications],
        "headers": [list(each.metadata.items()) for each in publications],
    }
    return pa.RecordBatch.from_pydict(columns, schema=pa.schema({name: _TYPES[name] for name in columns}))


def _publication(value: object, number: int, topic: str) -> Publication:
    where = f"event {number} for topic {topic!r}"
    if isinstance(value, Mapping):
        value = _from_mapping(value, where, topic)
    if not isinstance(value, Publication):
        raise ValidationError(f"{where} is of type {type(value).__name__}: use a Publication or a mapping")
    if value.topic != topic:
        raise ValidationError(f"{where} is a publication for topic {value.topic!r}")
    if value.partition is not None and not NOT_PARTITIONED <= value.partition <= MAX_PARTITIONS:
        raise PartitionOutOfRangeError(f"{where}: {value.partition} is not a partition")
    return value


def _from_mapping(value: Mapping[Any, Any], where: str, topic: str) -> Publication:
    given = {**value}
    for name in given:
        if name not in _FIELDS:
            raise ValidationError(f"{where}: {name!r} is not a part of an event, which has {', '.join(_FIELDS)}")
    if given.get("value") is None:
        raise ValidationError(f"{where} has no value")
    if isinstance(given["value"], str):
        try:
            given["value"] = given["value"].encode()
        except UnicodeEncodeError as error:
            raise ValidationError(f"{where}: its value cannot be written as UTF-8: {error}") from None
    given["metadata"] = given.get("metadata") or {}
    try:
        return Publication(topic, **given)
    except ValidationError as error:
        raise type(error)(f"{where}: {error.message}") from None
