"""The archive: changes of closed aggregates in a table of their own, which everything reads as a part of the store.

The table inherits from `aggregate_change`, so each statement that reads changes reads archived changes too, in their
places of the global order. Appends write to the parent alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.errors import UniqueViolation

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_first, query_first
from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.validation import advised

_STREAMS: Final = 100
"""Aggregates of one transaction."""


@dataclass(frozen=True, slots=True)
class Archived:
    """How many aggregates were archived, and how many changes they have."""

    aggregates: int
    changes: int


class Archive:
    """Moves changes between the store and its archive."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("store", database.schema)

    def move(self, aggregate_type: str, aggregate_id: str) -> int:
        """See `Store.archive_stream`."""
        with self._database.transaction() as connection:
            closed, archived = self._hold(connection, aggregate_type, aggregate_id)
            if not closed:
                close = advised("store close --execute", aggregate_type, aggregate_id)
                raise ValidationError(
                    f"{aggregate_type} {aggregate_id!r} is open: only a closed aggregate is archived; `close_stream`, "
                    f"or `{close}`, closes it for ever"
                )
            return 0 if archived else self._moved(connection, "archive_changes", aggregate_type, [aggregate_id])

    def move_back(self, aggregate_type: str, aggregate_id: str) -> int:
        """See `Store.unarchive_stream`."""
        try:
            with self._database.transaction() as connection:
                self._hold(connection, aggregate_type, aggregate_id)
                return self._moved(connection, "unarchive_changes", aggregate_type, [aggregate_id])
        except DatabaseError as error:
            if not isinstance(error.__cause__, UniqueViolation):
                raise
            of = {"type": aggregate_type, "id": aggregate_id}
            other = query_first(self._database, self._queries("id_of_archived_elsewhere"), of)
            if other is None:
                raise
            raise ValidationError(
                f"{aggregate_type} {aggregate_id!r} stays in the archive, and is read there as before: one of its "
                f"changes has the id of a change of {other[0]} {other[1]!r}, and ids are unique outside of the archive"
            ) from error

    def move_closed(self, aggregate_type: str, before: datetime, limit: int) -> Archived:
        """See `Store.archive_closed`."""
        aggregates = changes = 0
        while aggregates < limit:
            with self._database.transaction() as connection:
                values = {"type": aggregate_type, "before": before, "limit": min(_STREAMS, limit - aggregates)}
                ids = [name for (name,) in fetch_all(connection, self._queries("closed"), values)]
                if not ids:
                    break
                changes += self._moved(connection, "archive_changes", aggregate_type, ids)
            aggregates += len(ids)
        return Archived(aggregates, changes)

    def _hold(self, connection: Connection, aggregate_type: str, aggregate_id: str) -> tuple[bool, bool]:
        """Lock an aggregate. Gives whether it is closed, and whether it is archived.

        The changes are read after that, so that they include the changes of an append for which the lock has waited.
        """
        row = fetch_first(connection, self._queries("hold_stream"), {"type": aggregate_type, "id": aggregate_id})
        if row is None:
            raise ValidationError(
                f"aggregate {aggregate_type} {aggregate_id!r} has no changes: there is nothing to archive"
            )
        return row[0], row[1]

    def _moved(self, connection: Connection, statement: str, aggregate_type: str, ids: list[str]) -> int:
        values = {"type": aggregate_type, "ids": ids}
        moved = connection.execute(self._queries(statement), values).rowcount
        connection.execute(self._queries("mark_archived"), {**values, "archived": statement == "archive_changes"})
        return moved
