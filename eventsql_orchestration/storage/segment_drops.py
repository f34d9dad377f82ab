"""Dropping segments: the contents of a segment, the consumers that still need it, and a drop that lets readers go on.

The steps are transactions of their own, so the connection is in autocommit mode. A segment is marked, detached, looked
at once more, and then dropped, or attached again if it was written to. The mark says what the first look saw, so that
the next run ends an interrupted drop in the same way.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.segments import Segment, segment_name, segments

logger = logging.getLogger(__name__)

LOCK_SECONDS: Final = 5
"""How long a change to a log's tables waits for locks, and makes later sessions wait."""


class Span(NamedTuple):
    """The first and the newest offset of a segment, and the seconds since the first entered the log."""

    first: int
    newest: int
    seconds: float


class Newest(NamedTuple):
    """The newest event of a segment, the seconds since it entered the log, and about how many events there are."""

    offset: int
    seconds: float
    events: int


@dataclass(frozen=True, slots=True)
class _Look:
    """The first look at a segment: its ids `start <= id < end`, its form, and the offset of its newest event.

    The comment of the column `eql_id` has it as JSON. A segment that an earlier version detached has no comment.
    """

    start: int
    end: int
    blocks: bool
    newest: int


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
        last = self._last(connection, segment)
        return None if last is None else Span(row[0], last[0], row[1])

    def newest(self, connection: Connection, segment: Segment) -> Newest | None:
        """The newest event of a segment, and the planner's estimate of its events; None if it is empty."""
        last = self._last(connection, segment)
        if last is None:
            return None
        table = sql.Identifier(self._schema, segment.table).as_string(connection)
        estimate = fetch_first(connection, self._on_segment(connection, "estimate", segment), {"table": table})
        if estimate is None or estimate[0] < 0:
            # The segment was never analyzed.
            estimate = fetch_one(connection, self._on_segment(connection, "size", segment), prepare=False)
        return Newest(last[0], last[1], int(estimate[0]))

    def unpassed(self, connection: Connection, segment: Segment, *, newest: int) -> tuple[str, int] | None:
        """A consumer partition that still has to consume events of a segment, up to `newest`; None if there is none."""
        values = {"topic": self._topic, "newest": newest}
        row = fetch_first(connection, self._on_segment(connection, "unpassed", segment), values, prepare=False)
        return None if row is None else (row[0], row[1])

    def _last(self, connection: Connection, segment: Segment) -> tuple[int, float] | None:
        return fetch_first(connection, self._on_segment(connection, "last", segment), prepare=False)

    def _on_segment(self, connection: Connection, name: str, segment: Segment) -> sql.SQL:
        return self._queries.on_store(connection, name, self._topic, blocks=segment.in_blocks, table=segment.table)

    # Dropping a segment

    def drop(self, connection: Connection, segment: Segment, *, newest: int) -> bool:
        """Mark, detach and drop a segment. False, with the segment attached again, if it has an event after `newest`.

        Raises the driver's `QueryCanceled` or `LockNotAvailable` if a transaction reads the segment for too long.
        """
        look = _Look(segment.start, segment.end, segment.in_blocks, newest)
        try:
            try:
                self._mark(connection, segment, json.dumps(asdict(look)))
                self._detach(connection, segment)
            except psycopg.errors.DiskFull as error:
                # A mark and a detach write rows of the catalog. A drop only deletes some, and makes room.
                if self._drop_attached(connection, segment, newest):
                    return True
                self._unmark(connection, segment, error)
                return False
        except BaseException as error:
            self._unmark(connection, segment, error)
            raise
        return self._end(connection, segment, newest)

    def _drop_attached(self, connection: Connection, segment: Segment, newest: int) -> bool:
        """Drop a segment while readers and writers of the log wait. False if it has an event after `newest`."""
        with connection.transaction():
            # The drop locks the segment.
            self._alter(connection, segment.table, "LOCK TABLE ONLY {log} IN ACCESS EXCLUSIVE MODE", log=segment.log)
            last = self._last(connection, segment)
            if last is not None and last[0] > newest:
                return False
            self._alter(connection, segment.table, "DROP TABLE {segment}")
        return True

    def finish(self, connection: Connection, *, force: bool) -> None:
        """End the drops that earlier runs have begun. `force` drops segments that were written to as well. Raises as
        `drop`.

        A segment without the mark stays: somebody detached it to keep it.
        """
        marked = begun(connection, self._schema)
        existing = [each for each in segments(connection, self._schema, self._topic) or () if each.table in marked]
        detaching = {each.table: each for each in existing if each.detaching}
        for segment in existing:
            if segment.detaching:
                statement = "ALTER TABLE {log} DETACH PARTITION {segment} FINALIZE"
                self._alter(connection, segment.table, statement, log=segment.log, wait=self._wait)
            else:
                # The earlier run died before it detached the segment.
                self._mark(connection, segment, None)
        for table, noted in _detached(connection, self._schema, _prefix(self._topic)):
            if noted is not None:
                look = _Look(**json.loads(noted))
                form = log_form.form_now(connection, self._schema, self._topic)
                log = log_form.store(self._topic, form, blocks=look.blocks)
                self._end(connection, Segment(table, look.start, look.end, 0, False, log), look.newest, force=force)
            elif table in detaching:
                # Nobody noted what the first look saw, so attach the segment, and let this run decide anew.
                self._end(connection, detaching[table], 0, force=force)
            else:
                self._alter(connection, table, "DROP TABLE IF EXISTS {segment}")

    def _unmark(self, connection: Connection, segment: Segment, error: BaseException) -> None:
        """Remove the mark of a segment, unless its detach has begun: an operator may detach the segment to keep it.

        `error`, which ended the detach, tells whether another session's detach is under way. If this fails too, the
        next run removes the mark.
        """
        with suppress(psycopg.Error):
            existing = segments(connection, self._schema, self._topic) or ()
            detaching = any(each.table == segment.table and each.detaching for each in existing)
            if not detaching or isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState):
                self._mark(connection, segment, None)

    def _end(self, connection: Connection, segment: Segment, newest: int, *, force: bool = False) -> bool:
        """Drop a detached segment, or attach it again if it has an event after `newest`. Returns whether it is dropped.

        Nobody writes to a detached segment, so an interruption here leaves the next run the same choice.
        """
        last = None if force else self.newest(connection, segment)
        if last is None or last.offset <= newest:
            self._alter(connection, segment.table, "DROP TABLE IF EXISTS {segment}", wait=self._wait)
            return True
        bounds = f"FROM ({segment.start}) TO ({segment.end})"
        attach = f"ALTER TABLE {{log}} ATTACH PARTITION {{segment}} FOR VALUES {bounds}"
        with connection.transaction():
            # The log is locked first, as by the deletion of its topic, which then drops the segment.
            self._alter(connection, segment.table, attach, log=segment.log)
            self._mark(connection, segment, None)
        logger.warning("topic %r keeps a closed segment that was written to: its sequence was set back", self._topic)
        return False

    def _mark(self, connection: Connection, segment: Segment, noted: str | None) -> None:
        """Mark a segment to be dropped, with the first look at it; without a look, remove the mark."""
        with connection.transaction():
            for place, text in (
                ("TABLE {segment}", noted and tables.DROPPED), ("COLUMN {segment}.eql_id", noted),
            ):  # fmt: skip
                self._alter(connection, segment.table, f"COMMENT ON {place} IS {{text}}", text=text)

    def _alter(
        self, connection: Connection, table: str, statement: str,
        *, log: str = "", text: str | None = None, wait: float | None = None,
    ) -> None:  # fmt: skip
        """Change a log's tables. `wait` (seconds) bounds the statement; without it, `LOCK_SECONDS` bounds each lock."""
        names = {
            "log": sql.Identifier(self._schema, log),
            "segment": sql.Identifier(self._schema, table),
            "text": sql.Literal(text),
        }
        limit = ("lock_timeout", LOCK_SECONDS) if wait is None else ("statement_timeout", wait)
        with connection.transaction():
            connection.execute("SELECT pg_catalog.set_config(%s, %s, true)", [limit[0], f"{round(limit[1] * 1000)}ms"])
            connection.execute(sql.SQL(statement).format(**names))

    def _detach(self, connection: Connection, segment: Segment) -> None:
        """Detach a segment concurrently: readers and writers go on. It cannot run in a transaction.

        Raises `QueryCanceled` after `wait` seconds, which a timer measures.
        """
        existing = segments(connection, self._schema, self._topic) or ()
        if not any(each.log == segment.log and each.table != segment.table for each in existing):
            # The last segment of a log's former form. A query whose snapshot is older than a concurrent detach may have
            # planned with the segment, and find a table without partitions. This ends the server, up to PostgreSQL 18.4
            # at least, by a segmentation fault.
            self._alter(connection, segment.table, "ALTER TABLE {log} DETACH PARTITION {segment}", log=segment.log)
            return
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


def begun(connection: Connection, schema: str) -> list[str]:
    """The segments of all topics that retention has begun to drop: attached ones, and detached ones."""
    values = {"mark": tables.DROPPED}
    return [str(table) for (table,) in fetch_all(connection, LogQueries("segments", schema)("begun"), values)]


def is_of(table: str, topic: str) -> bool:
    """Whether a table has the name of a segment of a topic."""
    return table.startswith(_prefix(topic))


def drop_leftovers(connection: Connection, schema: str, names: Iterable[str]) -> None:
    """Drop detached segments of deleted topics, in the caller's transaction, which holds the registry.

    A topic that was registered again meanwhile may have a segment with the name of a former segment. The new segment is
    attached, so it stays.
    """
    for name in set(names).intersection(table for table, _ in _detached(connection, schema, "")):
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, name)))


def drop_orphans(connection: Connection, schema: str, prefix: str) -> None:
    """Drop the logs and detached segments that no topic has, with names that begin with `prefix`."""
    values = {"prefix": prefix}
    for table, view in fetch_all(connection, LogQueries("segments", schema)("orphans"), values):
        statement = "DROP VIEW IF EXISTS {}" if view else "DROP TABLE IF EXISTS {}"
        connection.execute(sql.SQL(statement).format(sql.Identifier(schema, table)))


def detached(connection: Connection, schema: str, topic: str) -> list[str]:
    """The tables of a topic's segments that were detached to be dropped."""
    return [table for table, _ in _detached(connection, schema, _prefix(topic))]


def _detached(connection: Connection, schema: str, names: str) -> list[tuple[str, str | None]]:
    """The marked tables whose names begin with `names`, and what the first look at each saw."""
    values = {"names": names, "mark": tables.DROPPED}
    return fetch_all(connection, LogQueries("segments", schema)("detached"), values)


def _prefix(topic: str) -> str:
    """The beginning of the names of a topic's segments."""
    return segment_name(topic, 0)[:-1]
