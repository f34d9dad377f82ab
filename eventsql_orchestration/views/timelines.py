"""Timelines: what happened to a resource, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.database.binary import decode_jsonb, encode_bigint
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.validation import MAX_BIGINT, check_name, check_time, check_whole, encode_json
from eventsql_orchestration.views.definitions import Timeline
from eventsql_orchestration.views.view_table import NO_TENANT, ViewTable, check_tenant


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened to a resource. `id` grows in the order in which entries were appended.

    A transaction draws ids before it commits: see `TimelineView.read`.
    """

    id: int
    resource: str
    data: dict[str, Any]
    occurred_at: datetime


@checked
class TimelineView:
    """A declared timeline.

    Appending takes the caller's connection: an event's handler appends exactly once, in the transaction that moves its
    offset. Each `tenant` has entries of its own.
    """

    def __init__(self, database: Database, definition: Timeline) -> None:
        self.definition = definition
        self._schema = database.schema
        self._table = ViewTable(database, definition)

    def append(
        self, connection: CallersConnection, entries: Iterable[tuple[str, Mapping[str, Any], datetime]],
        *, tenant: str | Sequence[str] = NO_TENANT,
    ) -> int:  # fmt: skip
        """Append `(resource, data, occurred_at)` entries in order, in the caller's transaction.

        `tenant` is the tenant of all entries, or a list with the tenant of each.

        Gives the number stored: entries older than the timeline's retention are left out. Raises `ValidationError`,
        with no entry appended, for values that cannot be stored, and `ViewNotFoundError` for an undeclared timeline.
        """
        rows = [
            (
                check_name("resource", resource),
                encode_json(f"data of resource {resource!r}", data),
                check_time("occurred_at", occurred_at),
            )
            for resource, data, occurred_at in entries
        ]
        columns = ("resources", "data", "occurred_at")
        return self._table.store(connection, "append_to_timeline", columns, rows, tenant)

    def read(
        self, resource: str, *, tenant: str = NO_TENANT, after: int = 0, limit: int | None = None
    ) -> list[TimelineEntry]:
        """The entries of a resource in the order in which they were appended; empty without entries.

        `after` (exclusive) is the id of the last entry that a reader has seen, `limit` the most entries to read. Reads
        committed entries; a reader that goes on with `after` never sees an entry with a smaller id that commits later.

        Such a reader misses nothing if one transaction at a time appends to the resource. A consumer of a partitioned
        topic does that if the resource is the events' key. If several transactions append to one resource at once, the
        reader may miss entries that commit late. Then read the resource as a whole, or let its writers lock a row of
        their own first. To react to each entry once, consume the events themselves, or read your own table with
        `SnapshotReader`, which waits for open transactions.
        """
        bounds = {"after": encode_bigint(check_whole("after", after, least=0))}
        return self._read("read_timeline", resource, tenant, limit, bounds)

    def read_newest(
        self, resource: str, *, tenant: str = NO_TENANT, before: int | None = None, limit: int = 100
    ) -> list[TimelineEntry]:
        """The newest entries of a resource, at most `limit`, the entry that was appended last comes first.

        `before` is the id of the last entry of the page before. Reads committed entries.
        """
        last = MAX_BIGINT if before is None else check_whole("before", before, least=0)
        return self._read("read_timeline_back", resource, tenant, limit, {"before": encode_bigint(last)})

    def _read(
        self, statement: str, resource: str, tenant: str, limit: int | None, bounds: Mapping[str, bytes]
    ) -> list[TimelineEntry]:
        values = {
            "tenant": check_tenant(tenant).encode(),
            "resource": check_name("resource", resource).encode(),
            "limit": None if limit is None else encode_bigint(check_whole("limit", limit, least=1)),
            **bounds,
        }
        rows = self._table.fetch_values(_reading(self._schema, self.definition.table, statement), values)
        return [TimelineEntry(id_, name, decode_jsonb(data), at) for id_, name, data, at in rows]


@lru_cache(maxsize=256)
def _reading(schema: str, table: str, statement: str) -> SingleStatement:
    """The statement of a lookup. Handlers open their timeline anew for each batch."""
    return SingleStatement("timeline", Queries("views", schema)(statement, table=table), briefly=True)
