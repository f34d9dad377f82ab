"""Roles of PostgreSQL with the least rights that a publisher, the transfer, a consumer or a reader needs.

The admin role owns the platform's tables; the others have rights on them. All are groups without a login: a service's
own login becomes a member of those that it needs. `access_role` remembers them, so that a topic or a migration that
comes later gives each its rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from eventsql_orchestration.database import grants, tables
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.grants import (
    ADMIN,
    BY_TOPIC,
    DEFAULT_PREFIX,
    KINDS,
    TOPIC_KINDS,
    Log,
    Role,
    role_name,
)
from eventsql_orchestration.database.migrations import VERSION_TABLE
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.errors import RegistryError, TopicNotFoundError, ValidationError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, check_schema_name

LOCK_SECONDS: Final = 10
"""How long a change of roles waits for each table. Others that come later wait behind it."""

_EVERYTHING: Final = "eventsql_all_topics"
"""The policy of roles that see the rows of all topics."""

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
        tables, and their former owner becomes a member of it. Raises `TopicNotFoundError`; `ValidationError` where a
        role of the same name is no group; `PermissionDeniedError` where the current role may not make roles.
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

        The admin role's tables become the current role's. Raises `RegistryError` where another database still grants
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

    def _wanted(self, connection: Connection, prefix: str, topics: Sequence[str]) -> list[Role]:
        """The roles to make, and the roles that exist."""
        check_schema_name(prefix)
        queries = Queries("roles", self._database.schema)
        known = {state.role for state in _states(connection, self._database.schema)}
        if existing := {role.name for role in known if role.kind == ADMIN} - {role_name(prefix, ADMIN)}:
            raise ValidationError(
                f"this installation has roles with another prefix ({', '.join(existing)}): name that, or drop them"
            )
        for topic in topics:
            if not _logs(connection, self._database.schema, [topic]):
                raise TopicNotFoundError(
                    f"topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )
        wanted = [Role(role_name(prefix, kind), kind) for kind in KINDS]
        wanted += [Role(role_name(prefix, kind, topic), kind, topic) for topic in topics for kind in TOPIC_KINDS]
        wanted += sorted(known - set(wanted), key=lambda role: role.name)
        if too_long := [role.name for role in wanted if len(role.name.encode()) > grants.MOST_NAME]:
            raise ValidationError(f"the prefix is too long: role {too_long[0]} has more than {grants.MOST_NAME} bytes")
        names = {"names": [role.name for role in wanted]}
        if unusable := [name for (name,) in connection.execute(queries("unusable"), names)]:
            raise ValidationError(
                f"role {', '.join(unusable)} is there already, and may log in or do more than a group should: take "
                "another --prefix"
            )
        return wanted

    def _statements(self, connection: Connection, roles: Sequence[Role]) -> Statements:
        schema = self._database.schema
        yield sql.SQL("SET LOCAL lock_timeout TO {}").format(sql.Literal(f"{LOCK_SECONDS}s"))
        for role in roles:
            yield _create(role)
        yield from _own(connection, schema, roles[0])
        for role in roles[1:]:
            yield sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(sql.Identifier(schema), sql.Identifier(role.name))
        # The owner makes the grants, so that they have one grantor.
        yield sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(roles[0].name))
        for role in roles:
            yield sql.SQL(
                "INSERT INTO {}.access_role (eql_role, eql_kind, eql_topic) VALUES ({}, {}, {}) ON CONFLICT DO NOTHING"
            ).format(sql.Identifier(schema), role.name, role.kind, role.topic)
        yield from _grants(roles, schema, _logs(connection, schema))
        yield from _policies(connection, roles, schema)
        yield sql.SQL("RESET ROLE").format()


def act_as_owner(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Become the admin role in the caller's transaction, so that it owns new tables; returns whether there are roles.

    A role that is no member of the admin role stays the current role.
    """
    values = {"buffer": f'"{schema}".event_buffer', "trigger": grants.TRIGGER}
    row = connection.cursor(row_factory=tuple_row).execute(Queries("roles", schema)("ownership"), values).fetchone()
    if row is None:
        return False
    owner, has_roles, becomes = row
    if has_roles and becomes:
        connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(owner)))
    return bool(has_roles)


def grant(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> None:
    """Give the roles of this installation their rights on the logs of `topics`; with None, all of their rights.

    The caller's transaction has made the topics or migrated the tables, as the admin.
    """
    roles = [state.role for state in _states(connection, schema)]
    if topics is None:
        _run(connection, _grants(roles, schema, _logs(connection, schema)))
    else:
        _run(connection, _log_grants(roles, _logs(connection, schema, topics)))


def _states(connection: psycopg.Connection[Any], schema: str) -> list[RoleState]:
    cursor = connection.cursor(row_factory=tuple_row)
    rows = cursor.execute(Queries("roles", schema)("roles"), {"kinds": list(KINDS)})
    return [RoleState(Role(name, kind, topic), tuple(members)) for name, kind, topic, members in rows]


def _platform(schema: str) -> dict[str, object]:
    """The platform's own tables and functions, as the statements on roles take them."""
    return {
        "schema": schema,
        "tables": [*tables.NAMES, VERSION_TABLE],
        "functions": list(grants.FUNCTIONS),
        "dropped": tables.DROPPED,
    }


def _run(connection: psycopg.Connection[Any], statements: Statements) -> None:
    for statement in statements:
        connection.execute(statement)


def _create(role: Role) -> sql.Composed:
    return sql.SQL(
        "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) {}) THEN "
        "CREATE ROLE {} NOLOGIN; END IF; END $$"
    ).format(role.name, sql.Identifier(role.name))


def _own(connection: Connection, schema: str, admin: Role) -> Statements:
    """Make the admin role the owner of the platform's objects, and their former owners its members."""
    queries, name, platform = Queries("roles", schema), sql.Identifier(admin.name), _platform(schema)
    found = connection.execute(queries("tables"), platform).fetchall()
    for member in sorted({owner for _, _, owner, superuser in found if not superuser and owner != admin.name}):
        yield sql.SQL("GRANT {} TO {}").format(name, sql.Identifier(member))
    yield sql.SQL("GRANT USAGE, CREATE ON SCHEMA {} TO {}").format(sql.Identifier(schema), name)
    row = connection.execute(queries("schema_owner"), platform).fetchone()
    if row is not None and not row[1] and row[0] != admin.name:
        yield sql.SQL("ALTER SCHEMA {} OWNER TO {}").format(sql.Identifier(schema), name)
    for namespace, table, owner, _ in found:
        if owner != admin.name:
            yield sql.SQL("ALTER TABLE {} OWNER TO {}").format(sql.Identifier(namespace, table), name)
    for function, owner in connection.execute(queries("functions"), platform).fetchall():
        if owner != admin.name:
            yield sql.SQL("ALTER FUNCTION {} OWNER TO {}").format(sql.SQL(function), name)


def _logs(connection: psycopg.Connection[Any], schema: str, topics: Sequence[str] | None = None) -> list[Log]:
    cursor = connection.cursor(row_factory=tuple_row)
    values = {"schema": schema, "topics": None if topics is None else list(topics)}
    return [
        Log(topic, sql.Identifier(namespace, table), sql.SQL(sequence))
        for topic, _, namespace, table, sequence in cursor.execute(Queries("roles", schema)("logs"), values)
    ]


def _grants(roles: Sequence[Role], schema: str, logs: Sequence[Log]) -> Statements:
    for role in roles:
        if role.kind != ADMIN:
            yield from grants.rights(role, schema)
    yield from _log_grants(roles, logs)
    s = sql.Identifier(schema)
    # An AFTER trigger: with a BEFORE trigger COPY would store rows one by one.
    yield sql.SQL(
        "CREATE OR REPLACE TRIGGER {trigger} AFTER INSERT ON {s}.event_buffer FOR EACH ROW "
        "WHEN (NEW.eql_partition OPERATOR(pg_catalog.<) (-1) "
        "OR NOT pg_catalog.has_function_privilege({anywhere}::pg_catalog.regprocedure, 'EXECUTE')) "
        "EXECUTE FUNCTION {s}.check_publication()"
    ).format(trigger=sql.Identifier(grants.TRIGGER), s=s, anywhere=f'"{schema}".publish_anywhere()')


def _log_grants(roles: Sequence[Role], logs: Sequence[Log]) -> Statements:
    for log in logs:
        for role in roles:
            yield from grants.rights_on_log(role, log, DEAD_LETTER_SUFFIX)


def _policies(connection: Connection, roles: Sequence[Role], schema: str) -> Statements:
    """Row security, where there are roles of one topic. The owner is not subject to it.

    A role with rights on these tables that were given by hand goes on seeing every row.
    """
    bound = [role for role in roles if role.topic is not None and role.kind != "publisher"]
    if not bound:
        return
    granted = connection.execute(
        Queries("roles", schema)("granted"), {"schema": schema, "tables": list(BY_TOPIC)}
    ).fetchall()
    free = [role.name for role in roles if role.topic is None and role.kind in ("consumer", "reader", "transfer")]
    free += [name for (name,) in granted if name not in {role.name for role in roles}]
    free += _OF_EVERYTHING
    for name in BY_TOPIC:
        table = sql.Identifier(schema, name)
        yield sql.SQL("ALTER TABLE {} ENABLE ROW LEVEL SECURITY").format(table)
        yield sql.SQL("DROP POLICY IF EXISTS {} ON {}").format(sql.Identifier(_EVERYTHING), table)
        yield sql.SQL("CREATE POLICY {} ON {} TO {} USING (true)").format(
            sql.Identifier(_EVERYTHING), table, sql.SQL(", ").join(sql.Identifier(name) for name in free)
        )
        for role in bound:
            yield sql.SQL("DROP POLICY IF EXISTS {} ON {}").format(sql.Identifier(role.name), table)
            yield sql.SQL(
                "CREATE POLICY {role} ON {table} TO {role} USING (eql_topic OPERATOR(pg_catalog.=) {topic})"
            ).format(role=sql.Identifier(role.name), table=table, topic=role.topic)


def _drop(connection: Connection, schema: str, roles: Sequence[Role], *, everything: bool) -> Statements:
    queries, platform = Queries("roles", schema), _platform(schema)
    found = [sql.Identifier(*row[:2]) for row in connection.execute(queries("tables"), platform)]
    granted = {**platform, "functions": list(grants.GRANTED_FUNCTIONS)}
    functions = [sql.SQL(name) for name, _ in connection.execute(queries("functions"), granted)]
    sequences = [log.sequence for log in _logs(connection, schema)]
    s = sql.Identifier(schema)
    if everything:
        yield sql.SQL("DROP TRIGGER IF EXISTS {} ON {}.event_buffer").format(sql.Identifier(grants.TRIGGER), s)
    dropped = [role.name for role in roles if role.topic is not None] + ([_EVERYTHING] if everything else [])
    for table in (sql.Identifier(schema, each) for each in BY_TOPIC):
        for policy in dropped:
            yield sql.SQL("DROP POLICY IF EXISTS {} ON {}").format(sql.Identifier(policy), table)
        if everything:
            yield sql.SQL("ALTER TABLE {} DISABLE ROW LEVEL SECURITY").format(table)
    for role in roles:
        name = sql.Identifier(role.name)
        yield sql.SQL("DELETE FROM {}.access_role WHERE eql_role OPERATOR(pg_catalog.=) {}").format(s, role.name)
        if role.kind == ADMIN:
            yield sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(name)
        else:
            for table in found:
                yield sql.SQL("REVOKE ALL ON TABLE {} FROM {}").format(table, name)
            for sequence in (*sequences, sql.Identifier(schema, "event_buffer_eql_id_seq")):
                yield sql.SQL("REVOKE ALL ON SEQUENCE {} FROM {}").format(sequence, name)
            for function in functions:
                yield sql.SQL("REVOKE ALL ON FUNCTION {} FROM {}").format(function, name)
        yield sql.SQL("REVOKE ALL ON SCHEMA {} FROM {}").format(s, name)
        yield sql.SQL("DROP ROLE {}").format(name)
