"""Timelines: what happened to a resource, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.validation import check_name, check_time, check_whole, encode_json


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened to a resource. `id` grows in the order in which entries were appended.

    A transaction draws ids before it commits: see `Timelines.read`.
    """

    id: int
    resource: str
    data: dict[str, Any]
    occurred_at: datetime


@checked
class Timelines:
    """The timelines of one database. A timeline exists as soon as something is appended to it.

    Appending takes the caller's connection: an event's handler appends exactly once, in the transaction that moves its
    offset.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("views", database.schema)

    def append(
        self, connection: CallersConnection, timeline: str, resource: str, data: Mapping[str, Any],
        occurred_at: datetime,
    ) -> None:  # fmt: skip
        """Append one entry in the caller's transaction. Raises `ValidationError` for values that cannot be stored."""
        self.append_all(connection, timeline, [(resource, data, occurred_at)])

    def append_all(
        self, connection: CallersConnection, timeline: str, entries: Iterable[tuple[str, Mapping[str, Any], datetime]]
    ) -> int:
        """Append `(resource, data, occurred_at)` entries in order, with one statement. Gives their number.

        Raises `ValidationError`, with no entry appended, for values that cannot be stored.
        """
        check_name("timeline", timeline)
        checked = [
            (
                check_name("resource", resource),
                encode_json(f"data of resource {resource!r}", data),
                check_time("occurred_at", occurred_at),
            )
            for resource, data, occurred_at in entries
        ]
        if not checked:
            return 0
        resources, data_of, times = (list(column) for column in zip(*checked, strict=True))
        values = {"timeline": timeline, "resources": resources, "data": data_of, "occurred_at": times}
        with self._database.callers(connection) as joined:
            joined.execute(self._queries("append_to_timeline"), values)
        return len(checked)

    def read(self, timeline: str, resource: str, *, after: int = 0, limit: int | None = None) -> list[TimelineEntry]:
        """The entries of a resource in the order in which they were appended; empty without entries.

        `after` (exclusive) is the id of the last entry that a reader has seen, `limit` the most entries to read. Reads
        committed entries; a reader that goes on with `after` never sees an entry with a smaller id that commits later.

        Such a reader misses nothing if one transaction at a time appends to the resource. A consumer of a partitioned
        topic does that if the resource is the events' key. If several transactions append to one resource at once, the
        reader may miss entries that commit late. Then read the resource as a whole, or let its writers lock a row of
        their own first. To react to each entry once, consume the events themselves, or read your own table with
        `SnapshotReader`, which waits for open transactions.
        """
        values = {
            "timeline": check_name("timeline", timeline),
            "resource": check_name("resource", resource),
            "after": check_whole("after", after, least=0),
            "limit": None if limit is None else check_whole("limit", limit, least=1),
        }
        with (
            self._database.connection() as connection,
            connection.cursor(row_factory=class_row(TimelineEntry)) as found,
        ):
            return found.execute(self._queries("read_timeline"), values, prepare=False).fetchall()
