"""Reading topics: the driver decides which ranges, the tasks read them."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.model import OffsetRange
from eventsql_orchestration.spark.batches import read_batches
from eventsql_orchestration.spark.options import EARLIEST, ReadOptions

if TYPE_CHECKING:
    from eventsql_orchestration.spark.planning import TopicLog

COLUMNS: Final[dict[str, DataType]] = {
    "key": StringType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "headers": MapType(StringType(), StringType()),
}

_SHARD: Final = "0"
"""A stream's offsets are {topic: {shard: offset}}, so that a checkpoint outlives a second shard."""


def read_schema(*, headers: bool) -> StructType:
    """The columns of a read, all nullable."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS.items() if headers or name != "headers"])


def check_schema(schema: StructType) -> None:
    """Raises `ValidationError` that names the first column asked for that no read gives."""
    if not schema.fields:
        raise ValidationError(f"schema: ask for at least one of the columns {', '.join(COLUMNS)}")
    for column in schema.fields:
        expected = COLUMNS.get(column.name)
        if expected is None:
            raise ValidationError(f"schema: there is no column {column.name!r}, there are {', '.join(COLUMNS)}")
        if column.dataType != expected:
            raise ValidationError(
                f"schema: column {column.name!r} is {expected.simpleString()}, not {column.dataType.simpleString()}"
            )
        if not column.nullable:
            raise ValidationError(f"schema: column {column.name!r} is nullable: leave NOT NULL out")


class Split(InputPartition):
    """The range that one task reads."""

    def __init__(self, offsets: OffsetRange) -> None:
        super().__init__(offsets)
        self.offsets = offsets


class _Reading:
    """What a batch and a stream have in common; pickled into the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._columns = schema.fieldNames()

    def _log(self) -> TopicLog:
        # Not for the tasks, which import this module too: the database floor loads longer than a small range.
        from eventsql_orchestration.spark.planning import TopicLog  # noqa: PLC0415

        return TopicLog(self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes up a partition of its own where there is none.
        if not isinstance(partition, Split):
            return iter(())
        return read_batches(self._options.source, partition.offsets, self._columns)


class BatchReader(_Reading, DataSourceReader):
    """Reads one range. Unless its end is given, that is the newest offset at the time the query is planned."""

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with self._log() as log:
            end = log.end()
            starting = EARLIEST if options.starting is None else max(EARLIEST, options.starting)
            ending = end + 1 if options.ending is None else max(EARLIEST, options.ending)
            for name, offset in (("startingOffsets", starting), ("endingOffsets", ending)):
                _check_offset(name, offset, options.topic, end)
            return [Split(offsets) for offsets in log.splits(starting - 1, ending - 1)]


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as it grows. A stream's offset is the next one to read, as in the option."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._opened: TopicLog | None = None
        self._last: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        options, end = self._options, self._open().end()
        if options.starting is None:
            return self._offset(end + 1)
        starting = max(EARLIEST, options.starting)
        _check_offset("startingOffsets", starting, options.topic, end)
        return self._offset(starting)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_events is None else ReadMaxRows(self._options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._open().end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        log, starting = self._open(), self._next(start)
        end = log.end() if self._last is None else self._last
        if end and end + 1 < starting:
            raise EventSQLError(
                f"topic {self._options.topic!r} ends at offset {end}, and this stream has read on to {starting}: "
                "the topic was made anew or restored, begin with a new checkpoint"
            )
        upto = max(end, starting - 1)
        if isinstance(limit, ReadMaxRows):
            upto = log.offset_of_nth(starting - 1, upto, limit.max_rows) or upto
        return self._offset(upto + 1)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._offset(self._open().end() + 1)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        # A batch that is replayed after a restart is asked for here before anything else.
        return [Split(offsets) for offsets in self._open().splits(self._next(start) - 1, self._next(end) - 1)]

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _open(self) -> TopicLog:
        if self._opened is None:
            self._opened = self._log()
        return self._opened

    def _offset(self, following: int) -> dict[str, Any]:
        return {self._options.topic: {_SHARD: following}}

    def _next(self, offset: dict[str, Any]) -> int:
        try:
            return int(offset[self._options.topic][_SHARD])
        except (KeyError, TypeError, ValueError):
            raise ValidationError(
                f"option subscribe: the checkpoint is one of {', '.join(offset)}, not of {self._options.topic}"
            ) from None


def _check_offset(option: str, offset: int, topic: str, end: int) -> None:
    if offset > end + 1:
        raise ValidationError(f"option {option}: {offset} is out of range: topic {topic!r} ends at offset {end}")
