"""Leftovers: rows and tables of topics and consumers that do not exist any more.

Triggers of the database delete them with the topic or the consumer. This module clears rows that are older than the
triggers, and rows of transactions that were under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.rows import fetch_all, query_all
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.storage import segment_drops
from eventsql_orchestration.topics.catalog import lock_registry
from eventsql_orchestration.topics.side_consumers import MARK

BATCH: Final = 1_000
"""Rows that one statement deletes, in a few milliseconds."""

MOST_BATCHES: Final = 100
"""Statements on one name's rows in one run; the next run goes on."""

_TABLES: Final = ("consumer", "topic_layout", "shard_fence", "redriven_dead_letter", "event_buffer_lock")
"""Tables with a topic's name and without events."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Rows of a table for a topic or a consumer that does not exist; in `topic_layout`, also for a former topic."""

    table: str
    topic: str
    consumer: str | None = None

    def __str__(self) -> str:
        of = f"topic {self.topic}" if self.consumer is None else f"consumer {self.consumer} of topic {self.topic}"
        return f"{self.table} has rows of a former {of}"


@dataclass(frozen=True, slots=True)
class Lacking:
    """A consumer that has `partitions` partitions of its topic and needs `needed`: it misses events of the others."""

    consumer: str
    partitions: int
    needed: int


class Leftovers:
    """Finds and clears the leftovers of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("leftovers", database.schema)

    def find(self) -> list[Leftover]:
        """The rows that `clear` would delete."""
        with self._database.connection() as connection:
            rows = [(table, fetch_all(connection, self._queries("topics", table=table))) for table in _TABLES]
            rows.append(("topic_layout", fetch_all(connection, self._queries("layouts"))))
            rows.append(("consumer_claim", fetch_all(connection, self._queries("consumers"))))
        return [Leftover(table, *row) for table, found in rows for row in found]

    def clear(self) -> int:
        """Delete the leftover rows, a batch at a time; returns their number.

        Raises `PermissionDeniedError` if row security binds this role: rows of hidden topics would count as leftovers.
        """
        if query_all(self._database, self._queries("bound")) != [(False,)]:
            raise PermissionDeniedError("row security may hide topics and consumers from this role")
        return sum(map(self._delete, self.find())) + self._clear_layouts()

    def _clear_layouts(self) -> int:
        """Delete layouts of topics that were deleted and made anew under the same name."""
        with self._database.transaction() as connection:
            if not fetch_all(connection, self._queries("layouts")):
                return 0
            lock_registry(connection)
            cleared = 0
            for (topic,) in fetch_all(connection, self._queries("layouts")):
                cleared += connection.execute(self._queries("delete_layouts"), {"topic": topic}).rowcount
                connection.execute(self._queries("let_on"), {"topic": topic})
            return cleared

    def _delete(self, leftover: Leftover) -> int:
        query = self._queries("delete" if leftover.consumer is None else "delete_claims", table=leftover.table)
        values = {"topic": leftover.topic, "consumer": leftover.consumer, "batch": BATCH}
        deleted = 0
        with self._database.connection() as connection:
            for _ in range(MOST_BATCHES):
                batch = connection.execute(query, values).rowcount
                deleted += batch
                if batch < BATCH:
                    break
        return deleted

    def begun_drops(self) -> list[str]:
        """The segments that retention is dropping, or was dropping when it was interrupted."""
        with self._database.connection() as connection:
            return segment_drops.begun(connection, self._database.schema)

    def unregistered(self) -> list[str]:
        """The missing topics of events in the buffer."""
        return [topic for (topic,) in query_all(self._database, self._queries("topics", table="event_buffer"))]

    def lacking(self, topic: str) -> list[Lacking]:
        """The partitioned consumers of a topic that have fewer partitions than they need."""
        values = {"topic": topic, "window": MARK}
        return [Lacking(*row) for row in query_all(self._database, self._queries("lacking"), values)]
