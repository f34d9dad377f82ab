"""Reading the event store: the driver plans the ranges, the tasks read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from eventsql_orchestration.spark.change_options import ChangeOptions
from eventsql_orchestration.spark.change_tasks import CHANGE_TYPES, read_changes
from eventsql_orchestration.spark.reader import check_columns

CHANGE_SCHEMA: Final = StructType([StructField(name, from_arrow_type(kind)) for name, kind in CHANGE_TYPES.items()])
"""The columns of changes, all nullable."""


class ChangeReader(DataSourceReader):
    """Reads the changes of the event store, in even parts of its global order, up to the newest below the horizon."""

    def __init__(self, options: ChangeOptions, schema: StructType) -> None:
        check_columns(schema, CHANGE_SCHEMA)
        self._options = options
        self._columns = schema.fieldNames()

    def partitions(self) -> Sequence[InputPartition]:
        # Tasks import this module, too, and must not wait for the database floor to load.
        from eventsql_orchestration.spark.change_planner import plan_changes  # noqa: PLC0415

        return [InputPartition(each) for each in plan_changes(self._options, self._columns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # The value is the range of one task, or None: Spark makes a partition if there is none.
        if partition.value is None:
            return iter(())
        return read_changes(self._options.source, partition.value, self._columns)
