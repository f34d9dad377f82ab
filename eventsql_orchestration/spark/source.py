"""The data source that Spark finds under the name `eventsql`."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.options import ReadOptions, WriteOptions
from eventsql_orchestration.spark.reader import BatchReader, StreamReader, read_schema
from eventsql_orchestration.spark.writer import BatchWriter, StreamWriter


class EventSQLDataSource(DataSource):
    """Topics as tables and as streams. The package's docstring lists the options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return read_schema(headers=ReadOptions.wants_headers(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        return BatchReader(ReadOptions.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(WriteOptions.parse(self.options, streaming=True), schema, overwrite=overwrite)
