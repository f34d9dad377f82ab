"""The steps of a rebuild of a projection: new tables beside the live tables, and the swap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import uuid4

import psycopg
from psycopg import sql

from eventsql_orchestration.consuming.handlers import call_handler
from eventsql_orchestration.database import Connection, Queries, replaced_tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.errors import ProjectionError
from eventsql_orchestration.store.change import RecordedChange, StoreCheckpoint
from eventsql_orchestration.store.projection_definition import CheckedProjection, Fill, Filling
from eventsql_orchestration.store.projection_tables import ProjectionTables
from eventsql_orchestration.store.store import Store

LEDGER: Final = "eventsql_filled_"
"""The tables that note which parts of a fill were written begin with it."""


class ProjectionRebuild:
    """Rebuilds projections of one store, a transaction for each step."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queries = Queries("projections", store.database.schema)
        self._subscriptions = Queries("subscriptions", store.database.schema)
        self._tables = ProjectionTables(store.database.schema)

    def begin(self, each: CheckedProjection) -> None:
        """Make the new tables, unless a rebuild has already applied changes to them."""
        values = {"name": each.name, "shadow": each.shadow}
        with self._store.database.transaction() as connection:
            connection.execute(self._queries("forget_elsewhere"), values)
            if not connection.execute(self._queries("begin"), values).rowcount and self.lock(connection, each)[1]:
                return
            shadow = sql.Identifier(each.shadow)
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(shadow))
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(shadow))
            with self._tables.in_schema(connection, each.shadow):
                each.projection.create(connection)
            self._tables.check(connection, each, each.shadow)

    def fill(self, each: CheckedProjection, fill: Fill, on_progress: Callable[[int], object]) -> None:
        """Fill new tables in bulk, if no change was applied to them."""
        ledger = f"{LEDGER}{uuid4().hex}"
        with self._store.database.transaction() as connection:
            if self.lock(connection, each)[1]:
                return
            upto = self._store.order.newest(connection)
            replaced_tables.make_ledger(connection, sql.Identifier(each.shadow, ledger))

        fill(Filling(each.projection, self._store.database, each.shadow, ledger, upto))
        with self._store.database.transaction() as connection:
            self.lock(connection, each)
            if self._ledgers(connection, each) != [ledger]:
                raise ProjectionError(
                    f"another process has begun to fill projection {each.name!r} again, or has given the rebuild up: "
                    "this rebuild has swapped nothing"
                )
            # The DROP waits for parts that are being written. Later parts fail.
            connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(each.shadow, ledger)))
            (applied,) = fetch_one(connection, self._queries("count_upto"), {**upto.parameters(), **each.only})
            self._advance(connection, each, upto, applied)
        on_progress(applied)

    def _ledgers(self, connection: Connection, each: CheckedProjection) -> list[str]:
        """The ledgers of fills that have not ended."""
        values = {"in_schema": each.shadow, "ledger": LEDGER}
        return [name for (name,) in fetch_all(connection, self._queries("ledgers"), values)]

    def _advance(self, connection: Connection, each: CheckedProjection, place: StoreCheckpoint, applied: int) -> None:
        values = {"name": each.name, **place.parameters(), "applied": applied}
        connection.execute(self._queries("advance"), values)

    def apply_batch(self, each: CheckedProjection, batch: int) -> tuple[int, bool]:
        """The number of changes that were applied so far, and whether there may be more below the horizon."""
        with self._store.database.transaction() as connection:
            after, applied = self._lock_filled(connection, each)
            changes = self._store.order.read(connection, after, each.only, batch)
            self._apply_to_shadow(connection, each, changes)
            return applied + len(changes), len(changes) == batch

    def swap(self, each: CheckedProjection, batch: int) -> int:
        """Apply the changes since the last batch, and put the new tables in place. Gives the number of all changes."""
        with self._store.database.transaction() as connection:
            after, applied = self._lock_filled(connection, each)
            subscription = {"name": each.subscription}
            by_subscription = fetch_first(connection, self._subscriptions("await"), subscription) is not None
            # The rebuilt tables hold the changes of the dead letters. Delete the letters before the tables are locked:
            # a redrive has locked its letter, and then writes the tables.
            connection.execute(self._subscriptions("dismiss_letters"), {**subscription, "ids": None})
            existing = self._tables.existing(connection, each, each.schema)
            live = [table for table in each.tables if table in existing]
            if live:
                names = sql.SQL(", ").join(sql.Identifier(each.schema, table) for table in live)
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names))

            # Nobody writes the live tables now. A subscription has applied the changes below the horizon. A save
            # applies its changes before it commits, so the live tables have all committed changes, even beyond the
            # horizon.
            while True:
                changes = self._store.order.read(
                    connection, after, each.only, batch, beyond_horizon=not by_subscription
                )
                self._apply_to_shadow(connection, each, changes)
                applied += len(changes)
                if changes and changes[-1].checkpoint is not None:
                    after = changes[-1].checkpoint
                if len(changes) < batch:
                    break

            if by_subscription:
                connection.execute(self._subscriptions("move"), {**after.parameters(), **subscription})
            self._replace(connection, each, live)
            connection.execute(self._queries("finish"), {"name": each.name})
        return applied

    def _replace(self, connection: Connection, each: CheckedProjection, live: Sequence[str]) -> None:
        """Put the rebuilt tables in the place of the live tables."""
        for table in live:
            self._keep_rights(connection, each, table)
        try:
            if live:
                # Drop them in one statement, because foreign keys may lead from table to table.
                names = sql.SQL(", ").join(sql.Identifier(each.schema, table) for table in live)
                connection.execute(sql.SQL("DROP TABLE {}").format(names))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise ProjectionError(
                f"a table of projection {each.name!r} has views or foreign keys on it, which the swap would lose: "
                f"drop these, rebuild again (it goes on where it is), and create them again ({_detail(error)})"
            ) from error

        for table in each.tables:
            connection.execute(
                sql.SQL("ALTER TABLE {} SET SCHEMA {}").format(
                    sql.Identifier(each.shadow, table), sql.Identifier(each.schema)
                )
            )
        try:
            # CASCADE would drop the partitions, types and functions that are left, which belong to the rebuilt tables.
            connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(each.shadow)))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise ProjectionError(
                f"projection {each.name!r} makes more than its tables, and the swap would lose it: let `create` make "
                f"only what `tables` names, give the rebuild up, and rebuild again ({_detail(error)})"
            ) from error

    def _keep_rights(self, connection: Connection, each: CheckedProjection, table: str) -> None:
        """Grant the rights on a live table on the rebuilt table, too."""
        live, new = (each.schema, table), (each.shadow, table)
        lost = replaced_tables.lost(connection, live, new)
        if lost:
            raise ProjectionError(
                f"the swap would lose {', '.join(lost)} of table {table!r} of projection {each.name!r}: let `create` "
                "make them, too, give the rebuild up, and rebuild again"
            )
        replaced_tables.grant_as_on(connection, sql.Identifier(*live), sql.Identifier(*new))

    def lock(self, connection: Connection, each: CheckedProjection) -> tuple[StoreCheckpoint, int]:
        """Lock a rebuild; gives its place, and the number of changes that it has applied."""
        start = self._store.order.home.place(connection, None)
        row = fetch_first(connection, self._queries("lock"), {"name": each.name})
        if row is None:
            raise ProjectionError(
                f"another process is rebuilding projection {each.name!r}, or has finished its rebuild: this rebuild "
                "has changed nothing"
            )
        transaction, position, applied = row
        return StoreCheckpoint(start.era, int(transaction), position), applied

    def _lock_filled(self, connection: Connection, each: CheckedProjection) -> tuple[StoreCheckpoint, int]:
        """As `lock`. Raises `ProjectionError` while the tables are filled in bulk."""
        locked = self.lock(connection, each)
        if self._ledgers(connection, each):
            raise ProjectionError(
                f"another process fills projection {each.name!r} in bulk: wait until it has ended, or begin a new "
                "rebuild, which stops it"
            )
        return locked

    def _apply_to_shadow(
        self, connection: Connection, each: CheckedProjection, changes: Sequence[RecordedChange]
    ) -> None:
        if not changes:
            return
        with self._tables.in_schema(connection, each.shadow):
            for change in changes:
                call_handler(connection, change, each.projection.apply)
        place = changes[-1].checkpoint
        assert place is not None, "a change that was read in the global order has a place"
        self._advance(connection, each, place, len(changes))


def _detail(error: psycopg.Error) -> str:
    return (error.diag.message_detail or str(error)).replace("\n", "; ")
