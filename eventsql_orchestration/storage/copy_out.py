"""Queries that give a range of a log to COPY, as text without parameters: ADBC copies nothing else.

Runs in Spark's tasks, so it does not import the database floor, which takes longer to load than a small range takes to
read. The driver tells the tasks the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from psycopg import sql

from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.qualification import qualified

_EXPRESSIONS: Final = {
    "key": sql.SQL("eql_key"),
    "value": sql.SQL("eql_value"),
    "partition": sql.SQL("eql_partition"),
    "offset": sql.SQL("eql_id"),
    "timestamp": sql.SQL("eql_buffered_at::timestamptz"),
    # JSON would come as an extension type.
    "headers": sql.SQL("eql_metadata::text"),
}

COLUMNS: Final = frozenset(_EXPRESSIONS)
"""The columns that a log has, by their names in Spark."""


def range_query(
    schema: str, table: str, offsets: OffsetRange, columns: Iterable[str], *, rows: Sequence[str] = ()
) -> str:
    """The events of a range in order. `rows` are SQL conditions on the columns of the log, with values as literals."""
    conditions: list[sql.Composable] = [
        sql.SQL("eql_id > {}").format(offsets.after),
        sql.SQL("eql_id <= {}").format(offsets.upto),
    ]
    if offsets.partition != NOT_PARTITIONED:
        conditions.append(sql.SQL("eql_partition = {}").format(offsets.partition))
    conditions += [sql.SQL(f"({row})") for row in rows]
    return _select(schema, table, sql.SQL(", ").join(_EXPRESSIONS[name] for name in columns), conditions)


def event_query(schema: str, table: str, offset: int) -> str:
    """The offset of one event, if the log still has the event."""
    return _select(schema, table, _EXPRESSIONS["offset"], [sql.SQL("eql_id = {}").format(offset)])


def _select(schema: str, table: str, columns: sql.Composable, conditions: Sequence[sql.Composable]) -> str:
    log = sql.Identifier(schema, table)
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY eql_id")
    return qualified(query.format(columns, log, sql.SQL(" AND ").join(conditions)).as_string())
