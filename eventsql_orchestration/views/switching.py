"""Putting the new table of a rebuild in the place of a view's live table, with its rights and comments."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries, replaced_tables
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import ViewConflictError
from eventsql_orchestration.views.definitions import Definition, Rollup, start_of_partition
from eventsql_orchestration.views.view_table import make_periods


@dataclass(frozen=True, slots=True)
class Shadow:
    """The new table of a rebuild, which is a view of its own until it replaces `held`. Its ids follow `after_id`."""

    held: Definition
    definition: Definition
    ledger: str
    after_id: int


class Switch:
    """Replaces live tables of views in one schema."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._queries = Queries("views", schema)

    def replace(self, connection: Connection, shadow: Shadow) -> None:
        held, table = shadow.held, shadow.definition.table
        # A handler that waits for the lock has found its partition in the live table.
        starts = [start_of_partition(each) for each in self._partitions(connection, held.table)]
        make_periods(connection, self._schema, shadow.definition, starts)
        self.check_kept(connection, shadow)
        self._keep_rights(connection, held.table, table, "TABLE")
        self._keep_comments(connection, held.table, table)
        if not isinstance(held, Rollup):
            self._keep_rights(connection, sequence_of(held.table), sequence_of(table), "SEQUENCE")
        try:
            connection.execute(sql.SQL("DROP TABLE {}").format(self._table(held.table)))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise _drops_more(held, str(error.diag.message_detail)) from error

        renamed = [(each, f"{held.table}{each[len(table) :]}") for each in self._partitions(connection, table)]
        for before, after in [*renamed, (table, held.table)]:
            self._rename(connection, "TABLE", before, after)
        if not isinstance(held, Rollup):
            self._rename(connection, "SEQUENCE", sequence_of(table), sequence_of(held.table))
        connection.execute(self._queries("forget_view"), {"name": shadow.definition.name})

    def check_kept(self, connection: Connection, shadow: Shadow) -> None:
        """Raise `ViewConflictError` if the live table has something that the new table lacks."""
        live, new = shadow.held.table, shadow.definition.table
        lost = replaced_tables.lost(connection, (self._schema, live), (self._schema, new))
        tables = {"live": self._table(live).as_string(connection), "made": self._table(new).as_string(connection)}
        lost += [what for (what,) in fetch_all(connection, self._queries("lost_indexes"), tables)]
        if lost:
            raise _drops_more(shadow.held, ", ".join(lost))

    def _keep_rights(self, connection: Connection, live: str, new: str, kind: str) -> None:
        """Give the new relation the rights on the live relation, and no others."""
        made = self._table(new)
        replaced_tables.revoke_all(connection, made, kind)
        replaced_tables.grant_as_on(connection, self._table(live), made, kind)

    def _keep_comments(self, connection: Connection, live: str, new: str) -> None:
        values = {"table": self._table(live).as_string(connection)}
        for column, comment in fetch_all(connection, self._queries("comments"), values):
            kind, named = ("TABLE", (new,)) if column is None else ("COLUMN", (new, column))
            connection.execute(
                sql.SQL("COMMENT ON {} {} IS {}").format(
                    sql.SQL(kind), sql.Identifier(self._schema, *named), sql.Literal(comment)
                )
            )

    def _partitions(self, connection: Connection, table: str) -> list[str]:
        values = {"table": self._table(table).as_string(connection)}
        return [name for (name,) in fetch_all(connection, self._queries("view_partitions"), values)]

    def _rename(self, connection: Connection, kind: str, before: str, after: str) -> None:
        statement = sql.SQL("ALTER {} {} RENAME TO {}")
        connection.execute(statement.format(sql.SQL(kind), self._table(before), sql.Identifier(after)))

    def _table(self, name: str) -> sql.Identifier:
        return sql.Identifier(self._schema, name)


def sequence_of(table: str) -> str:
    """The sequence of the ids of a timeline's or a log's table."""
    return f"{table}_eql_id_seq"


def _drops_more(held: Definition, objects: str) -> ViewConflictError:
    return ViewConflictError(
        f"the switch would drop more than the table of view {held.name!r} ({objects}): drop these objects, rebuild, "
        "and create them again"
    )
