"""Erasing the events of keys: their values and metadata go, their keys, times and offsets stay.

An erased event has an empty value, and metadata that begin with `model.ERASED`. Its row or block is updated in place,
so no reader, offset or count notices. Every method changes one range in the caller's transaction, and finds nothing to
change the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from psycopg import sql

from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.model import Event
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage import exchanging, log_form
from eventsql_orchestration.storage.log_form import FORMS
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.storage.segment_drops import detached
from eventsql_orchestration.storage.segments import segments

FAILURE: Final = "erased, because it may have quoted an erased event"
"""This text replaces the text of a failure."""

VACUUM_SECONDS: Final = 10.0
"""Seconds that the vacuum after an erasure waits for transactions that see former rows."""

_PLATFORM: Final = ("event_buffer", "spark_staged_event", "consumer", "consumer_delivery")
"""The tables of all topics with copies of events, or with texts that quote events."""


class LogEraser:
    """Erases the events of some keys of one topic, at one time."""

    def __init__(self, schema: str, topic: str, keys: Collection[str], mark: str, *, kept: Sequence[str]) -> None:
        """`mark` begins the metadata of erased events. `kept` are the names of metadata that stay."""
        self._schema = schema
        self._topic = topic
        self._queries = LogQueries("erasing", schema)
        self._values: dict[str, object] = {
            "topic": topic, "keys": sorted(keys), "kept": list(kept), "mark": mark, "copies": False
        }  # fmt: skip

    def only_copies(self) -> None:
        """From now on, look only for events that were redriven."""
        self._values["copies"] = True

    # The log

    def ends(self, connection: Connection, *, after: int) -> tuple[int, int] | None:
        """The first id after `after` in the table of the log, and the last one; None without events."""
        first, last = fetch_one(
            connection, self._queries.on(connection, "ends", self._topic), {"after": after}, prepare=False
        )
        return None if first is None else (first, last)

    def count(self, connection: Connection, *, after: int, upto: int) -> Counter[str]:
        """The events in `after < id <= upto` that are not erased, by key."""
        return self._in_log(connection, "count", after=after, upto=upto)

    def erase(self, connection: Connection, *, after: int, upto: int) -> Counter[str]:
        """Erase them; gives their numbers by key."""
        return self._in_log(connection, "erase", after=after, upto=upto)

    def _in_log(self, connection: Connection, name: str, *, after: int, upto: int) -> Counter[str]:
        form, found = log_form.form(connection, self._schema, self._topic), Counter[str]()
        for blocks in (False, True) if form.both else (form.blocks,):
            query = self._queries.on_store(connection, name, self._topic, blocks=blocks)
            found += self._run(connection, query, after=after, upto=upto)
        return found

    def _run(self, connection: Connection, query: sql.SQL, *, after: int, upto: int) -> Counter[str]:
        # Planned for its values: a generic plan would look into all segments.
        rows = fetch_all(connection, query, {**self._values, "after": after, "upto": upto}, prepare=False)
        return Counter(dict(rows))

    # The buffer

    def buffered_end(self, connection: Connection, *, after: int, limit: int) -> int | None:
        """The buffer id of the last of the next `limit` events of the topic after `after`; None without events."""
        values = {**self._values, "after": after, "limit": limit}
        (end,) = fetch_one(connection, self._queries("buffered_end"), values, prepare=False)
        return None if end is None else int(end)

    def count_buffered(self, connection: Connection, *, after: int, upto: int) -> Counter[str]:
        """As `count`, for buffer ids."""
        return self._in_buffer(connection, "count_buffered", after=after, upto=upto)

    def erase_buffered(self, connection: Connection, *, after: int, upto: int) -> Counter[str]:
        """As `erase`, for buffer ids."""
        return self._in_buffer(connection, "erase_buffered", after=after, upto=upto)

    def _in_buffer(self, connection: Connection, name: str, *, after: int, upto: int) -> Counter[str]:
        """Single events, and the events of blocks."""
        rows, blocks = self._queries(name), self._queries(name, form=FORMS["blocks"])
        single = self._run(connection, rows, after=after, upto=upto)
        return single + self._run(connection, blocks, after=after, upto=upto)

    # After the events

    def failures(self, connection: Connection) -> list[tuple[str, int, int]]:
        """The consumer partitions whose failure may quote an event: name, partition, offset of the event."""
        return fetch_all(connection, self._queries("failing"), {"topic": self._topic, "failure": FAILURE})

    def replace_failure(self, connection: Connection, consumer: str, partition: int, event: int) -> None:
        """Replace the text of a failure of an erased event."""
        values = {
            "topic": self._topic, "consumer": consumer, "partition": partition, "event": event, "failure": FAILURE,
        }  # fmt: skip
        connection.execute(self._queries("replace_failure"), values)

    def failed_deliveries(self, connection: Connection) -> list[int]:
        """The offsets of events with a failed delivery whose text may quote the event, in order."""
        values = {"topic": self._topic, "failure": FAILURE}
        return [event for (event,) in fetch_all(connection, self._queries("failed_deliveries"), values)]

    def replace_failures_of_deliveries(self, connection: Connection, events: Sequence[int]) -> None:
        """Replace the texts of the failed deliveries of these events."""
        values = {"topic": self._topic, "events": list(events), "failure": FAILURE}
        connection.execute(self._queries("replace_failures_of_deliveries"), values)

    def leaving(self, connection: Connection) -> list[str]:
        """The segments that retention is dropping: readers do not see them, and erasing does not reach them."""
        existing = segments(connection, self._schema, self._topic) or []
        return [each.table for each in existing if each.detaching] + detached(connection, self._schema, self._topic)

    def changed_tables(self, connection: Connection, ranges: Sequence[tuple[int, int]]) -> list[str]:
        """The tables of the log that may have events of `ranges`, each `after < id <= upto`, or statistics of them."""
        existing = segments(connection, self._schema, self._topic)
        whole = log_form.tables(connection, self._schema, self._topic)
        if existing is None:
            return whole
        changed = [
            each.table for each in existing if any(each.start <= upto and after < each.end for after, upto in ranges)
        ]  # fmt: skip
        values = {"schema": self._schema, "tables": whole}
        return changed + [table for (table,) in fetch_all(connection, self._queries("analyzed"), values)]


def vacuum(connection: Connection, schema: str, tables: Iterable[str]) -> bool:
    """Remove the former versions of changed rows from tables of logs and from the tables of the platform.

    The planner's statistics have samples of the values, so they are made anew. Waits `VACUUM_SECONDS` for open
    transactions that see these versions. False if some may stay: a transaction still sees them, or a table was not
    vacuumed (see `exchanging.vacuum`). The connection is in autocommit mode.
    """
    changed = (*tables, *_PLATFORM)
    own = [table for table in changed if exchanging.may_vacuum(connection, schema, table)]
    seen_by_none = bool(own) and _await_snapshots(connection, LogQueries("erasing", schema))
    vacuumed = [exchanging.vacuum(connection, schema, table, analyze=True) for table in own]
    return seen_by_none and all(vacuumed) and len(own) == len(changed)


def _await_snapshots(connection: Connection, queries: LogQueries) -> bool:
    """Wait until no open transaction sees rows as they were before this call. False if one stays open too long."""
    retry = Backoff(VACUUM_SECONDS)
    (changed,) = fetch_one(connection, queries("changed"))
    while fetch_one(connection, queries("is_seen"), {"changed": changed}) == (True,):
        if not retry.lasts():
            return False
    return True


def erased_meanwhile(connection: Connection, schema: str, event: Event) -> Event | None:
    """The event as it is now, if it was erased after the caller read it; None if it was not.

    An erasure that comes later waits for the caller's transaction, and finds the events that this transaction writes.
    """
    copy_events(connection, schema, event.topic)
    now = LogReader(schema).read(connection, event.topic, after=event.id - 1, upto=event.id)
    return now[0] if now and now[0].erased else None


def copy_events(connection: Connection, schema: str, topic: str) -> None:
    """Let erasures wait for the end of the caller's transaction, which copies events of a topic or its dead letters.

    An event that is read after this call is already erased, or a later erasure finds its copy.
    """
    connection.execute(LogQueries("erasing", schema)("copy_events"), {"topic": f"{schema}.{topic}"})


def await_copies(connection: Connection, schema: str, topic: str) -> None:
    """Wait for the transactions that called `copy_events`. Raises the driver's `LockNotAvailable` after its timeout."""
    connection.execute(LogQueries("erasing", schema)("await_copies"), {"topic": f"{schema}.{topic}"})


def try_change(connection: Connection, schema: str, topic: str) -> bool:
    """Keep other programs from changing events of a topic until the transaction ends. False if one changes them now."""
    row = fetch_one(connection, LogQueries("erasing", schema)("try_change"), {"topic": f"{schema}.{topic}"})
    return bool(row[0])
