"""The tables of views: the statements that make them, and the rows that describe them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from psycopg import sql
from psycopg.types.json import Jsonb

from eventsql_orchestration.views.definitions import Definition, Rollup, Timeline

_GROWING: Final = ("values", "distinct", "quantiles")
"""The parts of a rollup that a declaration may add to."""

_FREE: Final = ("retention", "sort_after")
"""The parts of views that a declaration may change."""

_INDEXES: Final = ("language", "indexed")
"""The parts of views that a declaration may add, with an index."""


def row_of(view: Definition) -> dict[str, Any]:
    """The values of a view's row."""
    return {
        "name": view.name, "kind": view.kind, "definition": Jsonb(view.described()),
        "retention": None if view.retention is None else round(view.retention.total_seconds()),
        "period": round(view.period.total_seconds()),
    }  # fmt: skip


def differences(held: Definition, wanted: Definition) -> Sequence[str]:
    """The parts of a view that a declaration cannot change, as texts."""
    if type(held) is not type(wanted):
        return [f"kind {held.kind}"]
    different = []
    for name in (field.name for field in fields(held)):
        before, now = getattr(held, name), getattr(wanted, name)
        grows = name in _GROWING and now[: len(before)] == before
        free = name in _FREE or grows or (name in _INDEXES and not before)
        if before != now and not free:
            different.append(f"{name} {before}")
    return different


def statements_of(view: Definition, table: sql.Identifier) -> Iterable[sql.Composed]:
    """The statements that make the table of a view and its indexes."""
    if isinstance(view, Rollup):
        dimensions = [sql.Identifier(name) for name in view.dimensions]
        columns = [
            sql.SQL("eql_tenant text NOT NULL, eql_bucket timestamptz NOT NULL"),
            *(sql.SQL("{} text NOT NULL").format(name) for name in dimensions),
            sql.SQL("eql_slot smallint NOT NULL, eql_count bigint NOT NULL"),
            *rollup_columns(view),
        ]
        key = [sql.SQL("eql_tenant"), sql.SQL("eql_bucket"), *dimensions, sql.SQL("eql_slot")]
        yield sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({})) PARTITION BY RANGE (eql_bucket)").format(
            table, sql.SQL(", ").join(columns), sql.SQL(", ").join(key)
        )
        if view.indexed:
            yield dimensions_index(table, view)
        return
    if isinstance(view, Timeline):
        yield sql.SQL(
            "CREATE TABLE {} (eql_id bigserial, eql_tenant text NOT NULL, eql_resource text NOT NULL, "
            "eql_data jsonb NOT NULL, eql_occurred_at timestamptz NOT NULL) PARTITION BY RANGE (eql_occurred_at)"
        ).format(table)
        yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_resource, eql_id)").format(table)
        return
    yield sql.SQL(
        "CREATE TABLE {} (eql_id bigserial, eql_tenant text NOT NULL, eql_resource text NOT NULL, "
        "eql_level text NOT NULL, eql_line text NOT NULL, eql_attributes jsonb NOT NULL, "
        "eql_written_at timestamptz NOT NULL) PARTITION BY RANGE (eql_written_at)"
    ).format(table)
    yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_resource, eql_written_at, eql_id)").format(table)
    yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_written_at, eql_id)").format(table)
    # For `LogsView.follow`.
    yield sql.SQL("CREATE INDEX ON {} (eql_id)").format(table)
    if view.language is not None:
        yield words_index(table, view.language)


def rollup_columns(view: Rollup) -> list[sql.Composed]:
    """The columns of a rollup's values and sketches, with their types."""
    return [
        *(sql.SQL("{} numeric").format(sql.Identifier(name)) for _, name in view.measures),
        *(sql.SQL("{} bytea").format(sql.Identifier(name)) for name in view.sketches),
    ]


def adding_columns(table: sql.Identifier, view: Rollup) -> sql.Composed:
    """The statement that adds the columns of a rollup's values and sketches that are missing."""
    columns = sql.SQL(", ADD COLUMN IF NOT EXISTS ").join(rollup_columns(view))
    return sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS {}").format(table, columns)


def dimensions_index(table: sql.Identifier, view: Rollup) -> sql.Composed:
    """The index of a rollup by its indexed dimensions."""
    columns = sql.SQL(", ").join(map(sql.Identifier, ("eql_tenant", *view.indexed, "eql_bucket")))
    return sql.SQL("CREATE INDEX ON {} ({})").format(table, columns)


def words_index(table: sql.Identifier, language: str) -> sql.Composed:
    """The index of the words of each line: its expression is the one in `LogsView.search`."""
    configuration = sql.Literal(f"pg_catalog.{language}")
    index = sql.SQL("CREATE INDEX ON {} USING gin (to_tsvector({}::regconfig, eql_line))")
    return index.format(table, configuration)
