"""Reading topics: the driver plans the ranges, the tasks read them."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_PARTITIONS, NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.spark.adbc import TYPES, Piece, Projection, read_batches
from eventsql_orchestration.spark.filters import Conditions, push
from eventsql_orchestration.spark.json_values import ValueDecoder, check_type
from eventsql_orchestration.spark.options import READ, Given
from eventsql_orchestration.spark.read_options import ReadOptions

if TYPE_CHECKING:
    from eventsql_orchestration.spark.input_splits import Wanted
    from eventsql_orchestration.spark.log_planner import Logs
    from eventsql_orchestration.spark.multi_log_planner import AllLogs

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


class Split(InputPartition):
    """The pieces that one task reads."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(pieces)
        self.pieces = pieces


class Reading:
    """The common part of a batch and a stream reader. Spark pickles it into the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema, shards=len(options.source.urls) > 1)
        self._options = options
        self._projection = Projection(
            schema.fieldNames(), _decoder(schema, fail_fast=options.fail_fast), options.fail_on_data_loss
        )

    def logs(self, shards: Collection[str] | None = None) -> AllLogs:
        """The logs to read, of all shards or of `shards`."""
        # Tasks import this module, too, and must not wait for the database floor to load.
        from eventsql_orchestration.spark.multi_log_planner import AllLogs  # noqa: PLC0415

        return AllLogs(self._options, shards)

    def splits(self, wanted: Sequence[Wanted]) -> list[Split]:
        """The wanted ranges as even tasks."""
        from eventsql_orchestration.spark.input_splits import even_splits  # noqa: PLC0415 - as in `logs`

        return [Split(pieces) for pieces in even_splits(self._options, wanted)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes a partition of its own if there is none.
        if not isinstance(partition, Split):
            return iter(())
        return read_batches(self._options.source, partition.pieces, self._projection)


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

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._conditions = Conditions()

    def partitions(self) -> Sequence[InputPartition]:
        from eventsql_orchestration.spark.input_splits import Wanted  # noqa: PLC0415 - as in `Reading.logs`

        conditions = self._conditions
        with self.logs(conditions.shards) as every:
            if self._options.claim is not None:
                (logs,) = every
                offsets, chosen = logs.claimed(self._options.claim)
                # A consumer goes on with the events that a forced retention has left.
                ranges = [Wanted(logs, offsets)]
            else:
                chosen, ranges = self._options.filter, self._ranges(every)
            conditions = conditions.with_consumer(chosen, self._options.source.schema)
            return self.splits(
                [
                    replace(each, offsets=narrow, rows=conditions.rows)
                    for each in ranges
                    for narrow in _narrowed(each.offsets, conditions, each.logs)
                ]
            )

    def _ranges(self, every: AllLogs) -> list[Wanted]:
        from eventsql_orchestration.spark.input_splits import Wanted  # noqa: PLC0415 - as in `Reading.logs`

        every.check_bounds()
        options, extents = self._options, every.extents()
        ranges = []
        for tp, start in every.starts(extents).items():
            logs = every.of(tp)
            end = logs.end(tp, extents[tp.log])
            if end < start and options.starting.given and options.ending.given:
                raise ValidationError(
                    f"option {options.ending.option}: {end} lies before {options.starting.option}, {start}, of {tp}"
                )
            # An open transaction may have got offsets before the end. Its events must not appear during the read.
            extent = extents[tp.log]
            end = min(end, max(extent.settled + 1, extent.floor))
            offsets = OffsetRange(tp.topic, tp.partition, start - 1, max(end, start) - 1)
            ranges.append(Wanted(logs, offsets, complete=logs.begins_at_offset(tp)))
        return ranges


class FilteringReader(BatchReader):
    """Reads only events that meet the filters that Spark pushes down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._conditions, left = push(filters)
        return left


def _narrowed(offsets: OffsetRange, conditions: Conditions, logs: Logs) -> list[OffsetRange]:
    """The part of a range that can meet the conditions, split by partition if they name some."""
    if conditions.topics is not None and offsets.topic not in conditions.topics:
        return []
    after = max(offsets.after, conditions.after)
    narrow = replace(offsets, after=after, upto=max(after, min(offsets.upto, conditions.upto)))
    if conditions.partitions is None:
        return [narrow]
    if offsets.partition != NOT_PARTITIONED:
        return [narrow] if offsets.partition in conditions.partitions else []
    topic = logs.registry.cached_topic(offsets.topic)
    if not topic.partitioned:
        return [narrow]
    # Include partitions that the topic has lost: events keep their partition.
    possible = sorted(partition for partition in conditions.partitions if 0 <= partition < MAX_PARTITIONS)
    return [replace(narrow, partition=partition) for partition in possible]
