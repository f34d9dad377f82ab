"""Comparing the entries of a view with those of a rebuild."""

from __future__ import annotations

from dataclasses import dataclass, field

from psycopg import sql

from eventsql_orchestration.views.definitions import Definition, Rollup, Timeline
from eventsql_orchestration.views.partitions import sent


@dataclass(frozen=True, slots=True)
class ViewComparison:
    """A view compared with a rebuild: entries that it lacks, and entries that it has beside those of the rebuild.

    An entry of a rollup that differs counts as both. `examples` are some of them, as JSON.
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


def _entries(view: Definition, table: sql.Identifier) -> sql.Composed:
    """The entries of a view's table without what depends on how they were written."""
    match view:
        case Rollup():
            time_of = "eql_bucket"
            keys = ["eql_tenant", "eql_bucket", *view.dimensions]
            template = (
                "SELECT {columns}, pg_catalog.sum(eql_count) AS eql_count{values} "
                "FROM {table} WHERE {kept} GROUP BY {columns}"
            )
        case Timeline():
            time_of = "eql_occurred_at"
            keys = ["eql_tenant", "eql_resource", "eql_occurred_at", "eql_data"]
            template = (
                "SELECT {columns}, "
                "pg_catalog.row_number() OVER (PARTITION BY eql_tenant, eql_resource ORDER BY eql_id) AS eql_place "
                "FROM {table} WHERE {kept}"
            )
        case _:
            time_of = "eql_written_at"
            keys = ["eql_tenant", "eql_resource", "eql_written_at", "eql_level", "eql_line", "eql_attributes"]
            template = "SELECT {columns} FROM {table} WHERE {kept}"
    values = view.values if isinstance(view, Rollup) else ()
    summed = [
        sql.SQL(", {0}({1}) AS {1}").format(sql.SQL(kind), sql.Identifier(f"{kind}_{name}"))
        for name in values
        for kind in ("sum", "min", "max")
    ]
    return sql.SQL(template).format(
        columns=sql.SQL(", ").join(map(sql.Identifier, keys)),
        values=sql.Composed(summed),
        table=table,
        kept=sql.SQL(f"(%(oldest)s::timestamptz IS NULL OR {time_of} > %(oldest)s::timestamptz)"),
    )
