"""Tables that replace others: how they are filled, the rights that they take over, and what they would lose."""

from __future__ import annotations

from psycopg import sql

from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.queries import Queries, statement
from eventsql_orchestration.database.rows import fetch_all


def lost(connection: Connection, live: tuple[str, str], new: tuple[str, str]) -> list[str]:
    """The objects of a live table that the new table lacks, such as triggers. Tables are a schema and a name."""
    values = {"live": sql.Identifier(*live).as_string(connection), "made": sql.Identifier(*new).as_string(connection)}
    return [what for (what,) in fetch_all(connection, Queries("replaced_tables", live[0])("lost"), values)]


def make_ledger(connection: Connection, ledger: sql.Identifier) -> None:
    """Make the table in which the transactions of a fill in bulk note the parts that they have written."""
    columns = sql.SQL("eql_table pg_catalog.text, eql_part pg_catalog.int4, PRIMARY KEY (eql_table, eql_part)")
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(ledger, columns))


def grant_as_on(connection: Connection, live: sql.Identifier, new: sql.Identifier, kind: str = "TABLE") -> None:
    """Grant the rights on a live relation, and on the columns that both have, on the new relation too.

    `kind` is TABLE, also for a view, or SEQUENCE.
    """
    for role, privilege, may_grant in _rights(connection, live, new):
        option = sql.SQL(" WITH GRANT OPTION" if may_grant else "")
        connection.execute(_changed("GRANT {} ON {} {} TO {}", privilege, kind, new, role) + option)


def revoke_all(connection: Connection, new: sql.Identifier, kind: str = "TABLE") -> None:
    """Revoke the rights of all roles but the owner, which default privileges may have given."""
    for role, privilege, _ in _rights(connection, new, new):
        connection.execute(_changed("REVOKE {} ON {} {} FROM {}", privilege, kind, new, role))


def _rights(
    connection: Connection, relation: sql.Identifier, other: sql.Identifier
) -> list[tuple[str | None, str, bool]]:
    values = {"relation": relation.as_string(connection), "other": other.as_string(connection)}
    return fetch_all(connection, sql.SQL(statement("replaced_tables", "grants")), values)


def _changed(template: str, privilege: str, kind: str, relation: sql.Identifier, role: str | None) -> sql.Composed:
    grantee = sql.SQL("PUBLIC") if role is None else sql.Identifier(role)
    return sql.SQL(template).format(sql.SQL(privilege), sql.SQL(kind), relation, grantee)
