"""Comparing the entries of a view with the entries of a rebuild."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from psycopg import sql

from eventsql_orchestration.views.definitions import Definition, Rollup, Timeline
from eventsql_orchestration.views.rollup_sql import collected
from eventsql_orchestration.views.sketches import same_distinct, same_quantiles
from eventsql_orchestration.views.view_table import sent


@dataclass(frozen=True, slots=True)
class ViewComparison:
    """A view compared with a rebuild: entries that the view lacks, and entries that the rebuild does not have.

    An entry of a rollup that differs counts as both; quantiles differ if the error of estimates does not explain it.
    `examples` are some entries, as JSON.
    """

    view: str
    missing: int
    surplus: int
    examples: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Whether the view is as the rebuild has it."""
        return not self.missing and not self.surplus


def comparison(view: Definition, schema: str, rebuilt: str) -> bytes:
    """The statement that counts the entries in which two tables differ, and gives some of them."""
    live, made = (_entries(view, sql.Identifier(schema, table)) for table in (view.table, rebuilt))
    statement = sql.SQL(
        "WITH live AS ({live}), made AS ({made}), "
        "missing AS (SELECT * FROM made EXCEPT ALL SELECT * FROM live), "
        "surplus AS (SELECT * FROM live EXCEPT ALL SELECT * FROM made) "
        "SELECT (SELECT pg_catalog.count(*) FROM missing), (SELECT pg_catalog.count(*) FROM surplus), "
        "pg_catalog.array_cat("
        "ARRAY(SELECT pg_catalog.to_jsonb(missing)::pg_catalog.text FROM missing LIMIT %(most)s), "
        "ARRAY(SELECT pg_catalog.to_jsonb(surplus)::pg_catalog.text FROM surplus LIMIT %(most)s))"
    ).format(live=live, made=made)
    return sent(statement)


def sketch_comparison(view: Rollup, schema: str, rebuilt: str) -> bytes:
    """The statement that gives the sketches of each bucket that is otherwise equal in two tables: key as JSON, then
    each table's sketches.
    """
    keys = ["eql_tenant", "eql_bucket", *view.dimensions]
    live, made = (_entries(view, sql.Identifier(schema, table), sketches=True) for table in (view.table, rebuilt))
    same = [
        sql.SQL("(live.{0} = made.{0} OR live.{0} IS NULL AND made.{0} IS NULL)").format(sql.Identifier(name))
        for name in ("eql_count", *(column for _, column in view.measures))
    ]
    statement = sql.SQL(
        "WITH live AS ({live}), made AS ({made}) "
        "SELECT pg_catalog.jsonb_build_object({key})::pg_catalog.text, {sketches} FROM live JOIN made ON {joined} "
        "WHERE {same}"
    ).format(
        live=live,
        made=made,
        key=sql.SQL(", ").join(
            part for name in keys for part in (sql.Literal(name), sql.Identifier("live", name))
        ),
        sketches=sql.SQL(", ").join(sql.Identifier(side, name) for side in ("live", "made") for name in view.sketches),
        joined=sql.SQL(" AND ").join(sql.SQL("live.{0} = made.{0}").format(sql.Identifier(name)) for name in keys),
        same=sql.SQL(" AND ").join(same),
    )  # fmt: skip
    return sent(statement)


def sketches_differ(view: Rollup, row: Sequence[Sequence[bytes] | None]) -> bool:
    """Whether the two tables' sketches of one bucket cannot come from the same entries."""
    count = len(view.sketches)
    checks = [*([same_distinct] * len(view.distinct)), *([same_quantiles] * len(view.quantiles))]
    return not all(same(one, other) for same, one, other in zip(checks, row[:count], row[count:], strict=True))


def _entries(view: Definition, table: sql.Identifier, *, sketches: bool = False) -> sql.Composed:
    """A view's entries, without ids and slots, which differ between two tables with the same entries."""
    match view:
        case Rollup():
            keys = ["eql_tenant", "eql_bucket", *view.dimensions]
            template = (
                "SELECT {columns}, pg_catalog.sum(eql_count) AS eql_count{values} "
                "FROM {table} WHERE {kept} GROUP BY {columns}"
            )
        case Timeline():
            keys = ["eql_tenant", "eql_resource", "eql_occurred_at", "eql_data"]
            template = (
                "SELECT {columns}, "
                "pg_catalog.row_number() OVER (PARTITION BY eql_tenant, eql_resource ORDER BY eql_id) AS eql_place "
                "FROM {table} WHERE {kept}"
            )
        case _:
            keys = ["eql_tenant", "eql_resource", "eql_written_at", "eql_level", "eql_line", "eql_attributes"]
            template = "SELECT {columns} FROM {table} WHERE {kept}"
    summed = [
        sql.SQL(", {0}({1}) AS {1}").format(sql.SQL(kind), sql.Identifier(column))
        for kind, column in (view.measures if isinstance(view, Rollup) else ())
    ]
    if sketches and isinstance(view, Rollup):
        summed += [
            sql.SQL(", {0} AS {1}").format(column, sql.Identifier(name))
            for column, name in zip(collected(view), view.sketches, strict=True)
        ]
    return sql.SQL(template).format(
        columns=sql.SQL(", ").join(map(sql.Identifier, keys)),
        values=sql.Composed(summed),
        table=table,
        kept=sql.SQL(f"(%(oldest)s::timestamptz IS NULL OR {view.time_of} > %(oldest)s::timestamptz)"),
    )
