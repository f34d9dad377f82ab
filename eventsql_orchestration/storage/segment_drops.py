"""Dropping segments: the contents of a segment, the consumers that still need it, and a drop that lets readers go on.

The steps are transactions of their own, so the connection is in autocommit mode. A segment is marked, detached, looked
at once more, and then dropped. An interrupted drop leaves a marked segment, which the next run drops.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.segments import Segment, segment_name, segments

LOCK_SECONDS: Final = 5
"""How long a change to a log's tables waits for locks, and makes later sessions wait."""


class Span(NamedTuple):
    """The first and the newest offset of a segment, and the seconds since the first entered the log."""

    first: int
    newest: int
    seconds: float


class Newest(NamedTuple):
    """The newest event of a segment, when it entered the log, and about how many events the segment has."""

    offset: int
    at: datetime
    events: int


class SegmentDrops:
    """Drops segments of one topic's log. `wait` is how many seconds a step waits for transactions that read it."""

    def __init__(self, schema: str, topic: str, *, wait: float) -> None:
        self._schema = schema
        self._topic = topic
        self._wait = wait
        self._queries = LogQueries("segments", schema)

    # Contents of a segment

    def span(self, connection: Connection, segment: Segment) -> Span | None:
        """The offsets of a segment and its age; None if it is empty."""
        row = fetch_first(connection, self._on_segment(connection, "first", segment), prepare=False)
        if row is None:
            return None
        last = fetch_first(connection, self._on_segment(connection, "last", segment), prepare=False)
        return None if last is None else Span(row[0], last[0], row[1])

    def newest(self, connection: Connection, segment: Segment) -> Newest | None:
        """The newest event of a segment, and the planner's estimate of its events; None if it is empty."""
        last = fetch_first(connection, self._on_segment(connection, "last", segment), prepare=False)
        if last is None:
            return None
        table = sql.Identifier(self._schema, segment.table).as_string(connection)
        estimate = fetch_first(connection, self._on_segment(connection, "estimate", segment), {"table": table})
        if estimate is None or estimate[0] < 0:
            # The segment was never analyzed.
            estimate = fetch_one(connection, self._on_segment(connection, "size", segment), prepare=False)
        return Newest(last[0], last[1], int(estimate[0]))

    def unpassed(self, connection: Connection, segment: Segment, *, newest: int) -> tuple[str, int] | None:
        """A consumer and its partition that has to consume events of a segment, up to `newest`; None without one."""
        values = {"topic": self._topic, "newest": newest}
        row = fetch_first(connection, self._on_segment(connection, "unpassed", segment), values, prepare=False)
        return None if row is None else (row[0], row[1])

    def _on_segment(self, connection: Connection, name: str, segment: Segment) -> sql.SQL:
        return self._queries.on_store(connection, name, self._topic, blocks=segment.in_blocks, table=segment.table)

    # Dropping one

    def drop(self, connection: Connection, segment: Segment, *, newest: int) -> bool:
        """Mark, detach and drop a segment. False, with the segment attached again, if it has an event after `newest`.

        Raises the driver's `QueryCanceled` or `LockNotAvailable` if a transaction reads the segment for too long.
        """
        self._alter(connection, segment.table, "COMMENT ON TABLE {segment} IS {mark}", wait=self._wait)
        self._detach(connection, segment)
        # Nobody writes to it any more.
        last = self.newest(connection, segment)
        if last is not None and last.offset > newest:
            self.attach(connection, segment)
            return False
        self._alter(connection, segment.table, "DROP TABLE IF EXISTS {segment}", wait=self._wait)
        return True

    def attach(self, connection: Connection, segment: Segment) -> None:
        """Attach a detached segment again, without its mark. Raises the driver's `LockNotAvailable`."""
        # Unmarked first: no run drops a detached table without the mark, should this be interrupted.
        self._alter(connection, segment.table, "COMMENT ON TABLE {segment} IS NULL")
        bounds = f"FROM ({segment.start}) TO ({segment.end})"
        attach = f"ALTER TABLE {{log}} ATTACH PARTITION {{segment}} FOR VALUES {bounds}"
        self._alter(connection, segment.table, attach, log=segment.log)

    def unmark(self, connection: Connection, segment: Segment) -> None:
        """Remove the mark of a segment that is still attached: an operator may detach the segment to keep it."""
        existing = segments(connection, self._schema, self._topic) or ()
        if any(each.table == segment.table and not each.detaching for each in existing):
            self._alter(connection, segment.table, "COMMENT ON TABLE {segment} IS NULL")

    def finish_detach(self, connection: Connection, segment: Segment) -> None:
        """End the detaching of a segment that an earlier run began. Raises as `drop`."""
        statement = "ALTER TABLE {log} DETACH PARTITION {segment} FINALIZE"
        self._alter(connection, segment.table, statement, log=segment.log, wait=self._wait)

    def drop_detached(self, connection: Connection) -> None:
        """Drop the topic's segments that an earlier run detached. A detached segment without the mark stays."""
        for table in detached(connection, self._schema, self._topic):
            self._alter(connection, table, "DROP TABLE IF EXISTS {segment}")

    def _alter(
        self, connection: Connection, table: str, statement: str, *, log: str = "", wait: float | None = None
    ) -> None:
        """Change a log's tables. `wait` (seconds) bounds the statement; without it, `LOCK_SECONDS` bounds each lock."""
        names = {
            "log": sql.Identifier(self._schema, log),
            "segment": sql.Identifier(self._schema, table),
            "mark": sql.Literal(tables.DROPPED),
        }
        limit = ("lock_timeout", LOCK_SECONDS) if wait is None else ("statement_timeout", wait)
        with connection.transaction():
            connection.execute("SELECT pg_catalog.set_config(%s, %s, true)", [limit[0], f"{round(limit[1] * 1000)}ms"])
            connection.execute(sql.SQL(statement).format(**names))

    def _detach(self, connection: Connection, segment: Segment) -> None:
        """Detach a segment concurrently: readers and writers go on. It cannot run in a transaction.

        Raises `QueryCanceled` after `wait` seconds, which a timer measures.
        """
        log, table = sql.Identifier(self._schema, segment.log), sql.Identifier(self._schema, segment.table)
        statement = sql.SQL("ALTER TABLE {} DETACH PARTITION {} CONCURRENTLY").format(log, table)

        def give_up() -> None:
            # If the server cannot be reached, the statement ends with its connection.
            with suppress(psycopg.Error):
                connection.cancel_safe()

        over = threading.Timer(self._wait, give_up)
        over.name, over.daemon = "eventsql-retention", True
        over.start()
        try:
            connection.execute(statement)
        finally:
            over.cancel()
            # A cancellation under way must not hit the next statement.
            over.join()


def try_retain(connection: Connection, schema: str, topic: str) -> bool:
    """Keep other programs from retaining a topic until the caller's transaction ends; False if one does so now."""
    locked = fetch_first(connection, LogQueries("segments", schema)("try_retain"), {"topic": f"{schema}.{topic}"})
    return locked is not None and bool(locked[0])


def drop_leftovers(connection: Connection, schema: str, *, kept: Sequence[str]) -> None:
    """Drop the marked segments of all topics except `kept`, in the caller's transaction."""
    prefixes = tuple(map(_prefix, kept))
    for table in _detached(connection, schema, ""):
        if not table.startswith(prefixes):
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, table)))


def drop_orphans(connection: Connection, schema: str, prefix: str) -> None:
    """Drop the logs and detached segments that no topic has, with names that begin with `prefix`."""
    values = {"schema": schema, "prefix": prefix}
    for table, view in fetch_all(connection, LogQueries("segments", schema)("orphans"), values):
        statement = "DROP VIEW IF EXISTS {}" if view else "DROP TABLE IF EXISTS {}"
        connection.execute(sql.SQL(statement).format(sql.Identifier(schema, table)))


def detached(connection: Connection, schema: str, topic: str) -> list[str]:
    """The tables of a topic's segments that were detached to be dropped."""
    return _detached(connection, schema, _prefix(topic))


def _detached(connection: Connection, schema: str, names: str) -> list[str]:
    """The marked tables whose names begin with `names`."""
    values = {"schema": schema, "names": names, "mark": tables.DROPPED}
    return [str(table) for (table,) in fetch_all(connection, LogQueries("segments", schema)("detached"), values)]


def _prefix(topic: str) -> str:
    """The beginning of the names of a topic's segments."""
    return segment_name(topic, 0)[:-1]
