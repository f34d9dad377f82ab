"""The data source that Spark finds under the name `eventsql`."""

# ruff: noqa: N802 - the methods have Spark's names

from __future__ import annotations

import sys
from typing import Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.spark import FORMAT
from eventsql_orchestration.spark.change_options import ChangeOptions, reads_changes
from eventsql_orchestration.spark.change_reader import CHANGE_SCHEMA, ChangeReader
from eventsql_orchestration.spark.options import WriteOptions
from eventsql_orchestration.spark.read_options import ReadOptions
from eventsql_orchestration.spark.reader import BatchReader, FilteringReader, declared_schema
from eventsql_orchestration.spark.stream import StreamReader
from eventsql_orchestration.spark.writer import BatchWriter, StreamWriter

_PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"
"""The Spark program that asks for a reader to push filters to."""

_COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
"""The Spark program that asks for a writer to commit or abort a stream's batch; another program plans it."""


class EventSQLDataSource(DataSource):
    """Topics as tables and as streams, and the changes of the event store.

    docs/spark_reading.md and docs/spark_writing.md list the options.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType | str:
        if reads_changes(self.options):
            return CHANGE_SCHEMA
        return declared_schema(self.options)

    def reader(self, schema: StructType) -> BatchReader | ChangeReader:
        if reads_changes(self.options):
            return ChangeReader(ChangeOptions.parse(self.options), schema)
        options = ReadOptions.parse(self.options, streaming=False)
        # Spark 4.3 has one read function for a frame and all frames made of it: the frame's next query sees only the
        # rows that the first query's filters left. Only the user knows whether there is another query.
        #
        # If filter pushdown is off, Spark refuses a reader that could take filters. Only the program that asks shows
        # it.
        kind = FilteringReader if options.push_filters and _runs(_PUSHING) else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        if reads_changes(self.options):
            raise ConfigurationError(
                "option aggregates is only for batch reads: follow the event store with a subscription"
            )
        return StreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        options = WriteOptions.parse(self.options, streaming=True)
        return StreamWriter(options, schema, overwrite=overwrite, plan=not _runs(_COMMITTING))


def _runs(program: str) -> bool:
    """Whether Spark has started this process with this program."""
    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    return program in sys.modules or getattr(started, "name", None) == program
