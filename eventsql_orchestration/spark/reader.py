"""Reading topics: the ranges are decided on the driver, the tasks read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
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
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange, check_partition
from eventsql_orchestration.spark.batches import read_batches
from eventsql_orchestration.spark.options import EARLIEST, ReadOptions
from eventsql_orchestration.spark.splits import PROBES, equal_parts, even_splits

if TYPE_CHECKING:
    from eventsql_orchestration.database import Connection, Queries

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
"""A stream's offsets are kept as {topic: {shard: offset}}, so that a checkpoint of one shard stays readable."""


def read_schema(*, headers: bool) -> StructType:
    """The columns of a read, all nullable."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS.items() if headers or name != "headers"])


def check_schema(schema: StructType) -> None:
    """Raises `ValidationError` that names the first column of a requested schema that no read gives."""
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
            raise ValidationError(f"schema: column {column.name!r} is nullable, leave out NOT NULL")


class Split(InputPartition):
    """The range that one task reads."""

    def __init__(self, offsets: OffsetRange) -> None:
        super().__init__(offsets)
        self.offsets = offsets


class _Log:
    """One topic's log, asked by the driver while it plans."""

    def __init__(self, options: ReadOptions) -> None:
        from eventsql_orchestration.database import Database, Queries
        from eventsql_orchestration.log.reader import Reader
        from eventsql_orchestration.log.registry import Registry

        self._options = options
        self._database = Database(
            options.source.dsn, schema=options.source.schema, migrate=False, application_name="eventsql-spark"
        )
        self._queries: Queries = Queries("spark", options.source.schema)
        self._registry = Registry(self._database)
        self._reader = Reader(self._database, self._registry)

    def close(self) -> None:
        self._database.close()

    def check(self) -> None:
        """Raises `TopicNotFoundError` or `PartitionOutOfRangeError`."""
        topic = self._registry.topic(self._options.topic)
        if self._options.partition != NOT_PARTITIONED:
            try:
                check_partition(topic.name, self._options.partition, topic.partitions)
            except EventSQLError as error:
                raise type(error)(f"option partition: {error}") from None

    def end(self) -> int:
        """The newest offset, of all partitions. The log only grows at its end: what lies before is decided."""
        return self._reader.end(self._options.topic)

    def offset_of_nth(self, after: int, upto: int, nth: int) -> int | None:
        with self._database.connection() as connection:
            row = self._execute(connection, "offset_of_nth", after=after, upto=upto, skip=nth - 1).fetchone()
            return None if row is None else int(row[0])

    def splits(self, after: int, upto: int) -> list[Split]:
        parts = equal_parts(after, upto, PROBES)
        with self._database.connection() as connection:
            occupied = self._execute(
                connection, "occupied", after=[low for low, _ in parts], upto=[high for _, high in parts]
            ).fetchall()
        return [
            Split(OffsetRange(self._options.topic, self._options.partition, low, high))
            for low, high in even_splits(after, upto, [(int(first), int(last)) for first, last in occupied], self._options.tasks)
        ]

    def _execute(self, connection: Connection, name: str, **values: Any) -> Any:
        if self._options.partition != NOT_PARTITIONED:
            name += "_in_partition"
        return connection.execute(
            self._queries(name, topic=self._options.topic), {"partition": self._options.partition, **values}
        )


@contextmanager
def _open(options: ReadOptions) -> Iterator[_Log]:
    log = _Log(options)
    try:
        yield log
    finally:
        log.close()


class _Reading:
    """What a batch and a stream have in common; pickled into the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._columns = schema.fieldNames()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark calls for a partition of its own where there is none to read.
        if not isinstance(partition, Split):
            return iter(())
        return read_batches(self._options.source, partition.offsets, self._columns)


class BatchReader(_Reading, DataSourceReader):
    """Reads one range. It ends at the newest offset when the query is planned, unless an end is given."""

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with _open(options) as log:
            log.check()
            end = log.end()
            after = max(0, (options.starting or EARLIEST) - 1)
            upto = end if options.ending is None else max(0, options.ending - 1)
            for name, offset in (("startingOffsets", after), ("endingOffsets", upto)):
                if offset > end:
                    raise ValidationError(
                        f"option {name}: {offset + 1} is out of range: the newest offset of topic {options.topic!r} is {end}"
                    )
            return log.splits(after, upto)


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a topic as it grows. The offset of a stream is the next one to read, as in the option."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._log: _Log | None = None
        self._last: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_log": None}

    def initialOffset(self) -> dict[str, Any]:
        starting, end = self._options.starting, self._opened().end()
        if starting is not None and starting > end + 1:
            raise ValidationError(
                f"option startingOffsets: {starting} is out of range: "
                f"the newest offset of topic {self._options.topic!r} is {end}"
            )
        return self._offset(end + 1 if starting is None else max(EARLIEST, starting))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._options.max_events is None else ReadMaxRows(self._options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._opened().end()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        log, starting = self._opened(), self._next(start)
        end = log.end() if self._last is None else self._last
        if end and end + 1 < starting:
            raise EventSQLError(
                f"topic {self._options.topic!r} ends at offset {end}, before {starting} where this stream stopped: it was "
                "made anew or restored; begin with a new checkpoint"
            )
        upto = max(end, starting - 1)
        if isinstance(limit, ReadMaxRows):
            upto = log.offset_of_nth(starting - 1, upto, limit.max_rows) or upto
        return self._offset(upto + 1)

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._offset(self._opened().end() + 1)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._opened().splits(self._next(start) - 1, self._next(end) - 1)

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()

    def _opened(self) -> _Log:
        if self._log is None:
            log = _Log(self._options)
            log.check()
            self._log = log
        return self._log

    def _offset(self, following: int) -> dict[str, Any]:
        return {self._options.topic: {_SHARD: following}}

    def _next(self, offset: dict[str, Any]) -> int:
        try:
            return int(offset[self._options.topic][_SHARD])
        except (KeyError, TypeError, ValueError):
            raise ValidationError(
                f"option subscribe: the checkpoint is of {', '.join(offset)}, not of {self._options.topic}"
            ) from None
