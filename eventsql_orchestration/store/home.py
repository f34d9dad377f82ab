"""The server whose transaction ids order the changes of a store, and moving a store to another server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.queries import statement
from eventsql_orchestration.database.rows import fetch_first, fetch_one
from eventsql_orchestration.errors import DatabaseError, RestoredStoreError
from eventsql_orchestration.store.change import StoreCheckpoint

_ADOPT: Final = "run `eventsql store adopt`, which gives its changes places of this server"


@dataclass(frozen=True, slots=True)
class Adopted:
    """Result of `adopt`: how many changes got new places, and how many subscriptions were moved with them."""

    changes: int
    subscriptions: int


@checked
class StoreHome:
    """Knows whether the changes of a store are ordered by the transactions of this server.

    Each server counts its own transactions, so neither the order nor a checkpoint of a restored dump means anything
    here. A physical copy, such as a promoted standby, continues the count.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("store", database.schema)
        self._may_ask: bool | None = None

    def era(self, connection: Connection) -> str:
        """The era of this store's checkpoints. Raises `RestoredStoreError` for a dump that is not adopted."""
        _, era, foreign = self._read(connection)
        if foreign:
            raise RestoredStoreError(f"the event store in {self._database} was restored from another server: {_ADOPT}")
        return era

    def place(self, connection: Connection, checkpoint: StoreCheckpoint | None) -> StoreCheckpoint:
        """A checkpoint to read on from; None is before the first change.

        Raises `DatabaseError` for a checkpoint of another era, for a checkpoint of a transaction that this server has
        not had yet, and for a restored dump that is not adopted.
        """
        era = self.era(connection)
        if checkpoint is None:
            return StoreCheckpoint(era, 0, 0)
        if checkpoint.era != era:
            raise DatabaseError(
                f"checkpoint {checkpoint} is of another server, or of the time before `eventsql store adopt`: find the "
                "last change that took effect, and go on from the place that `checkpoint_of` gives for it"
            )
        # Ask each time: the next connection may lead to a promoted standby, which lacks the newest transactions.
        reached = sql.SQL(statement("snapshot_reader", "reached"))
        if fetch_one(connection, reached, checkpoint.parameters(), prepare=False) != (True,):
            raise DatabaseError(
                f"this server has not reached checkpoint {checkpoint}: it lost changes in a failover or a restore, "
                "and new changes would be left out; go on from the place that `checkpoint_of` gives for the last "
                "change that took effect and is still there"
            )
        return checkpoint

    def adopt(self) -> Adopted:
        """See `Store.adopt`."""
        with self._database.transaction() as connection:
            connection.execute(self._queries("hold_home"))
            server, _, foreign = self._read(connection)
            if not foreign:
                return Adopted(0, 0)
            connection.execute(self._queries("hold_changes"))
            subscriptions = connection.execute(self._queries("adopt_subscriptions")).rowcount
            changes = connection.execute(self._queries("adopt_changes")).rowcount
            for statement in ("drop_rebuilds", "forget_places", "forget_transactions"):
                connection.execute(self._queries(statement))
            connection.execute(self._queries("settle"), {"server": server})
            return Adopted(changes, subscriptions)

    def _read(self, connection: Connection) -> tuple[str | None, str, bool]:
        """Returns the identity of this server, the era, and whether the changes have the order of another server.

        The identity is None if the role may not ask for it.
        """
        if self._may_ask is None:
            self._may_ask = bool(fetch_one(connection, self._queries("may_ask_server"), prepare=False)[0])
        row = fetch_first(connection, self._queries("home"), prepare=False)
        if row is None:
            raise DatabaseError(f"table store_home of {self._database} is empty: restore its row from a backup")
        home, era, ahead = row
        server = str(fetch_one(connection, self._queries("server"), prepare=False)[0]) if self._may_ask else None
        return server, str(era), bool(ahead) or (home is not None and server is not None and home != server)
