"""Conditions on the events of a read: filters that Spark pushes down, and the filter of a consumer.

Each condition is exact SQL over the columns of a log. Conditions on offsets, partitions, topics and shards also narrow
the ranges that are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from psycopg import sql
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.model import FIRST_TIME, LAST_TIME
from eventsql_orchestration.validation import MAX_BIGINT

_COLUMNS: Final[Mapping[str, tuple[str, type]]] = {
    "offset": ("eql_id", int),
    "partition": ("eql_partition", int),
    # Spark compares text by its bytes.
    "key": ('eql_key COLLATE "C"', str),
    "timestamp": ("eql_buffered_at::timestamptz", datetime),
}

_COMPARISONS: Final[Mapping[type[Filter], str]] = {
    EqualTo: "{} = {}",
    EqualNullSafe: "{} = {} IS TRUE",
    GreaterThan: "{} > {}",
    GreaterThanOrEqual: "{} >= {}",
    LessThan: "{} < {}",
    LessThanOrEqual: "{} <= {}",
}

_NULL_CHECKS: Final[Mapping[type[Filter], str]] = {IsNull: "{} IS NULL", IsNotNull: "{} IS NOT NULL"}

_TEXT_MATCHES: Final[Mapping[type[Filter], str]] = {
    StringStartsWith: "starts_with({}, {})",
    StringEndsWith: "right({}, length({})) = {}",
    StringContains: "strpos({}, {}) > 0",
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a read: `after < offset <= upto`, `topics`, `partitions` and `shards` (None for all of them), and
    SQL conditions `rows`, which each row must meet.
    """

    after: int = 0
    upto: int = MAX_BIGINT
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    shards: frozenset[str] | None = None
    rows: tuple[str, ...] = ()

    def with_filter(self, condition: Filter) -> Conditions | None:
        """These conditions and Spark's filter; None if the filter is left to Spark."""
        column = _column_of(condition)
        if column in ("topic", "shard"):
            return self._of_log(column, _values_of(condition))
        row = _as_sql(condition)
        if row is None:
            return None
        narrowed = replace(self, rows=(*self.rows, row))
        if column == "offset":
            return _narrow_offsets(narrowed, condition)
        if column == "partition" and (wanted := _values_of(condition)) is not None:
            return replace(narrowed, partitions=_both(self.partitions, wanted))
        return narrowed

    def _of_log(self, column: str, wanted: Collection[Any] | None) -> Conditions | None:
        if wanted is None or not all(isinstance(value, str) for value in wanted):
            return None
        if column == "shard":
            return replace(self, shards=_both(self.shards, wanted))
        return replace(self, topics=_both(self.topics, wanted))

    def with_consumer(self, chosen: EventFilter | None, schema: str) -> Conditions:
        """These conditions and the conditions of a consumer's filter; `schema` has the platform's functions."""
        if chosen is None:
            return self
        rows: list[str] = []
        if chosen.keys is not None:
            rows.append(_format("eql_key = ANY ({})", sorted(chosen.keys)))
        if chosen.key_prefix is not None:
            rows.append(_format("starts_with(eql_key, {})", chosen.key_prefix))
        if chosen.metadata:
            readable = f"{sql.Identifier(schema).as_string()}.readable_metadata(eql_metadata)"
            rows.append(_format(f"{readable}::jsonb @> {{}}::jsonb", json.dumps(dict(chosen.metadata))))
        return replace(self, rows=(*self.rows, *rows))


def push(filters: Iterable[Filter]) -> tuple[Conditions, list[Filter]]:
    """The conditions of a conjunction of filters, and the filters that are left to Spark."""
    conditions, left = Conditions(), []
    for each in filters:
        narrowed = conditions.with_filter(each)
        if narrowed is None:
            left.append(each)
        else:
            conditions = narrowed
    return conditions, left


def _column_of(condition: Filter) -> str | None:
    inner = condition.child if isinstance(condition, Not) else condition
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    return path[0] if len(path) == 1 else None


def _values_of(condition: Filter) -> Collection[Any] | None:
    """The values that a filter allows for its column; None if it does not list them."""
    match condition:
        case EqualTo() | EqualNullSafe():
            return (condition.value,)
        case In():
            return tuple(condition.value)
    return None


def _both(known: frozenset[Any] | None, wanted: Collection[Any]) -> frozenset[Any]:
    return frozenset(wanted) if known is None else known & frozenset(wanted)


def _narrow_offsets(conditions: Conditions, condition: Filter) -> Conditions:
    after, upto = conditions.after, conditions.upto
    match condition:
        case GreaterThan():
            after = max(after, condition.value)
        case GreaterThanOrEqual():
            after = max(after, condition.value - 1)
        case LessThan():
            upto = min(upto, condition.value - 1)
        case LessThanOrEqual():
            upto = min(upto, condition.value)
        case EqualTo() | EqualNullSafe() | In():
            wanted = _values_of(condition) or (0,)
            after, upto = max(after, min(wanted) - 1), min(upto, max(wanted))
    return replace(conditions, after=after, upto=upto)


def _as_sql(condition: Filter) -> str | None:
    if isinstance(condition, Not):
        inner = _as_sql(condition.child)
        return None if inner is None else f"NOT ({inner})"
    column, kind = _COLUMNS.get(_column_of(condition) or "", (None, None))
    if column is None or kind is None:
        return None
    if template := _NULL_CHECKS.get(type(condition)):
        return template.format(column)
    values = tuple(condition.value) if isinstance(condition, In) else (getattr(condition, "value", None),)
    if not values or not all(_fits(value, kind) for value in values):
        return None
    literals = [_format("{}", value) for value in values]
    if isinstance(condition, In):
        return f"{column} = ANY (ARRAY[{', '.join(literals)}])"
    template = _COMPARISONS.get(type(condition)) or (_TEXT_MATCHES.get(type(condition)) if kind is str else None)
    return None if template is None else template.format(column, *literals * 2)


def _fits(value: object, kind: type) -> bool:
    """Whether PostgreSQL compares the value as Spark does."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    if isinstance(value, str):
        return "\x00" not in value
    if isinstance(value, datetime):
        # The database compares times as other programs have written them, and a read gives the nearest of these times.
        return value.tzinfo is not None and FIRST_TIME < value < LAST_TIME
    return True


def _format(template: str, value: Any) -> str:
    return sql.SQL(template).format(sql.Literal(value)).as_string()
