"""Roles of PostgreSQL with the least rights that a publisher, the transfer, a consumer or a reader needs.

The admin role owns the platform's tables; the other roles have rights on them. All are groups without a login: a
service's own login becomes a member of the roles that it needs. The table `access_role` lists the roles: a later topic
or migration gives each role its rights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import grants, role_statements
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.database import Database
from eventsql_orchestration.database.grants import ADMIN, DEFAULT_PREFIX, KINDS, TOPIC_KINDS, Role, role_name
from eventsql_orchestration.database.installation import REGISTRY_LOCK
from eventsql_orchestration.database.migrations.holding import hold_publishers
from eventsql_orchestration.database.role_statements import RoleState, Statements, ddl
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import RegistryError, TopicNotFoundError, ValidationError
from eventsql_orchestration.model import check_schema_name

LOCK_SECONDS: Final = 10
"""How long a change of roles waits for each table. Later statements wait behind it."""

_LOCK: Final = ddl("SELECT pg_catalog.pg_advisory_xact_lock({})", sql.Literal(REGISTRY_LOCK))


class Roles:
    """Makes, lists and drops the roles of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, *, prefix: str = DEFAULT_PREFIX, topics: Sequence[str] = ()) -> list[Role]:
        """Make the roles of all topics, and the roles of each of `topics`; returns all roles of the installation.

        A role that exists stays, and gets the rights that it lacks. The admin role becomes the owner of the platform's
        tables, and their former owner becomes a member of it. Raises `TopicNotFoundError`; `ValidationError` if a role
        of the same name is not a group; `PermissionDeniedError` if the current role may not make roles; `CaptureError`
        if the triggers of a captured table could not run as the admin role; `DatabaseBusyError` if other transactions
        keep the tables.
        """
        with self._database.transaction() as connection:
            connection.execute(_LOCK)
            made = self._wanted(connection, prefix, topics)
            role_statements.run(connection, self._statements(connection, made, hold=partial(self._hold, connection)))
            role_statements.check_captures(connection, self._database.schema, made[0].name)
            return [state.role for state in role_statements.states(connection, self._database.schema)]

    def sql(self, *, prefix: str = DEFAULT_PREFIX, topics: Sequence[str] = ()) -> str:
        """The statements of `create`, in one transaction, to be applied by hand. Raises the same errors."""
        with self._database.transaction() as connection:
            made = self._wanted(connection, prefix, topics)
            statements = [each.as_string(connection) for each in (_LOCK, *self._statements(connection, made))]
        return "".join(f"{statement};\n" for statement in ("BEGIN", *statements, "COMMIT"))

    def states(self) -> list[RoleState]:
        """All roles of this installation, with their members."""
        with self._database.connection() as connection:
            return role_statements.states(connection, self._database.schema)

    def drop(self, *, topics: Sequence[str] = ()) -> list[Role]:
        """Drop the roles of `topics`, or all of this installation; returns the dropped roles.

        The admin role's tables become the current role's. A role that has rights in another database of the server
        stays there. Raises `RegistryError` if one of the roles has rights that were granted by hand, `CaptureError` if
        the triggers of a captured table could not run as the current role, and `DatabaseBusyError` as `create`.
        """
        schema = self._database.schema
        with self._database.transaction() as connection:
            connection.execute(_LOCK)
            known = role_statements.states(connection, schema)
            removed = [state for state in known if not topics or state.role.topic in topics]
            owned = [] if topics else role_statements.owned_tables(connection, schema)
            self._hold(connection, [name for _, name, *_ in owned])
            try:
                role_statements.run(
                    connection, role_statements.removal(connection, schema, removed, everything=not topics)
                )
                if removed and not topics:
                    role_statements.check_captures(connection, schema, None)
            except psycopg.errors.DependentObjectsStillExist as error:
                raise RegistryError(
                    "a role has rights or tables beside those of the platform "
                    f"({error.diag.message_detail or error}): revoke these rights first"
                ) from error
        return [state.role for state in removed]

    def creators(self) -> list[str | None]:
        """The roles that may create objects in the platform's schema, beside its owners. None stands for PUBLIC."""
        with self._database.connection() as connection:
            return [name for (name,) in role_statements.rows_of(connection, self._database.schema, "creators")]

    def deprived_admin(self) -> tuple[str, str, str] | None:
        """The admin role, the owner of the platform's tables and the prefix of the roles, if the owner is another role.

        A database that was restored without its owners has such tables.
        """
        with self._database.connection() as connection:
            found = role_statements.rows_of(connection, self._database.schema, "deprived_admin")
        return found[0] if found else None

    def open_functions(self) -> list[str]:
        """The functions that run with their owner's rights, and that every role may execute, against their definition.

        A database that was restored without its rights has them. Each is named with its schema, quoted for SQL.
        """
        with self._database.connection() as connection:
            return [name for (name,) in role_statements.rows_of(connection, self._database.schema, "open_functions")]

    def foreign_functions(self) -> list[tuple[str, str, str]]:
        """The functions in the platform's schema that another role owns, with this role and the owner of the tables.

        Each is named with its schema and arguments, quoted for SQL.
        """
        with self._database.connection() as connection:
            return role_statements.rows_of(connection, self._database.schema, "foreign_functions")

    def _hold(self, connection: Connection, moved: Sequence[str] = ()) -> None:
        """Keep handlers, publishers and receivers away: they use the tables in another order than a change of roles.

        The tables in `moved` get another owner: a subscription, for example, uses several of them.
        """
        wait_at_most(connection, LOCK_SECONDS)
        # A role that may not lock the tables may not change them either: a later statement says so.
        with suppress(psycopg.errors.InsufficientPrivilege):
            hold_publishers(connection, self._database.schema, [*grants.BY_TOPIC, *moved])

    def _wanted(self, connection: Connection, prefix: str, topics: Sequence[str]) -> list[Role]:
        """The roles to make, and the roles that exist. The first is the admin role."""
        check_schema_name(prefix)
        schema = self._database.schema
        known = {state.role for state in role_statements.states(connection, schema)}
        if existing := {role.name for role in known if role.kind == ADMIN} - {role_name(prefix, ADMIN)}:
            raise ValidationError(
                f"this installation has roles with another prefix ({', '.join(existing)}): use it, or drop them"
            )
        for topic in topics:
            if not role_statements.logs(connection, schema, [topic]):
                raise TopicNotFoundError(
                    f"topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )

        wanted = [Role(role_name(prefix, kind), kind) for kind in KINDS]
        wanted += [Role(role_name(prefix, kind, topic), kind, topic) for topic in topics for kind in TOPIC_KINDS]
        wanted += sorted(known - set(wanted), key=lambda role: role.name)
        # A long prefix leaves no room for the kind in the name of a role of one topic.
        named = Counter(role.name for role in dict.fromkeys(wanted))
        if bad := [name for name, roles in named.items() if len(name.encode()) > grants.MOST_NAME or roles > 1]:
            raise ValidationError(
                f"role {bad[0]} would have more than {grants.MOST_NAME} bytes or several kinds: choose a shorter prefix"
            )
        if unusable := role_statements.rows_of(connection, schema, "unusable", names=[role.name for role in wanted]):
            names = ", ".join(name for (name,) in unusable)
            raise ValidationError(
                f"role {names} exists and may log in, or may do more than a group should: choose another --prefix"
            )
        return wanted

    def _statements(
        self, connection: Connection, roles: Sequence[Role],
        *, hold: Callable[[Sequence[str]], None] = lambda _moved: None,
    ) -> Statements:  # fmt: skip
        """Calls `hold` before statements that keep others from a table. GRANTs do not, and there may be many."""
        schema, (admin, *others) = self._database.schema, roles
        yield ddl("SET LOCAL lock_timeout TO {}", sql.Literal(f"{LOCK_SECONDS}s"))
        for role in roles:
            yield ddl(
                "DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) {}) "
                "THEN CREATE ROLE {} NOLOGIN; END IF; END $$",
                sql.Literal(role.name), role.name,
            )  # fmt: skip
        owned = role_statements.owned_tables(connection, schema)
        if moved := [name for _, name, owner, _ in owned if owner != admin.name]:
            hold(moved)
        yield from role_statements.ownership(connection, schema, admin.name)
        for role in others:
            yield ddl("GRANT USAGE ON SCHEMA {} TO {}", schema, role.name)

        # The owner makes the grants, so that they have one grantor.
        yield ddl("SET LOCAL ROLE {}", admin.name)
        for role in roles:
            yield ddl(
                "INSERT INTO {}.access_role (eql_role, eql_kind, eql_topic) VALUES ({}, {}, {}) ON CONFLICT DO NOTHING",
                schema, sql.Literal(role.name), sql.Literal(role.kind), sql.Literal(role.topic),
            )  # fmt: skip
        yield from role_statements.all_grants(roles, schema, role_statements.logs(connection, schema))
        hold([])
        yield role_statements.guard(schema)
        yield from role_statements.policies(connection, roles, schema)
        yield ddl("RESET ROLE")
