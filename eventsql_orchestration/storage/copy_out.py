"""Queries for COPY of a range of a log. They are text without parameters, because ADBC binds none in COPY.

Runs in Spark's tasks, so it does not import the database floor, which takes longer to load than a small range takes to
read. The driver tells the tasks the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from psycopg import sql

from eventsql_orchestration.database.log_names import holds_blocks
from eventsql_orchestration.model import ERASED, NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.validation import MAX_BIGINT

_EXPRESSIONS: Final = {
    "key": sql.SQL("eql_key"),
    # An erased event has no value.
    "value": sql.SQL(
        "CASE WHEN octet_length(eql_value) > 0 OR NOT starts_with(eql_metadata::text, {}) THEN eql_value END"
    ).format(ERASED),
    "partition": sql.SQL("eql_partition"),
    "offset": sql.SQL("eql_id"),
    "timestamp": sql.SQL("eql_buffered_at::timestamptz"),
    # Otherwise Arrow would get JSON as an extension type.
    "headers": sql.SQL("eql_metadata::text"),
}

MOST_IDS: Final = 20_000
"""As `log_form.MOST_IDS`, which takes longer to load."""

COLUMNS: Final = frozenset(_EXPRESSIONS)
"""The columns that a log has, by their names in Spark."""


def range_query(
    schema: str, table: str, offsets: OffsetRange, columns: Iterable[str], *, rows: Sequence[str] = ()
) -> str:
    """The events of a range in order. `rows` are SQL conditions on the columns of the log, with values as literals.

    `table` is the table that holds the log, in either form.
    """
    conditions: list[sql.Composable] = [
        sql.SQL("eql_id > {}").format(offsets.after),
        sql.SQL("eql_id <= {}").format(offsets.upto),
    ]
    if offsets.partition != NOT_PARTITIONED:
        conditions.append(sql.SQL("eql_partition = {}").format(offsets.partition))
    conditions += [sql.SQL(f"({row})") for row in rows]
    selected = sql.SQL(", ").join(_EXPRESSIONS[name] for name in columns)
    where = sql.SQL(" AND ").join(conditions)
    if not holds_blocks(table):
        query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY eql_id")
        return qualified(query.format(selected, sql.Identifier(schema, table), where).as_string())

    # The blocks come in order, and their events within them: sorting the events would cost more than reading them.
    needed = sql.SQL(", ").join([selected, where]).as_string()
    log = _events_of_blocks(schema, table, offsets, needed)
    return qualified(sql.SQL("SELECT {} FROM {} WHERE {}").format(selected, log, where).as_string())


ARRAYS: Final = {
    "key": "eql_keys",
    "value": "eql_values",
    "timestamp": "eql_times",
    # Otherwise Arrow would get an array of JSON as an array of an extension type.
    "headers": "eql_metadata::text[]",
}
"""The columns of events that are arrays in blocks, by their names in Spark."""


_MARKS: Final = sql.SQL(
    "CASE WHEN eql_metadata IS NOT NULL AND array_position(eql_values, ''::bytea) IS NOT NULL "
    "THEN eql_metadata::text[] END"
)


def blocks_query(schema: str, table: str, offsets: OffsetRange, columns: Sequence[str]) -> str:
    """The blocks that may have events of a range, in order: last offset, events, partition, time, span, and arrays.

    The arrays, in this order: the places of events, if their ids have gaps; the `columns` that are in `ARRAYS`; and, if
    `columns` has values, the metadata that marks erased events. The blocks may have events outside the range.
    """
    arrays = [sql.SQL(ARRAYS[name]) for name in columns if name in ARRAYS]
    if "value" in columns:
        arrays.append(_MARKS)
    selected = [sql.SQL("eql_id, eql_events, eql_partition, eql_buffered_at, eql_span, eql_places"), *arrays]
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY eql_id")
    where = _near(offsets)
    return qualified(query.format(sql.SQL(", ").join(selected), sql.Identifier(schema, table), where).as_string())


def event_query(schema: str, table: str, offset: int) -> str:
    """The offset of one event, if the log still has the event."""
    return range_query(schema, table, OffsetRange("log", NOT_PARTITIONED, offset - 1, offset), ["offset"])


def topic_query(schema: str, topic: str, created: datetime) -> str:
    """One row if a topic is still the topic that was created at this time."""
    return qualified(
        sql.SQL("SELECT 1 AS found FROM {} WHERE eql_name = {} AND eql_created_at = {}")
        .format(sql.Identifier(schema, "topic"), topic, created)
        .as_string()
    )


_SOURCES: Final = {"eql_value": "eql_values", "eql_key": "eql_keys", "eql_metadata": "eql_metadata"}
"""The columns of events that are arrays in blocks, and these arrays."""

_NEAR: Final = sql.SQL("eql_id > {after} AND eql_id <= ({near}) AND eql_id - coalesce(eql_span, eql_events) < {upto}")
"""The blocks that may have events of a range: a block has at most `MOST_IDS` ids."""


def _near(offsets: OffsetRange) -> sql.Composed:
    """The condition on the blocks that may have events of a range."""
    near = min(offsets.upto, MAX_BIGINT - MOST_IDS) + MOST_IDS
    condition = _NEAR.format(after=offsets.after, near=near, upto=offsets.upto)
    if offsets.partition != NOT_PARTITIONED:
        condition += sql.SQL(" AND eql_partition = {}").format(offsets.partition)
    return condition


def _events_of_blocks(schema: str, table: str, offsets: OffsetRange, needed: str) -> sql.Composed:
    """A relation of the events of blocks near a range, in order, with the arrays that `needed` names."""
    wanted = [name for name in _SOURCES if name in needed]
    arrays: list[sql.Composable] = [sql.SQL("b.{}").format(sql.Identifier(_SOURCES[name])) for name in wanted]
    names = [sql.SQL(name) for name in wanted]
    if "eql_buffered_at" in needed:
        arrays.append(sql.SQL("b.eql_times"))
        names.append(sql.SQL("published"))
    # An array that always has an element for each event.
    arrays.append(sql.SQL("array_fill(NULL::boolean, ARRAY[b.eql_events])"))
    arrays.append(sql.SQL("b.eql_places"))
    names += [sql.SQL("nothing"), sql.SQL("place"), sql.SQL("number")]
    columns = [
        sql.SQL("b.eql_id - coalesce(b.eql_span, b.eql_events) + coalesce(e.place, e.number) AS eql_id"),
        sql.SQL("b.eql_partition"),
    ]
    columns += [
        sql.SQL("coalesce(e.eql_metadata, '{}'::json) AS eql_metadata" if name == "eql_metadata" else f"e.{name}")
        for name in wanted
    ]
    if "eql_buffered_at" in needed:
        columns.append(sql.SQL("coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at"))
    return sql.SQL(
        "(SELECT {columns} FROM (SELECT * FROM {blocks} WHERE {conditions} ORDER BY eql_id) b "
        "CROSS JOIN LATERAL {unnested} WITH ORDINALITY AS e ({names})) log"
    ).format(
        columns=sql.SQL(", ").join(columns), blocks=sql.Identifier(schema, table), conditions=_near(offsets),
        unnested=sql.SQL("unnest({})").format(sql.SQL(", ").join(arrays)), names=sql.SQL(", ").join(names),
    )  # fmt: skip
