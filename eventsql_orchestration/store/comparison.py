"""Compares the rows of a projection with a replay of the changes of some aggregates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from eventsql_orchestration.consuming.handlers import call_handler
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.queries import identifier
from eventsql_orchestration.database.rows import fetch_all, fetch_first
from eventsql_orchestration.errors import ProjectionError
from eventsql_orchestration.store.projection_definition import CheckedProjection
from eventsql_orchestration.store.projection_tables import ProjectionTables
from eventsql_orchestration.store.store import Store

_TEMPORARY: Final = "pg_temp"
"""The schema of tables that only this session sees."""

_ROWS: Final = sql.SQL(
    "SELECT {column}::pg_catalog.text, ROW({columns})::pg_catalog.text FROM {table} "
    "WHERE {column}::pg_catalog.text OPERATOR(pg_catalog.=) ANY (%s)"
)

_DIFFERENT: Final = sql.SQL(
    "SELECT DISTINCT differing.of FROM (({one} EXCEPT ALL {other}) UNION ALL ({other} EXCEPT ALL {one})) "
    "differing (of, contents) ORDER BY 1"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Numbers of replayed `aggregates` and `changes`. `different` has the ids whose rows differ, by table."""

    projection: str
    aggregates: int
    changes: int
    different: Mapping[str, Sequence[str]]

    @property
    def equal(self) -> bool:
        """Whether all rows are equal to the rows of the replay."""
        return not any(self.different.values())


def compare(store: Store, each: CheckedProjection, id_columns: Mapping[str, str], sample: int) -> Comparison:
    """Replay the changes of `sample` random aggregates into temporary tables, and compare the rows with the live rows.

    `id_columns` names the column of each table that has an aggregate's id. The comparison reads one snapshot, and
    leaves nothing behind. If the projection follows by a subscription, changes after the subscription's place are left
    out, and so are aggregates with dead letters. Raises `ProjectionError` for a table without rows to compare.
    """
    with store.database.connection() as connection, connection.transaction(force_rollback=True):
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        return _compare(store, connection, each, id_columns, sample)


def _compare(
    store: Store, connection: Connection, each: CheckedProjection, id_columns: Mapping[str, str], sample: int
) -> Comparison:
    queries = Queries("projections", store.database.schema)
    store.order.home.era(connection)
    values = {"subscription": each.subscription, "sample": sample, **each.only}
    chosen = fetch_all(connection, queries("sample"), values)
    place = fetch_first(connection, queries("subscription_place"), values)
    selected = _selected_columns(connection, queries, each, id_columns)

    ProjectionTables(store.database.schema).look_in(connection, _TEMPORARY)
    each.projection.create(connection)
    replayed = 0
    for of_type, aggregate_id in chosen:
        upto = None
        if place is not None:
            row = {"type": of_type, "id": aggregate_id, "transaction": place[0], "position": place[1]}
            (upto,) = fetch_first(connection, queries("version_at"), row) or (0,)
        for change in store.load(of_type, aggregate_id, upto_version=upto, connection=connection):
            if each.wants(change):
                call_handler(connection, change, each.projection.apply)
                replayed += 1

    ids = sorted({aggregate_id for _, aggregate_id in chosen})
    different = {}
    for table, column in id_columns.items():
        live, anew = (
            _ROWS.format(
                column=identifier(column),
                columns=sql.SQL(", ").join(map(identifier, selected[table])),
                table=identifier(schema, table),
            )
            for schema in (each.schema, _TEMPORARY)
        )
        rows = connection.execute(_DIFFERENT.format(one=live, other=anew), [ids] * 4)
        different[table] = [of for (of,) in rows]
    return Comparison(each.name, len(ids), replayed, different)


def _selected_columns(
    connection: Connection, queries: Queries, each: CheckedProjection, id_columns: Mapping[str, str]
) -> dict[str, list[str]]:
    """The columns of each live table without a default, such as a number of a sequence."""
    selected = {}
    for table, column in id_columns.items():
        values = {"in_schema": each.schema, "table": table}
        selected[table] = [name for (name,) in fetch_all(connection, queries("plain_columns"), values)]
        if column not in selected[table]:
            raise ProjectionError(
                f"table {table!r} of projection {each.name!r} has no column {column!r} without a default: give the "
                "column that has the aggregate's id"
            )
    return selected
