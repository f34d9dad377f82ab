"""The changes that subscriptions have given up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.database.single_statement import fetch_raw
from eventsql_orchestration.store.change import RecordedChange


@dataclass(frozen=True, slots=True)
class StoreDeadLetter:
    """A change that a subscription has given up after `attempts` attempts; `failure` is the last failure."""

    id: int
    subscription: str
    aggregate_type: str
    aggregate_id: str
    version: int
    attempts: int
    failure: str
    created_at: datetime


def letters(database: Database, name: str) -> list[StoreDeadLetter]:
    """The changes that a subscription has given up, in that order."""
    rows = query_all(database, Queries("subscriptions", database.schema)("letters"), {"name": name})
    return [StoreDeadLetter(*row) for row in rows]


def change_of(letter: StoreDeadLetter, connection: Connection, schema: str) -> RecordedChange:
    """The change that a letter stands for."""
    values = {
        "type": letter.aggregate_type, "id": letter.aggregate_id,
        "after_version": letter.version - 1, "upto_version": letter.version,
    }  # fmt: skip
    (row,) = fetch_raw(connection, Queries("store", schema)("load"), values)
    return RecordedChange(letter.aggregate_type, letter.aggregate_id, row)
