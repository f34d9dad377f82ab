"""Reading topics: the driver plans the ranges, the tasks read them."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.spark.filters import Conditions, push
from eventsql_orchestration.spark.json_values import ValueDecoder, check_type
from eventsql_orchestration.spark.log_tasks import TYPES, Projection, read_batches
from eventsql_orchestration.spark.options import READ, Given
from eventsql_orchestration.spark.read_options import ReadOptions

_TYPES: Final[dict[str, DataType]] = {name: from_arrow_type(kind) for name, kind in TYPES.items()}


def read_schema(*, headers: bool, shards: bool = False) -> StructType:
    """The columns of a read, all nullable. With `shards`, also the column `shard`."""
    left_out = {name for name, wanted in (("headers", headers), ("shard", shards)) if not wanted}
    return StructType([StructField(name, kind) for name, kind in _TYPES.items() if name not in left_out])


def declared_schema(options: Mapping[str, str]) -> StructType | str:
    """The columns of a read without `.schema(…)`. As DDL if values are decoded, because only Spark parses DDL.

    Raises `ConfigurationError`, and `ValidationError` for a `valueSchema` that is not a list of columns.
    """
    given = Given(options, READ)
    schema = read_schema(headers=given.flag("includeHeaders"), shards=given.databases() > 1)
    value = given.text("valueSchema")
    if value is None:
        return schema
    ddl, depth = value.strip(), 0
    for character in ddl:
        depth += (character in "<(") - (character in ">)")
        if depth < 0:
            break
    if depth or ddl.startswith("{"):
        raise ValidationError(
            "option valueSchema is not a list of columns: write one such as 'id BIGINT, price DOUBLE'"
        )
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    # A session may take `timestamp` for a type without a zone.
    types |= {"value": f"STRUCT<{ddl}>", "timestamp": "timestamp_ltz"}
    return ", ".join(f"`{name}` {kind}" for name, kind in types.items())


def check_schema(schema: StructType, *, shards: bool = False) -> None:
    """Raise `ValidationError` for the first column that a read cannot give. `shards` is true for several databases."""
    if not shards and "shard" in schema.fieldNames():
        raise ValidationError("schema: there is no column 'shard' where dsn names one database")
    check_columns(schema, read_schema(headers=True, shards=shards), decoded="value")


def check_columns(schema: StructType, known: StructType, *, decoded: str | None = None) -> None:
    """Raise `ValidationError` for the first column that is not in `known`. The column `decoded` may be a struct."""
    columns = {field.name: field.dataType for field in known}
    if not schema.fields:
        raise ValidationError(f"schema: no column is named: name some of {', '.join(columns)}")
    for column in schema.fields:
        expected = columns.get(column.name)
        if expected is None:
            raise ValidationError(f"schema: there is no column {column.name!r}, there are {', '.join(columns)}")
        may_be_struct = column.name == decoded
        if column.dataType != expected and not (may_be_struct and isinstance(column.dataType, StructType)):
            also = " (or a struct for decoded values)" if may_be_struct else ""
            raise ValidationError(
                f"schema: column {column.name!r} is {expected.simpleString()}{also}, "
                f"not {column.dataType.simpleString()}"
            )
        if schema.fieldNames().count(column.name) > 1:
            raise ValidationError(f"schema: column {column.name!r} occurs twice")
        if not column.nullable:
            raise ValidationError(f"schema: column {column.name!r} is nullable: remove NOT NULL")


class Reading:
    """The common part of a batch and a stream reader. Spark pickles it into the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema, shards=len(options.source.urls) > 1)
        self._options = options
        self._projection = Projection(
            schema.fieldNames(), _decoder(schema, fail_fast=options.fail_fast), options.fail_on_data_loss
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # The value is the pieces of one task, or None: Spark makes a partition if there is none.
        return read_batches(self._options.source, partition.value or (), self._projection)


def _decoder(schema: StructType, *, fail_fast: bool) -> ValueDecoder | None:
    if "value" not in schema.fieldNames() or not isinstance(schema["value"].dataType, StructType):
        return None
    kind = to_arrow_schema(StructType([schema["value"]]), timezone="UTC").field("value").type
    check_type(kind)
    return ValueDecoder(kind, fail_fast)


class BatchReader(Reading, DataSourceReader):
    """Reads ranges. The default end is the newest offset when the query is planned.

    A log grows only at its end, in the order of its offsets, so all tasks together read one snapshot.
    """

    _conditions = Conditions()

    def partitions(self) -> Sequence[InputPartition]:
        # Tasks import this module, too, and must not wait for the database floor to load.
        from eventsql_orchestration.spark.batch_planner import plan_batch  # noqa: PLC0415

        return [InputPartition(pieces) for pieces in plan_batch(self._options, self._conditions)]


class FilteringReader(BatchReader):
    """Reads only events that meet the filters that Spark pushes down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._conditions, left = push(filters)
        return left
