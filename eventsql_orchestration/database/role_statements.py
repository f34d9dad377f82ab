"""The statements that make, grant and drop the roles of one installation, and that tell which roles there are.

`grants.py` has the rights of each kind of role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg import sql

from eventsql_orchestration.database import grants, tables
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.grants import ADMIN, KINDS, Log, Role
from eventsql_orchestration.database.log_names import BLOCK_STORE, BLOCK_TABLE, EVENT_TABLE, ROW_STORE
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import CaptureError

_EVERYTHING: Final = "eventsql_all_topics"
"""The policy of roles that see and change the rows of all topics, as far as their rights go."""

_READING: Final = "eventsql_read_all_topics"
"""The policy of roles that only read the rows of all topics. A policy counts for a login with all of its roles: it must
not lend a role that only reads to the changes of a role of one topic."""

_PATTERNS: Final = {
    "log": EVENT_TABLE, "blocks": BLOCK_TABLE, "rows_of_both": ROW_STORE, "blocks_of_both": BLOCK_STORE,
}  # fmt: skip
"""The patterns of the names of a log's relations."""

_READS: Final = ("reader", "transfer")
"""The kinds of role that change no row of these tables."""

Statements: TypeAlias = Iterator[sql.Composed]


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role of this installation with its members. The server may lack a role that a restored database notes."""

    role: Role
    exists: bool
    members: tuple[str, ...]


def act_as_owner(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Become the admin role in the caller's transaction, so that this role owns new tables; returns whether there are
    roles.

    A role that is not a member of the admin role stays the current role.
    """
    found = rows_of(connection, schema, "ownership", buffer=f'"{schema}".event_buffer', trigger=grants.TRIGGER)
    owner, has_roles, becomes = found[0] if found else (None, False, False)
    if has_roles and becomes:
        connection.execute(ddl("SET LOCAL ROLE {}", owner))
    return bool(has_roles)


def grant(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> None:
    """Give the roles of this installation their rights on the logs of `topics`; with None, all of their rights.

    The caller's transaction has made the topics or migrated the tables, as the admin.
    """
    roles = [state.role for state in states(connection, schema) if state.exists]
    found = logs(connection, schema, topics)
    if topics is None:
        run(connection, all_grants(roles, schema, found))
        connection.execute(guard(schema))
        # The migration may have made tables with rows of all topics.
        added = rows_of(connection, schema, "without_row_security", tables=list(grants.BY_TOPIC))
        run(connection, policies(connection, roles, schema, [name for (name,) in added]))
    else:
        run(connection, log_grants(roles, found))


def ddl(template: LiteralString, *names: str | sql.Composable) -> sql.Composed:
    """A statement with names as identifiers."""
    return sql.SQL(template).format(*(sql.Identifier(each) if isinstance(each, str) else each for each in names))


def run(connection: psycopg.Connection[Any], statements: Statements) -> None:
    for statement in statements:
        connection.execute(statement)


def rows_of(connection: psycopg.Connection[Any], schema: str, name: str, **values: object) -> list[tuple[Any, ...]]:
    """The rows of a statement of `roles.sql`."""
    return fetch_all(connection, Queries("roles", schema)(name), {"schema": schema, **values})


def states(connection: psycopg.Connection[Any], schema: str) -> list[RoleState]:
    rows = rows_of(connection, schema, "roles", kinds=list(KINDS))
    return [RoleState(Role(name, kind, topic), exists, tuple(members)) for name, kind, topic, exists, members in rows]


def logs(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> list[Log]:
    wanted = None if topics is None else list(topics)
    rows = rows_of(connection, schema, "logs", topics=wanted, **_PATTERNS)
    return [
        Log(
            topic, sql.Identifier(namespace, table), sql.SQL(ids),
            None if view is None else sql.Identifier(namespace, view), blocks,
        )
        for topic, namespace, table, ids, view, blocks in rows
    ]  # fmt: skip


def owned_tables(connection: psycopg.Connection[Any], schema: str) -> list[tuple[Any, ...]]:
    """The platform's tables, with the logs and their segments: schema, name, owner, whether that is a superuser."""
    names = [*tables.NAMES, tables.VERSION_TABLE]
    return rows_of(connection, schema, "tables", tables=names, dropped=tables.DROPPED, **_PATTERNS)


def ownership(connection: Connection, schema: str, admin: str) -> Statements:
    """Make the admin role the owner of the platform's objects, and their former owners its members."""
    found = owned_tables(connection, schema)
    for member in sorted({owner for _, _, owner, superuser in found if not superuser and owner != admin}):
        yield ddl("GRANT {} TO {}", admin, member)
    yield ddl("GRANT USAGE, CREATE ON SCHEMA {} TO {}", schema, admin)
    for owner, for_others in rows_of(connection, schema, "schema_owner"):
        if not for_others and owner != admin:
            yield ddl("ALTER SCHEMA {} OWNER TO {}", schema, admin)
    for namespace, table, owner, _ in found:
        if owner != admin:
            yield ddl("ALTER TABLE {} OWNER TO {}", sql.Identifier(namespace, table), admin)
    for function, owner in rows_of(connection, schema, "functions", functions=list(grants.FUNCTIONS)):
        if owner != admin:
            yield ddl("ALTER FUNCTION {} OWNER TO {}", sql.SQL(function), admin)
    # The triggers of captured tables run as the owner of their function.
    for namespace, table, _, uses, reads, *_ in rows_of(connection, schema, "captured", role=admin):
        if not uses:
            yield ddl("GRANT USAGE ON SCHEMA {} TO {}", namespace, admin)
        if not reads:
            yield ddl("GRANT SELECT ON {} TO {}", sql.Identifier(namespace, table), admin)


def check_captures(connection: Connection, schema: str, role: str | None) -> None:
    """Check that the triggers of captured tables can run as `role`, the new owner; None is the current role.

    Raises `CaptureError`: otherwise, each write to the table would fail, or lack its event.
    """
    for _, _, table, uses, reads, sees_all, trusted in rows_of(connection, schema, "captured", role=role):
        if not (uses and reads and sees_all and trusted):
            # A superuser that drops roles would own the triggers, and the table's owner is no member of it.
            name, by = (role, "a superuser") if role else ("the current role", "the table's owner")
            raise CaptureError(
                f"table {table!r} is captured, and its triggers would run as {name}: it has to read all of the table's "
                f"rows, and the table's owner has to be a member of {name}. Nothing was changed: run this as {by}, "
                "or drop the capture first"
            )


def all_grants(roles: Sequence[Role], schema: str, logs: Sequence[Log]) -> Statements:
    for role in roles:
        if role.kind != ADMIN:
            yield from grants.rights(role, schema)
    yield from log_grants(roles, logs)


def guard(schema: str) -> sql.Composed:
    """Make the trigger that refuses events which a role may not publish."""
    # An AFTER trigger: with a BEFORE trigger COPY would store rows one by one.
    return ddl(
        "CREATE OR REPLACE TRIGGER {} AFTER INSERT ON {}.event_buffer FOR EACH ROW "
        "WHEN (NEW.eql_partition OPERATOR(pg_catalog.<) (-1) "
        "OR NOT pg_catalog.has_function_privilege({}::pg_catalog.regprocedure, 'EXECUTE')) "
        "EXECUTE FUNCTION {}.check_publication()",
        grants.TRIGGER, schema, sql.Literal(f'"{schema}".publish_anywhere()'), schema,
    )  # fmt: skip


def log_grants(roles: Sequence[Role], logs: Sequence[Log]) -> Statements:
    for log in logs:
        for role in roles:
            yield from grants.rights_on_log(role, log)


def policies(
    connection: psycopg.Connection[Any], roles: Sequence[Role], schema: str, tables: Sequence[str] = grants.BY_TOPIC
) -> Statements:
    """Row security of `tables`, if there are roles of one topic. The owner is not subject to it.

    A role with rights on these tables that were given by hand still sees every row.
    """
    bound = [role for role in roles if role.topic is not None and role.kind != "publisher"]
    if not bound:
        return
    granted = rows_of(connection, schema, "granted", tables=list(grants.BY_TOPIC))
    reading = [role.name for role in roles if role.topic is None and role.kind in _READS]
    free = [role.name for role in roles if role.topic is None and role.kind in ("consumer", "eraser")]
    for name, only_reads in granted:
        if name not in {role.name for role in roles}:
            (reading if only_reads else free).append(name)
    # PostgreSQL's own roles have rights on all tables, for monitoring. No GRANT names them.
    reading.append("pg_read_all_data")
    free.append("pg_write_all_data")
    every: sql.Composable = sql.SQL("true")
    wanted = [(_EVERYTHING, "ALL", free, every), (_READING, "SELECT", reading, every)]
    for role in bound:
        own = sql.SQL("eql_topic OPERATOR(pg_catalog.=) {}").format(role.topic)
        wanted.append((role.name, "SELECT" if role.kind in _READS else "ALL", [role.name], own))
    for table in (sql.Identifier(schema, name) for name in tables):
        yield ddl("ALTER TABLE {} ENABLE ROW LEVEL SECURITY", table)
        for policy, command, members, rows in wanted:
            yield ddl("DROP POLICY IF EXISTS {} ON {}", policy, table)
            names = sql.SQL(", ").join(map(sql.Identifier, members))
            yield ddl("CREATE POLICY {} ON {} FOR {} TO {} USING ({})", policy, table, sql.SQL(command), names, rows)


def removal(connection: Connection, schema: str, removed: Sequence[RoleState], *, everything: bool) -> Statements:
    """A role that has rights in another database stays on the server: that database may be another shard."""
    functions = rows_of(connection, schema, "functions", functions=list(grants.GRANTED_FUNCTIONS))
    objects: list[tuple[sql.SQL, sql.Composable]] = [
        (sql.SQL("TABLE"), sql.Identifier(*row[:2])) for row in owned_tables(connection, schema)
    ]
    objects += [(sql.SQL("SEQUENCE"), log.sequence) for log in logs(connection, schema)]
    objects += [(sql.SQL("SEQUENCE"), sql.Identifier(schema, name)) for name in grants.SEQUENCES]
    objects += [(sql.SQL("FUNCTION"), sql.SQL(name)) for name, _ in functions]
    if everything:
        yield ddl("DROP TRIGGER IF EXISTS {} ON {}.event_buffer", grants.TRIGGER, schema)
    policies = [state.role.name for state in removed if state.role.topic is not None]
    policies += [_EVERYTHING, _READING] if everything else []
    for table in (sql.Identifier(schema, name) for name in grants.BY_TOPIC):
        for policy in policies:
            yield ddl("DROP POLICY IF EXISTS {} ON {}", policy, table)
        if everything:
            yield ddl("ALTER TABLE {} DISABLE ROW LEVEL SECURITY", table)

    for state in removed:
        role, name = state.role, sql.Literal(state.role.name)
        yield ddl("DELETE FROM {}.access_role WHERE eql_role OPERATOR(pg_catalog.=) {}", schema, name)
        if not state.exists:
            continue
        if role.kind == ADMIN:
            yield ddl("REASSIGN OWNED BY {} TO CURRENT_USER", role.name)
            # The role owns nothing now. This removes its rights on tables that are captured, or were captured before.
            yield ddl("DROP OWNED BY {}", role.name)
        else:
            for kind, granted in objects:
                yield ddl("REVOKE ALL ON {} {} FROM {}", kind, granted, role.name)
        yield ddl("REVOKE ALL ON SCHEMA {} FROM {}", schema, role.name)
        if rows_of(connection, schema, "elsewhere", role=role.name) == [(False,)]:
            yield ddl("DROP ROLE {}", role.name)
