"""Subscriptions in the database: made at a place, moved to another one, and deleted, as are their dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.held_by_handlers import check_not_held
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.errors import SubscriptionNotFoundError, ValidationError
from eventsql_orchestration.store.change import StoreCheckpoint
from eventsql_orchestration.store.order import Filters, GlobalOrder
from eventsql_orchestration.validation import shown

Start: TypeAlias = Literal["earliest", "latest"] | StoreCheckpoint
"""Where a new subscription begins."""


def register(database: Database, name: str, start: Start, only: Filters) -> None:
    """Make the row of a subscription, at a place, unless it is there.

    Raises `DatabaseError` for a checkpoint of another server or era, and `ValidationError` in the subscription's own
    handler.
    """
    _check_start(start)
    with database.transaction() as connection:
        check_not_held(connection, database.schema, "subscription", name)
        place = _place(database, connection, start)
        values = {"name": name, **place.parameters(), **only}
        connection.execute(Queries("subscriptions", database.schema)("register"), values)


def move(database: Database, name: str, start: Start) -> StoreCheckpoint:
    """See `Store.replay`."""
    _check_start(start)
    with database.transaction() as connection:
        check_not_held(connection, database.schema, "subscription", name)
        queries = Queries("subscriptions", database.schema)
        # Its place may move until then, beyond the changes that are there now.
        if fetch_first(connection, queries("await"), {"name": name}) is None:
            raise not_found(name)
        place = _place(database, connection, start)
        values = {"name": name, **place.parameters()}
        connection.execute(queries("move"), values)
        # The handler gets these changes again; a letter would hand them to it once more.
        connection.execute(queries("drop_letters_behind"), values)
    return place


def delete(database: Database, name: str) -> None:
    """See `Store.unsubscribe`."""
    with database.connection() as connection:
        check_not_held(connection, database.schema, "subscription", name)
        deleted = connection.execute(Queries("subscriptions", database.schema)("unregister"), {"name": name}).rowcount
    if not deleted:
        raise not_found(name)


def dismiss(database: Database, name: str, ids: Sequence[int] | None) -> int:
    """Delete dead letters of a subscription by their ids, or all; gives their number.

    Raises `SubscriptionNotFoundError`, and `ValidationError` in the subscription's own handler.
    """
    queries = Queries("subscriptions", database.schema)
    with database.connection() as connection:
        check_not_held(connection, database.schema, "subscription", name)
        deleted = connection.execute(queries("dismiss_letters"), {"name": name, "ids": ids}, prepare=False).rowcount
        if not deleted and fetch_first(connection, queries("exists"), {"name": name}) is None:
            raise not_found(name)
        return deleted


def not_found(name: str) -> SubscriptionNotFoundError:
    """The error for a subscription that does not exist."""
    return SubscriptionNotFoundError(f"subscription {name!r} does not exist: see `eventsql store subscriptions`")


def _check_start(start: object) -> None:
    if not isinstance(start, StoreCheckpoint) and start not in ("earliest", "latest"):
        raise ValidationError(f"start must be 'earliest', 'latest' or a StoreCheckpoint, not {shown(start)}")


def _place(database: Database, connection: Connection, start: Start) -> StoreCheckpoint:
    order = GlobalOrder(database)
    if start == "latest":
        return order.newest(connection)
    return order.home.place(connection, start if isinstance(start, StoreCheckpoint) else None)
