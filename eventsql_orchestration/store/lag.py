"""How far the subscriptions of a store are behind, and why."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.store.change import StoreCheckpoint
from eventsql_orchestration.store.home import StoreHome

COUNTED: Final = 100_000
"""How many waiting changes are counted at most."""


@dataclass(frozen=True, slots=True)
class OldestWriter:
    """The transaction that readers of the store wait for: its description, its age, and what its commit waits for.

    `seconds` is None if this login may not see it: a transaction of another role, without `pg_read_all_stats`.
    """

    description: str
    seconds: float | None
    waits_for_standby: bool


@dataclass(frozen=True, slots=True)
class SubscriptionLag:
    """How far a subscription is behind.

    `waiting` changes can be handled now (counted up to 100,000). `seconds` is the age of the oldest change that it has
    not handled, held back or not; 0 if there is none. `held_back` changes are committed and wait for
    `held_back_by`, the oldest transaction that may still write. `attempts`, `failure` and `retry_in` tell of the next
    change, if it failed. `dead_letters` were given up.
    """

    name: str
    checkpoint: StoreCheckpoint
    handled: int
    waiting: int
    held_back: int
    seconds: float
    held_back_by: OldestWriter | None
    attempts: int
    failure: str | None
    retry_in: float | None
    dead_letters: int
    handled_at: datetime | None

    @property
    def why(self) -> str | None:
        """The causes of the lag in words; None if changes only wait for their turn."""
        causes = []
        if self.attempts:
            causes.append(f"failed {self.attempts} {'time' if self.attempts == 1 else 'times'}: {self.failure}")
        if self.held_back_by is not None:
            writer = self.held_back_by
            age = "" if writer.seconds is None else f", open for {writer.seconds:.0f} s"
            standby = ", and its commit waits for a standby" if writer.waits_for_standby else ""
            causes.append(f"held back by {writer.description}{age}{standby}")
        return "; ".join(causes) or None


class SubscriptionLagReader:
    """Reads the lag of a store's subscriptions on connections of its database."""

    def __init__(self, database: Database) -> None:
        self._home = StoreHome(database)
        self._queries = Queries("subscriptions", database.schema)

    def is_allowed(self, connection: Connection) -> bool:
        """Whether this role may read the lag. Roles have no rights on a store unless they were given some."""
        return bool(fetch_one(connection, self._queries("may_read_lag"), prepare=False)[0])

    def read(self, connection: Connection, *, counted: int = COUNTED) -> list[SubscriptionLag]:
        """The lag of every subscription, by name. `counted` is how many waiting changes are counted at most.

        Raises `RestoredStoreError` for a store with subscriptions that was restored from another server.
        """
        rows = fetch_all(connection, self._queries("lag"), {"limit": counted}, prepare=False)
        if not rows:
            return []
        era = self._home.era(connection)
        writer = fetch_first(connection, self._queries("oldest_writer"), prepare=False)
        oldest = None if writer is None else OldestWriter(_described(*writer[2:]), *writer[:2])
        return [
            SubscriptionLag(
                name, StoreCheckpoint(era, int(transaction), position), handled, waiting, held_back,
                max(0.0, seconds or 0.0), oldest if held_back else None, attempts, failure, retry_in, dead, handled_at,
            )
            for (
                name, transaction, position, handled, attempts, failure, retry_in, handled_at, waiting, held_back,
                seconds, dead,
            ) in rows
        ]  # fmt: skip


def _described(pid: int | None, application: str, database: str, prepared: str | None) -> str:
    known = f"process {pid} ({application or 'no name'})" if prepared is None else f"prepared transaction {prepared!r}"
    return f"{known} in database {database!r}"
