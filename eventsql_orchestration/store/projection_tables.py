"""The tables of projections: live tables, and tables of rebuilds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg import sql

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.errors import DatabaseBusyError, ProjectionError
from eventsql_orchestration.store.projection_definition import CheckedProjection


class ProjectionTables:
    """Finds the tables of projections, and lets names without a schema mean them."""

    def __init__(self, schema: str) -> None:
        self._queries = Queries("projections", schema)

    @contextmanager
    def in_schema(self, connection: Connection, schema: str, written: Sequence[str] = ()) -> Iterator[None]:
        """Have names without a schema mean tables of `schema`, in the caller's transaction.

        Raises `DatabaseBusyError` if a rebuild has replaced one of the tables that the block has `written`, and the
        transaction, which is stricter than READ COMMITTED, does not see the new rows: an UPDATE has changed none.
        """
        (before,) = fetch_one(connection, self._queries("path"))
        self.look_in(connection, schema)
        # After an error, the transaction is rolled back, and the path with it.
        yield
        # Look after the block: from its statements on, a rebuild has to wait for this transaction.
        tables = [sql.Identifier(schema, table).as_string(connection) for table in written]
        values = {"path": before, "tables": tables, "in_schema": sql.Identifier(schema).as_string(connection)}
        _, replaced = fetch_one(connection, self._queries("leave"), values)
        if replaced:
            raise DatabaseBusyError(
                f"a table of {', '.join(tables)} was rebuilt after this transaction had begun, and the transaction "
                "does not see its rows: roll back, and try again"
            )

    def look_in(self, connection: Connection, schema: str) -> None:
        path = sql.SQL("{}, public").format(sql.Identifier(schema)).as_string(connection)
        connection.execute(self._queries("set_path"), {"path": path})

    def existing(self, connection: Connection, each: CheckedProjection, schema: str) -> set[str]:
        values = {"in_schema": schema, "tables": each.tables}
        return {table for (table,) in fetch_all(connection, self._queries("tables"), values)}

    def check(self, connection: Connection, each: CheckedProjection, schema: str) -> None:
        if missing := set(each.tables) - self.existing(connection, each, schema):
            raise ProjectionError(
                f"projection {each.name!r} did not make {', '.join(sorted(missing))} in schema {schema!r}: name its "
                "tables in `create` without a schema"
            )
