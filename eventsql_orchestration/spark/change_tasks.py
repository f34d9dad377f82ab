"""Ranges of the event store's global order as Arrow record batches.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.spark.adbc import CopyConnection, behind, read_errors
from eventsql_orchestration.spark.options import Source

CHANGE_TYPES: Final[Mapping[str, pa.DataType]] = MappingProxyType(
    {
        "aggregate_type": pa.string(),
        "aggregate_id": pa.string(),
        "version": pa.int64(),
        "kind": pa.string(),
        "data": pa.string(),
        "created_at": pa.timestamp("us", tz="UTC"),
        "schema_version": pa.int32(),
        "id": pa.string(),
        "metadata": pa.string(),
        "transaction": pa.int64(),
        "position": pa.int64(),
    }
)
"""The Arrow types of the columns of changes."""


@dataclass(frozen=True, slots=True)
class ChangeRange:
    """The changes that one task reads, from `after` (exclusive) to `upto` (inclusive), two checkpoints of an era.

    `query` gives the columns, `era_query` the era that the store has now, and whether it has all changes up to `upto`.
    """

    era: str
    after: str
    upto: str
    query: str
    era_query: str


def read_changes(source: Source, wanted: ChangeRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The changes of a range, in their order.

    All of them were committed when the read was planned, and changes stay as they are, so all tasks together read one
    snapshot. Raises `DatabaseError` if the store was adopted meanwhile, if the server is a standby that is behind, and
    if it refuses the read, and `DatabaseUnavailableError` if it goes away.
    """
    schema = pa.schema([pa.field(name, CHANGE_TYPES[name]) for name in columns])
    what = f"changes {wanted.after} to {wanted.upto}"
    with read_errors(source, what), CopyConnection(source.dsn) as connection:
        # One snapshot for the era and for the changes.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        found = [row for batch in connection.batches(wanted.era_query) for row in batch.to_pylist()]
        if [row["eql_era"] for row in found] != [wanted.era]:
            raise DatabaseError(
                f"the event store was adopted after the read of {wanted.after} to {wanted.upto} was planned: load "
                "the frame again"
            )
        if not found[0]["complete"]:
            raise behind(what, "changes")
        for batch in connection.batches(wanted.query):
            if batch.num_rows:
                arrays = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
