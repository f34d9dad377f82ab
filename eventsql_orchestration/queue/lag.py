"""The messages that wait in each queue of a database, counted up to a limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_one

COUNTED: Final = 10_000
"""The most messages of each state that are counted."""


@dataclass(frozen=True, slots=True)
class QueueLag:
    """The messages of a queue by state, at most 10,000 counted of each.

    `seconds` is the longest wait of a visible message, 0 if none is visible. `dead` messages were moved from this queue
    to the queue `dead_letters` and are still there. `for_dead_letters` says that the queue takes the dead letters of
    another queue: its messages wait for a person.
    """

    queue: str
    visible: int
    in_flight: int
    delayed: int
    blocked: int
    dead: int
    seconds: float
    for_dead_letters: bool
    dead_letters: str | None

    @property
    def depth(self) -> int:
        """All messages, without the dead letters."""
        return self.visible + self.in_flight + self.delayed + self.blocked


class QueueLagReader:
    """Reads the lag of a database's queues. Unlike with `Queue.statistics`, the time does not grow with the queue."""

    def __init__(self, database: Database) -> None:
        self._queries = Queries("queue", database.schema)

    def is_allowed(self, connection: Connection) -> bool:
        """Whether this role may read queues. Roles have no rights on queues unless they were given some."""
        return bool(fetch_one(connection, self._queries("may_read_lag"), prepare=False)[0])

    def read(self, connection: Connection) -> list[QueueLag]:
        """The lag of every queue, by name."""
        rows = fetch_all(connection, self._queries("lag"), {"limit": COUNTED}, prepare=False)
        return [QueueLag(*row) for row in rows]


def queue_lags(database: Database, *, required: bool = False) -> list[QueueLag]:
    """The lag of every queue of a database, by name; empty if the role may not read queues.

    With `required`, raises `PermissionDeniedError` instead.
    """
    reader = QueueLagReader(database)
    with database.connection() as connection:
        return reader.read(connection) if required or reader.is_allowed(connection) else []
