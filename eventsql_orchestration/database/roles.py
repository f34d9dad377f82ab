"""Roles of PostgreSQL with the least rights that a publisher, the transfer, a consumer or a reader needs.

The admin role owns the platform's tables; the other roles have rights on them. All are groups without a login: a
service's own login becomes a member of the roles that it needs. The table `access_role` lists the roles: a later topic
or migration gives each role its rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString, TypeAlias

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.database import grants, tables
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.grants import ADMIN, DEFAULT_PREFIX, KINDS, TOPIC_KINDS, Log, Role, role_name
from eventsql_orchestration.database.log_names import BLOCK_STORE, BLOCK_TABLE, EVENT_TABLE, ROW_STORE
from eventsql_orchestration.database.migrations import VERSION_TABLE
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.errors import RegistryError, TopicNotFoundError, ValidationError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, check_schema_name

LOCK_SECONDS: Final = 10
"""How long a change of roles waits for each table. Later statements wait behind it."""

_EVERYTHING: Final = "eventsql_all_topics"
"""The policy of roles that see the rows of all topics."""

_PATTERNS: Final = {
    "log": EVENT_TABLE, "blocks": BLOCK_TABLE, "rows_of_both": ROW_STORE, "blocks_of_both": BLOCK_STORE,
}  # fmt: skip
"""The patterns of the names of a log's relations."""

_OF_EVERYTHING: Final = ("pg_read_all_data", "pg_write_all_data")
"""PostgreSQL's own roles with rights on all tables, for monitoring; no GRANT names them."""

Statements: TypeAlias = Iterator[sql.Composed]


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role of this installation with its members."""

    role: Role
    members: tuple[str, ...] = field(default=())


class Roles:
    """Makes, lists and drops the roles of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, *, prefix: str = DEFAULT_PREFIX, topics: Sequence[str] = ()) -> list[Role]:
        """Make the roles of all topics, and the roles of each of `topics`; returns all roles of the installation.

        A role that exists stays, and gets the rights that it lacks. The admin role becomes the owner of the platform's
        tables, and their former owner becomes a member of it. Raises `TopicNotFoundError`; `ValidationError` if a role
        of the same name is no group; `PermissionDeniedError` if the current role may not make roles.
        """
        with self._database.transaction() as connection:
            made = self._wanted(connection, prefix, topics)
            _run(connection, self._statements(connection, made))
            return [state.role for state in _states(connection, self._database.schema)]

    def sql(self, *, prefix: str = DEFAULT_PREFIX, topics: Sequence[str] = ()) -> str:
        """The statements of `create`, in one transaction, to be applied by hand. Raises the same errors."""
        with self._database.transaction() as connection:
            made = self._wanted(connection, prefix, topics)
            statements = [each.as_string(connection) for each in self._statements(connection, made)]
        return "".join(f"{statement};\n" for statement in ("BEGIN", *statements, "COMMIT"))

    def states(self) -> list[RoleState]:
        """All roles of this installation, with their members."""
        with self._database.connection() as connection:
            return _states(connection, self._database.schema)

    def drop(self, *, topics: Sequence[str] = ()) -> list[Role]:
        """Drop the roles of `topics`, or all of this installation; returns the dropped roles.

        The admin role's tables become the current role's. Raises `RegistryError` if another database still grants
        something to one of them.
        """
        schema = self._database.schema
        with self._database.transaction() as connection:
            known = [state.role for state in _states(connection, schema)]
            roles = [role for role in known if not topics or role.topic in topics]
            try:
                _run(connection, _drop(connection, schema, roles, everything=not topics))
            except psycopg.errors.DependentObjectsStillExist as error:
                raise RegistryError(
                    f"a role still has rights or tables elsewhere ({error.diag.message_detail or error}): drop the "
                    "roles of the other databases first, or revoke those rights"
                ) from error
        return roles

    def creators(self) -> list[str | None]:
        """The roles that may create objects in the platform's schema, beside its owners. None stands for PUBLIC."""
        with self._database.connection() as connection:
            return [name for (name,) in _rows(connection, self._database.schema, "creators")]

    def _wanted(self, connection: Connection, prefix: str, topics: Sequence[str]) -> list[Role]:
        """The roles to make, and the roles that exist. The first is the admin role."""
        check_schema_name(prefix)
        schema = self._database.schema
        known = {state.role for state in _states(connection, schema)}
        if existing := {role.name for role in known if role.kind == ADMIN} - {role_name(prefix, ADMIN)}:
            raise ValidationError(
                f"this installation has roles with another prefix ({', '.join(existing)}): use it, or drop them"
            )
        for topic in topics:
            if not _logs(connection, schema, [topic]):
                raise TopicNotFoundError(
                    f"topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )

        wanted = [Role(role_name(prefix, kind), kind) for kind in KINDS]
        wanted += [Role(role_name(prefix, kind, topic), kind, topic) for topic in topics for kind in TOPIC_KINDS]
        wanted += sorted(known - set(wanted), key=lambda role: role.name)
        if too_long := [role.name for role in wanted if len(role.name.encode()) > grants.MOST_NAME]:
            raise ValidationError(
                f"role {too_long[0]} would have more than {grants.MOST_NAME} bytes: choose a shorter prefix"
            )
        if unusable := _rows(connection, schema, "unusable", names=[role.name for role in wanted]):
            names = ", ".join(name for (name,) in unusable)
            raise ValidationError(
                f"role {names} exists and may log in, or may do more than a group should: choose another --prefix"
            )
        return wanted

    def _statements(self, connection: Connection, roles: Sequence[Role]) -> Statements:
        schema, (admin, *others) = self._database.schema, roles
        yield _ddl("SET LOCAL lock_timeout TO {}", sql.Literal(f"{LOCK_SECONDS}s"))
        for role in roles:
            yield _ddl(
                "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) {}) "
                "THEN CREATE ROLE {} NOLOGIN; END IF; END $$",
                sql.Literal(role.name), role.name,
            )  # fmt: skip
        yield from _own(connection, schema, admin.name)
        for role in others:
            yield _ddl("GRANT USAGE ON SCHEMA {} TO {}", schema, role.name)

        # The owner makes the grants, so that they have one grantor.
        yield _ddl("SET LOCAL ROLE {}", admin.name)
        for role in roles:
            yield _ddl(
                "INSERT INTO {}.access_role (eql_role, eql_kind, eql_topic) VALUES ({}, {}, {}) ON CONFLICT DO NOTHING",
                schema, sql.Literal(role.name), sql.Literal(role.kind), sql.Literal(role.topic),
            )  # fmt: skip
        yield from _grants(roles, schema, _logs(connection, schema))
        yield from _policies(connection, roles, schema)
        yield _ddl("RESET ROLE")


def act_as_owner(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Become the admin role in the caller's transaction, so that it owns new tables; returns whether there are roles.

    A role that is no member of the admin role stays the current role.
    """
    found = _rows(connection, schema, "ownership", buffer=f'"{schema}".event_buffer', trigger=grants.TRIGGER)
    owner, has_roles, becomes = found[0] if found else (None, False, False)
    if has_roles and becomes:
        connection.execute(_ddl("SET LOCAL ROLE {}", owner))
    return bool(has_roles)


def grant(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> None:
    """Give the roles of this installation their rights on the logs of `topics`; with None, all of their rights.

    The caller's transaction has made the topics or migrated the tables, as the admin.
    """
    roles = [state.role for state in _states(connection, schema)]
    logs = _logs(connection, schema, topics)
    _run(connection, _grants(roles, schema, logs) if topics is None else _log_grants(roles, logs))


def _ddl(template: LiteralString, *names: str | sql.Composable) -> sql.Composed:
    """A statement with names as identifiers."""
    return sql.SQL(template).format(*(sql.Identifier(each) if isinstance(each, str) else each for each in names))


def _run(connection: psycopg.Connection[Any], statements: Statements) -> None:
    for statement in statements:
        connection.execute(statement)


def _rows(connection: psycopg.Connection[Any], schema: str, name: str, **values: object) -> list[tuple[Any, ...]]:
    """The rows of a statement of `roles.sql`."""
    cursor = connection.cursor(row_factory=tuple_row)
    return cursor.execute(Queries("roles", schema)(name), {"schema": schema, **values}).fetchall()


def _states(connection: psycopg.Connection[Any], schema: str) -> list[RoleState]:
    rows = _rows(connection, schema, "roles", kinds=list(KINDS))
    return [RoleState(Role(name, kind, topic), tuple(members)) for name, kind, topic, members in rows]


def _logs(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> list[Log]:
    wanted = None if topics is None else list(topics)
    rows = _rows(connection, schema, "logs", topics=wanted, **_PATTERNS)
    return [
        Log(
            topic, sql.Identifier(namespace, table), sql.SQL(ids),
            None if view is None else sql.Identifier(namespace, view), blocks,
        )
        for topic, namespace, table, ids, view, blocks in rows
    ]  # fmt: skip


def _tables(connection: psycopg.Connection[Any], schema: str) -> list[tuple[Any, ...]]:
    """The platform's tables, with the logs and their segments: schema, name, owner, whether that is a superuser."""
    names = [*tables.NAMES, VERSION_TABLE]
    return _rows(connection, schema, "tables", tables=names, dropped=tables.DROPPED, **_PATTERNS)


def _own(connection: Connection, schema: str, admin: str) -> Statements:
    """Make the admin role the owner of the platform's objects, and their former owners its members."""
    found = _tables(connection, schema)
    for member in sorted({owner for _, _, owner, superuser in found if not superuser and owner != admin}):
        yield _ddl("GRANT {} TO {}", admin, member)
    yield _ddl("GRANT USAGE, CREATE ON SCHEMA {} TO {}", schema, admin)
    for owner, for_others in _rows(connection, schema, "schema_owner"):
        if not for_others and owner != admin:
            yield _ddl("ALTER SCHEMA {} OWNER TO {}", schema, admin)
    for namespace, table, owner, _ in found:
        if owner != admin:
            yield _ddl("ALTER TABLE {} OWNER TO {}", sql.Identifier(namespace, table), admin)
    for function, owner in _rows(connection, schema, "functions", functions=list(grants.FUNCTIONS)):
        if owner != admin:
            yield _ddl("ALTER FUNCTION {} OWNER TO {}", sql.SQL(function), admin)


def _grants(roles: Sequence[Role], schema: str, logs: Sequence[Log]) -> Statements:
    for role in roles:
        if role.kind != ADMIN:
            yield from grants.rights(role, schema)
    yield from _log_grants(roles, logs)
    # An AFTER trigger: with a BEFORE trigger COPY would store rows one by one.
    yield _ddl(
        "CREATE OR REPLACE TRIGGER {} AFTER INSERT ON {}.event_buffer FOR EACH ROW "
        "WHEN (NEW.eql_partition OPERATOR(pg_catalog.<) (-1) "
        "OR NOT pg_catalog.has_function_privilege({}::pg_catalog.regprocedure, 'EXECUTE')) "
        "EXECUTE FUNCTION {}.check_publication()",
        grants.TRIGGER, schema, sql.Literal(f'"{schema}".publish_anywhere()'), schema,
    )  # fmt: skip


def _log_grants(roles: Sequence[Role], logs: Sequence[Log]) -> Statements:
    for log in logs:
        for role in roles:
            yield from grants.rights_on_log(role, log, DEAD_LETTER_SUFFIX)


def _policies(connection: Connection, roles: Sequence[Role], schema: str) -> Statements:
    """Row security, if there are roles of one topic. The owner is not subject to it.

    A role with rights on these tables that were given by hand still sees every row.
    """
    bound = [role for role in roles if role.topic is not None and role.kind != "publisher"]
    if not bound:
        return
    granted = _rows(connection, schema, "granted", tables=list(grants.BY_TOPIC))
    seeing = ("consumer", "reader", "transfer", "eraser")
    free = [role.name for role in roles if role.topic is None and role.kind in seeing]
    free += [name for (name,) in granted if name not in {role.name for role in roles}]
    free += _OF_EVERYTHING
    for table in (sql.Identifier(schema, name) for name in grants.BY_TOPIC):
        yield _ddl("ALTER TABLE {} ENABLE ROW LEVEL SECURITY", table)
        yield _ddl("DROP POLICY IF EXISTS {} ON {}", _EVERYTHING, table)
        names = sql.SQL(", ").join(map(sql.Identifier, free))
        yield _ddl("CREATE POLICY {} ON {} TO {} USING (true)", _EVERYTHING, table, names)
        for role in bound:
            own = sql.SQL("eql_topic OPERATOR(pg_catalog.=) {}").format(role.topic)
            yield _ddl("DROP POLICY IF EXISTS {} ON {}", role.name, table)
            yield _ddl("CREATE POLICY {} ON {} TO {} USING ({})", role.name, table, role.name, own)


def _drop(connection: Connection, schema: str, roles: Sequence[Role], *, everything: bool) -> Statements:
    functions = _rows(connection, schema, "functions", functions=list(grants.GRANTED_FUNCTIONS))
    objects: list[tuple[sql.SQL, sql.Composable]] = [
        (sql.SQL("TABLE"), sql.Identifier(*row[:2])) for row in _tables(connection, schema)
    ]
    objects += [(sql.SQL("SEQUENCE"), log.sequence) for log in _logs(connection, schema)]
    objects += [(sql.SQL("SEQUENCE"), sql.Identifier(schema, name)) for name in grants.SEQUENCES]
    objects += [(sql.SQL("FUNCTION"), sql.SQL(name)) for name, _ in functions]
    if everything:
        yield _ddl("DROP TRIGGER IF EXISTS {} ON {}.event_buffer", grants.TRIGGER, schema)
    policies = [role.name for role in roles if role.topic is not None] + ([_EVERYTHING] if everything else [])
    for table in (sql.Identifier(schema, name) for name in grants.BY_TOPIC):
        for policy in policies:
            yield _ddl("DROP POLICY IF EXISTS {} ON {}", policy, table)
        if everything:
            yield _ddl("ALTER TABLE {} DISABLE ROW LEVEL SECURITY", table)

    for role in roles:
        name = sql.Literal(role.name)
        yield _ddl("DELETE FROM {}.access_role WHERE eql_role OPERATOR(pg_catalog.=) {}", schema, name)
        if role.kind == ADMIN:
            yield _ddl("REASSIGN OWNED BY {} TO CURRENT_USER", role.name)
        else:
            for kind, granted in objects:
                yield _ddl("REVOKE ALL ON {} {} FROM {}", kind, granted, role.name)
        yield _ddl("REVOKE ALL ON SCHEMA {} FROM {}", schema, role.name)
        yield _ddl("DROP ROLE {}", role.name)
