"""The data source that Spark finds under the name `eventsql`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from eventsql_orchestration.spark import FORMAT

if TYPE_CHECKING:
    from eventsql_orchestration.spark.reader import BatchReader, StreamReader
    from eventsql_orchestration.spark.writer import BatchWriter, StreamWriter


class EventSQLDataSource(DataSource):
    """Topics as tables and streams. The options are listed in `eventsql_orchestration.spark`.

    Spark loads this class for each session that uses any Python data source, so what reads and writes is imported when
    it is asked for.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from eventsql_orchestration.spark.options import ReadOptions
        from eventsql_orchestration.spark.reader import read_schema

        return read_schema(headers=ReadOptions.wants_headers(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        from eventsql_orchestration.spark.options import ReadOptions
        from eventsql_orchestration.spark.reader import BatchReader

        return BatchReader(ReadOptions.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        from eventsql_orchestration.spark.options import ReadOptions
        from eventsql_orchestration.spark.reader import StreamReader

        return StreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from eventsql_orchestration.spark.options import WriteOptions
        from eventsql_orchestration.spark.writer import BatchWriter

        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from eventsql_orchestration.spark.options import WriteOptions
        from eventsql_orchestration.spark.writer import StreamWriter

        return StreamWriter(WriteOptions.parse(self.options, streaming=True), schema, overwrite=overwrite)
