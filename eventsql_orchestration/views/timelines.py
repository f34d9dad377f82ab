"""Timelines: what happened to a resource, in order, for those who look at that one resource."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy
from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.rules import check_name, check_time, check_whole, encode_json


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened to a resource; `id` grows in the order in which entries were appended.

    A transaction draws its ids before it commits: see `Timelines.read`.
    """

    id: int
    resource: str
    data: dict[str, Any]
    occurred_at: datetime


@checked
class Timelines:
    """The timelines of one database; each exists as soon as something is appended to it.

    Appending takes the caller's connection, so that an event's handler appends exactly once, in the transaction that
    moves its offset.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("views", database.schema)

    def append(
        self,
        connection: Connection | sqlalchemy.Connection,
        timeline: str,
        resource: str,
        data: Mapping[str, Any],
        occurred_at: datetime,
    ) -> None:
        """Append one entry in the caller's transaction; `append_all` for many.

        Raises `ValidationError` for what cannot be stored.
        """
        self.append_all(connection, timeline, [(resource, data, occurred_at)])

    def append_all(
        self,
        connection: Connection | sqlalchemy.Connection,
        timeline: str,
        entries: Iterable[tuple[str, Mapping[str, Any], datetime]],
    ) -> int:
        """Append `(resource, data, occurred_at)` entries in their order with one statement; how many it were.

        Raises `ValidationError` for what cannot be stored; none of the entries is appended then.
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
        """The entries of a resource in the order in which they were appended; empty where there are none.

        `after` (exclusive) is the id of the entry that a reader saw last, `limit` the number to read at most. What is
        read is what is committed by then, and `after` goes past all else of a lower id for good.

        A reader that goes on with `after` therefore misses nothing of a resource that one transaction at a time appends
        to: a consumer of a partitioned topic does so where the resource is the events' key. Where several transactions
        append to one resource at once, one that commits late has entries below those that were read already, and they
        are passed over. Read such a resource whole, or have its writers take turns, by a row of their own that they
        lock first; whoever has to react to each entry once is a consumer of the events themselves, or reads a table of
        its own with `HorizonReader`, which waits for transactions that still write.
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
            return found.execute(self._queries("read_timeline"), values).fetchall()
