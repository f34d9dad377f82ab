"""Following logs: the lines that transactions commit from now on, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.single_statement import fetch_raw
from eventsql_orchestration.errors import ViewConflictError
from eventsql_orchestration.views.log_values import LogLine
from eventsql_orchestration.views.view_table import ViewTable

LOOKBACK: Final = 10_000
"""The number of ids before the newest line that may belong to transactions that were open when the following began."""


@dataclass(slots=True)
class _Pending:
    """Ids up to `newest` are decided once all of these `writers` have ended."""

    newest: int
    writers: set[str]


@checked
class LogFollower:
    """Gives the matching lines that are committed after the follower was made, each once.

    Lines draw their ids before their transactions commit. So each poll reads again from the first id that an open
    transaction may still use, and gives the lines of a transaction after its commit. If a transaction was already open
    when the follower was made, the follower gives only the transaction's lines among the last 10,000 ids of the logs.

    `LogsView.follow` makes one. It belongs to one thread.
    """

    def __init__(self, table: ViewTable, query: bytes, values: Mapping[str, Any]) -> None:
        self._table = table
        self._query = query
        self._values = values
        self._pending: _Pending | None = None
        self._given: set[int] = set()
        with table.reading() as connection:
            newest, self._relation = self._newest(connection)
            self._settled = max(0, newest - LOOKBACK) if table.writers(connection) else newest
        self.poll()

    def poll(self) -> list[LogLine]:
        """The lines that were committed since the last call, in the order of their ids; empty if there are none.

        Raises database errors, `ViewNotFoundError` if the logs were dropped, and `ViewConflictError` if they were
        rebuilt.
        """
        with self._table.reading() as connection:
            # In this order: a transaction that drew ids up to `newest` is among `writers`, or it has ended, and the
            # snapshot of the query has its lines.
            newest, relation = self._newest(connection)
            if relation != self._relation:
                raise ViewConflictError("the logs were rebuilt, and their lines have other ids: make another follower")
            writers = self._table.writers(connection)
            # If a rebuild ends at this moment, this finds nothing, and the next call raises.
            values = {**self._values, "after_id": self._settled, "relation": self._relation}
            found = fetch_raw(connection, self._query, values)
        lines = [line for line in map(LogLine, found) if line.id not in self._given]
        self._given.update(line.id for line in lines)
        self._settle(newest, writers)
        return lines

    def _settle(self, newest: int, writers: set[str]) -> None:
        """Move the id from which the next poll reads."""
        pending = self._pending
        if not writers:
            self._settled, self._pending = newest, None
        elif pending is None:
            self._pending = _Pending(newest, writers)
        else:
            # A prepared transaction gets another name, `-1/…`, when its server starts anew.
            pending.writers |= {writer for writer in writers if writer.startswith("-1/")}
            if pending.writers.isdisjoint(writers):
                self._settled, self._pending = pending.newest, _Pending(newest, writers)
        self._given = {given for given in self._given if given > self._settled}

    def _newest(self, connection: Connection) -> tuple[int, int]:
        """The newest id, and the table that has it."""
        values = {"relation": self._table.name.as_string(connection)}
        newest, relation = fetch_one(connection, self._table.query("newest_line"), values, prepare=False)
        return newest, relation
