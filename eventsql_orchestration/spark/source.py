"""The data source that Spark finds under the name `eventsql`."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

import sys
from typing import Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.options import WriteOptions
from eventsql_orchestration.spark.read_options import ReadOptions, SchemaOptions
from eventsql_orchestration.spark.reader import BatchReader, FilteringReader, declared_schema
from eventsql_orchestration.spark.stream import StreamReader
from eventsql_orchestration.spark.writer import BatchWriter, StreamWriter

_PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"
"""The program in which Spark asks for a reader that it pushes filters to."""

_COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
"""The program in which Spark asks for a writer that commits or aborts a stream's batch, which another has planned."""


class EventSQLDataSource(DataSource):
    """Topics as tables and as streams. The package's docstring lists the options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        return declared_schema(SchemaOptions.parse(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        options = ReadOptions.parse(self.options, streaming=False)
        # Spark 4.3 keeps one read function for a frame and all that is made of it: the rows that one query's filters
        # leave are all that the frame's next query sees. Only who asks for it can know that there is no other query.
        #
        # Where filters are not to be pushed down, Spark refuses every reader that could take them, and nothing else
        # than the program that asks says whether they are.
        kind = FilteringReader if options.push_filters and pushes_filters() else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        options = WriteOptions.parse(self.options, streaming=True)
        return StreamWriter(options, schema, overwrite=overwrite, plan=not _runs(_COMMITTING))


def pushes_filters() -> bool:
    """Whether this process is one of those in which Spark pushes filters down."""
    return _runs(_PUSHING)


def _runs(program: str) -> bool:
    """Whether this process is one that Spark has started with this program of its own."""
    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    return program in sys.modules or getattr(started, "name", None) == program
