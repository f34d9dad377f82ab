"""Findings of `eventsql doctor` about a database itself: its server, schema, rights and open transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.cli.findings import Finding, ok, problem, warning
from eventsql_orchestration.database import Database, Queries, grants, migrations
from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.database.roles import Roles
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.database.sessions import connect
from eventsql_orchestration.database.translation import IF_LOST, IF_OF_JAVA
from eventsql_orchestration.database.urls import each_server
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.validation import age, counted

_OLDEST_SERVER: Final = 14
"""The oldest PostgreSQL that the package works with."""

_COLLATION_VERSIONS_SINCE: Final = 15_00_00
"""The first PostgreSQL that keeps the version of a database's collation."""

_CONNECT_SECONDS: Final = 3
"""The longest wait for a server of the URL that does not answer. A standby may be down."""

_BY_TENANT: Final = ("aggregate", "aggregate_change", "archived_change", "adopted_change", "aggregate_snapshot")
"""The tables of the event store, whose row security may keep the roles of tenants apart."""

FORGOTTEN_SECONDS: Final = 60.0
"""Somebody may have forgotten a transaction that has been open for longer."""

STANDBY_SECONDS: Final = 10.0
"""A commit that has waited for its standby for longer waits for one that is away."""


def server_finding(database: Database) -> Finding:
    with database.pooled() as connection:
        major, minor = divmod(connection.info.server_version, 10_000)
        (standby,) = fetch_one(connection, sql.SQL("SELECT pg_catalog.pg_is_in_recovery()"))
        read_only = fetch_one(connection, sql.SQL("SHOW transaction_read_only"))[0] == "on"
    if major < _OLDEST_SERVER:
        return problem("server", f"PostgreSQL {major}.{minor}", f"upgrade it to {_OLDEST_SERVER} or newer")
    if standby:
        remedy = "name the primary in the URL, or promote this server: SELECT pg_promote()"
        return problem("server", f"PostgreSQL {major}.{minor} is a standby, and takes no writes", remedy)
    if read_only:
        remedy = (
            "set default_transaction_read_only to off, where it was set: the role, the database, the server or the URL"
        )
        return problem("server", f"PostgreSQL {major}.{minor} is set to read only for this role and database", remedy)
    return ok("server", f"PostgreSQL {major}.{minor}")


def collation_findings(database: Database) -> Iterator[Finding]:
    """Indexes on text that another version of the collation has sorted: searches miss rows, and unique keys repeat."""
    with database.pooled() as connection:
        if connection.info.server_version < _COLLATION_VERSIONS_SINCE:
            return
        rows = fetch_all(connection, Queries("sessions", database.schema)("collation"), prepare=False)
    for name, sorted_by, present in rows:
        own = sql.Identifier(name).as_string()
        again = f"REINDEX DATABASE {own}; then ALTER DATABASE {own} REFRESH COLLATION VERSION"
        yield problem(
            "server",
            f"indexes of database {name} on text are sorted by version {sorted_by} of the database's collation, and "
            f"the server has {'none' if present is None else f'version {present}'}, as after an upgrade of its "
            "operating system: searches may miss rows, and unique keys may repeat",
            f"stop the programs; {again if present else 'dump the database, and restore it into a new one'}",
        )


def servers_finding(database: Database) -> Iterator[Finding]:
    """Several servers of the URL that take writes: each lacks the events that were published to the other."""
    servers = each_server(database.url)
    primaries: dict[tuple[str, float], tuple[int, str]] = {}
    for arguments in servers if len(servers) > 1 else ():
        options = {"connect_timeout": _CONNECT_SECONDS, **arguments}
        with suppress(psycopg.Error), closing(connect(database.dsn, **options)) as connection:
            if (row := connection.execute(statement("sessions", "timeline")).fetchone()) is not None:
                identity, timeline, started_at = row
                # The URL may name one server several times, for example by two poolers.
                place = f"{connection.info.host}:{connection.info.port}"
                primaries.setdefault((identity, started_at), (timeline, place))
    if len(primaries) > 1:
        newest = max(primaries.values())[1]
        named = ", ".join(f"{place} (timeline {timeline})" for timeline, place in primaries.values())
        yield problem(
            "server",
            f"{len(primaries)} servers of the URL take writes: {named}. Processes publish to both, and each lacks the "
            "events of the other",
            f"stop all of them but the one that was promoted last, which should be {newest}",
        )


def schema_finding(database: Database, *, embedded: bool) -> Finding:
    revision, head = database.revision(), migrations.HEAD
    if revision == head:
        return ok("schema", f"{database.schema} is at revision {head}")
    if revision is not None and not migrations.known(revision):
        return warning(
            "schema",
            f"{database.schema} is at revision {revision}, of a newer version of the package than this one ({head})",
            "pip install --upgrade eventsql-orchestration",
        )
    found, remedy = f"is at revision {revision}, this package needs {head}", "eventsql migrate"
    if revision is None and database.has_tables():
        found, remedy = "is not migrated yet", f"{remedy}, {IF_OF_JAVA}"
    elif revision is None:
        if embedded:
            return ok("schema", f"{database.schema} is missing; the first command creates it")
        found, remedy = "is missing", f"{remedy}; {IF_LOST}"
    return problem("schema", f"{database.schema} {found}", remedy)


def rights_findings(database: Database) -> Iterator[Finding]:
    """Functions that every role may execute, and roles that own or could make objects which the platform would use.

    The admin role is one of these roles if it does not own the tables: then it gets its tables back first.
    """
    roles = Roles(database)
    if functions := roles.open_functions():
        yield warning(
            "schema",
            "every role may execute functions that run with their owner's rights, as after a restore with "
            f"--no-privileges: {', '.join(functions)}",
            f"REVOKE EXECUTE ON FUNCTION {', '.join(functions)} FROM PUBLIC",
        )
    deprived = None
    with suppress(PermissionDeniedError):  # A later check asks for the role reader.
        deprived = roles.deprived_admin()
    if deprived is not None:
        admin, owner, prefix = deprived
        yield problem(
            "schema",
            f"the tables belong to {owner} and not to {admin}, as after a restore with --no-owner: the members of "
            f"{admin} may change nothing",
            f"as a superuser: eventsql roles create --prefix {prefix}",
        )
        return
    schema = sql.Identifier(database.schema).as_string()
    for role in roles.creators():
        name, revoked = ("every role", "PUBLIC") if role is None else (role, sql.Identifier(role).as_string())
        yield warning(
            "schema",
            f"{name} may create objects in {database.schema}: the platform would use tables and functions made there, "
            "and run the functions with its owner's rights",
            f"REVOKE CREATE ON SCHEMA {schema} FROM {revoked}",
        )
    for function, other, owner in roles.foreign_functions():
        yield warning(
            "schema",
            f"role {other} owns function {function}, and not {owner}: the platform would use it if one of its own "
            "functions has this name, and run it with its owner's rights",
            f"look at it, and DROP ROUTINE {function}; if it is the platform's own: "
            f"ALTER ROUTINE {function} OWNER TO {sql.Identifier(owner).as_string()}",
        )


def unlogged_findings(database: Database) -> Iterator[Finding]:
    query = Queries("sessions", database.schema)("unlogged_tables")
    with database.pooled() as connection:
        tables = [table for (table,) in fetch_all(connection, query, {"schema": database.schema})]
    if tables:
        yield problem(
            "schema",
            f"a crash of the server or a failover empties the tables that are unlogged: {', '.join(tables)}",
            "; ".join(f"ALTER TABLE {table} SET LOGGED" for table in tables),
        )


def row_security_findings(database: Database) -> Iterator[Finding]:
    query = Queries("sessions", database.schema)("row_security")
    with database.pooled() as connection:
        tables = [*grants.BY_TOPIC, *_BY_TENANT]
        rows = fetch_all(connection, query, {"schema": database.schema, "tables": tables})
    if rows:
        remedies = [f"ALTER TABLE {table} {'NO FORCE' if own else 'DISABLE'} ROW LEVEL SECURITY" for table, own in rows]
        yield problem(
            "schema",
            "row security hides events, messages or definitions from the programs of roles that it binds, which get no "
            f"error: {', '.join(table for table, _ in rows)}",
            "; ".join(remedies),
        )


def commit_findings(database: Database, longer_than: float = STANDBY_SECONDS) -> Iterator[Finding]:
    """Commits that wait for a synchronous standby that is away."""
    query = Queries("sessions", database.schema)("waiting_commits")
    with database.pooled() as connection:
        commits, seconds, standbys = fetch_one(connection, query, {"longer_than": longer_than}, prepare=False)
    if commits:
        yield problem(
            "server",
            f"{counted(commits, 'commit')} {'waits' if commits == 1 else 'wait'} for a standby, up to "
            f"{age(round(seconds))} (synchronous_standby_names is {standbys!r}): nothing is published or consumed",
            "start the standby. If a failover may lose events: clear synchronous_standby_names, and SELECT "
            "pg_reload_conf(). Do not end the sessions: each would have committed on this server alone",
        )


def transaction_findings(database: Database, longer_than: float = FORGOTTEN_SECONDS) -> Iterator[Finding]:
    """Transactions that somebody may have forgotten: they keep rows from vacuum, and tables from changes."""
    query = Queries("sessions", database.schema)("open_transactions")
    with database.pooled() as connection:
        rows = fetch_all(connection, query, {"longer_than": longer_than}, prepare=False)
    for seconds, role, pid, application, state, prepared, waiting in rows:
        if prepared is None:
            place = f"in process {pid} ({application or 'no name'}, {state})"
            end = f"SELECT pg_catalog.pg_terminate_backend({pid})"
        else:
            place, end = f"prepared as {prepared!r}", f"ROLLBACK PREPARED {sql.Literal(prepared).as_string()}"
        held = f"{counted(waiting, 'session')} {'waits' if waiting == 1 else 'wait'} for it, and " if waiting else ""
        yield warning(
            "transactions",
            f"a transaction of role {role} has been open for {age(round(seconds))}, {place}: {held}vacuum frees no row "
            "that was deleted since, so tables grow",
            f"if nobody needs it: {end}",
        )
