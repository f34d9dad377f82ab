"""The installation that a connection finds in a schema: tables, revision, and the current role's rights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from eventsql_orchestration.database import tables
from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.grants import ADMIN, KINDS, TRIGGER
from eventsql_orchestration.database.queries import Queries
from eventsql_orchestration.database.rows import fetch_first, fetch_one

REGISTRY_LOCK: Final = 0x6576_656E_7472_6567
"""The advisory lock that every change of the registry, of roles and of the schema takes. The registry changes topics,
their logs and consumers' offsets. Without the lock, two transactions that grant rights on one table would hinder each
other."""


@dataclass(frozen=True, kw_only=True)
class CurrentRole:
    """A role of the server. `prefix` begins the names of the installation's roles; None if it has no roles.

    `kinds` are the kinds of those roles for all topics whose rights it has.
    """

    name: str
    prefix: str | None
    may_transfer: bool
    kinds: frozenset[str]

    @classmethod
    def of(cls, connection: Connection, schema: str) -> Self:
        """The role of a connection, with its rights in a schema, which need not exist."""
        admin = f"_{ADMIN}"
        values = {"schema": schema, "trigger": TRIGGER, "kinds": list(KINDS), "admin": f"{admin}$"}
        name, owner, may_transfer, kinds = fetch_one(connection, Queries("sessions", schema)("role"), values)
        prefix = owner.removesuffix(admin) if owner is not None and owner.endswith(admin) else None
        return cls(name=name, prefix=prefix, may_transfer=bool(may_transfer), kinds=frozenset(kinds))


def revision_of(connection: Connection, schema: str) -> str | None:
    """The revision of a schema, or None if it was never migrated."""
    if not has_table(connection, schema, tables.VERSION_TABLE):
        return None
    row = fetch_first(connection, Queries("sessions", schema)("revision"))
    return None if row is None else str(row[0])


def has_tables(connection: Connection, schema: str) -> bool:
    """Whether a schema has tables of the platform, also those of EventSQL's Java library."""
    return has_table(connection, schema, "topic")


def has_table(connection: Connection, schema: str, name: str) -> bool:
    return fetch_one(connection, Queries("sessions", schema)("has_table"), {"table": f'"{schema}"."{name}"'}) == (True,)
