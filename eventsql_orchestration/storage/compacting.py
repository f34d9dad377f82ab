"""Merging small blocks of a log into larger ones, a window of ids at a time, in the caller's transaction.

Ids, times and contents of events stay, so a reader that goes on after an offset finds the same events after it. One
statement replaces the blocks of a window: every snapshot has each event once.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.log_form import ROOM
from eventsql_orchestration.storage.segments import ADOPTION_CHECK, Segment, segment_name, table

WINDOW_IDS: Final = 20_000
"""The ids of a window, and the most ids of a block: `storage/sql/forms.sql` has the constraint."""


class Window(NamedTuple):
    """The blocks up to the id `upto` that may be merged: their number and events, and their partitions.

    `upto` is None if the log has no further blocks.
    """

    upto: int | None
    blocks: int
    events: int
    partitions: list[int]


class Space(NamedTuple):
    """The bytes that a segment takes with its indexes, and about how many its blocks need."""

    taken: int
    needed: int


class Merged(NamedTuple):
    """The numbers of merged blocks and of their events, and the numbers of the new blocks and of their events."""

    blocks: int
    events: int
    into: int
    kept: int


class LogCompactor:
    """Merges the blocks of one topic's log."""

    def __init__(self, schema: str, topic: str) -> None:
        self._topic = topic
        self._queries = Queries("compacting", schema, room=ROOM)
        self._schema = schema

    def newest(self, connection: Connection) -> int:
        """The last id of the log; 0 if it is empty."""
        (newest,) = fetch_one(connection, self._query(connection, "newest"), prepare=False)
        return int(newest)

    def window(self, connection: Connection, *, after: int, upto: int) -> Window:
        """The next blocks with ids in `after < id <= upto` that may be merged."""
        values = {"topic": self._topic, "after": after, "upto": upto, "ids": WINDOW_IDS}
        return Window(*fetch_one(connection, self._query(connection, "window"), values, prepare=False))

    def merge(self, connection: Connection, *, after: int, upto: int, partitions: list[int]) -> Merged:
        """Merge the blocks of these partitions in a window. No other transaction may change blocks meanwhile."""
        values = {"after": after, "upto": upto, "partitions": partitions}
        return Merged(*fetch_one(connection, self._query(connection, "merge"), values, prepare=False))

    def _query(self, connection: Connection, name: str) -> sql.SQL:
        # A remembered form may have changed: between two windows, another program may change it.
        form = log_form.form_now(connection, self._schema, self._topic)
        return self._queries(name, block_store=log_form.store(self._topic, form, blocks=True))

    def vacuum(self, connection: Connection, segment: str) -> bool:
        """Free the space of merged blocks in the table of a segment, on a connection in autocommit mode.

        If other transactions are in the way, or the session's own limits are too short, the server vacuums later: then
        this gives False.
        """
        with suppress(psycopg.errors.UndefinedTable, psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable):
            connection.execute(self._queries("vacuum", table=segment))
            return True
        return False

    # Rewriting a segment

    def space(self, connection: Connection, segment: Segment) -> Space:
        """The space of a segment."""
        return Space(*fetch_one(connection, self._queries("space", table=segment.table), prepare=False))

    def bounds(self, connection: Connection, segment: Segment) -> str | None:
        """The bounds of a segment in SQL, after `vacuum`. None where a transaction may not see all of its blocks.

        A transaction whose snapshot is older than a block would see it too early in a rewritten segment.
        """
        name = {"table": table(self._schema, segment).as_string(connection)}
        if fetch_first(connection, Queries("erasing", self._schema, room=ROOM)("may_vacuum"), name) != (True,):
            return None
        found = fetch_first(connection, self._queries("seen_by_all", table=segment.table), prepare=False)
        return str(found[1]) if found is not None and found[0] else None

    def is_published(self, connection: Connection) -> bool:
        """Whether a subscriber of a publication might get the blocks of a new table."""
        return fetch_one(connection, self._queries("is_published"), {"schema": self._schema}) == (True,)

    def probe(self, connection: Connection, segment: Segment) -> None:
        """Find out whether others let `replace` be done: raise the driver's `LockNotAvailable` if they do not."""
        log = sql.Identifier(self._schema, segment.log)
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(log))
        raise psycopg.Rollback

    def keep_writers_away(self, connection: Connection, segment: Segment) -> None:
        """Let nobody change a segment until the caller's transaction ends: the copy would not have the change."""
        connection.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(table(self._schema, segment)))

    def rewrite(self, connection: Connection, source: Connection, segment: Segment) -> sql.Identifier:
        """Copy a closed segment into a new table, in the transaction of `connection`. `source` reads it.

        The rows are frozen: each transaction sees them, whatever its snapshot.
        """
        old = table(self._schema, segment)
        new = sql.Identifier(self._schema, segment_name(self._topic, segment.start).replace("_segment_", "_rewrite_"))
        names = {"old": old, "new": new, "start": segment.start, "end": segment.end}
        connection.execute(sql.SQL("CREATE TABLE {new} (LIKE {old} INCLUDING ALL)").format(**names))
        values = {"old": old.as_string(connection), "new": new.as_string(connection)}
        for (option,) in fetch_all(connection, self._queries("options"), values):
            connection.execute(sql.SQL("ALTER TABLE {new} {option}").format(new=new, option=sql.SQL(option)))
        read = sql.SQL("COPY (SELECT * FROM {old} ORDER BY eql_id) TO STDOUT (FORMAT binary)").format(**names)
        write = sql.SQL("COPY {new} FROM STDIN (FORMAT binary, FREEZE)").format(**names)
        with source.transaction():
            source.execute("SET LOCAL statement_timeout TO 0")
            with source.cursor().copy(read) as blocks, connection.cursor().copy(write) as into:
                for piece in blocks:
                    into.write(piece)

        # With this constraint, attaching the table need not read it while others wait.
        connection.execute(
            sql.SQL(
                "ALTER TABLE {new} ADD CONSTRAINT {check} CHECK "
                "(eql_id OPERATOR(pg_catalog.>=) {start} AND eql_id OPERATOR(pg_catalog.<) {end})"
            ).format(**names, check=sql.Identifier(ADOPTION_CHECK))
        )
        connection.execute(sql.SQL("ANALYZE {new}").format(**names))
        return new

    def replace(self, connection: Connection, segment: Segment, *, new: sql.Identifier, bounds: str) -> None:
        """Let a new table take the place of a segment, in the caller's transaction. Readers of the log wait.

        `bounds` are those of the segment. Raises the driver's `LockNotAvailable` after its timeout.
        """
        names = {
            "log": sql.Identifier(self._schema, segment.log), "old": table(self._schema, segment),
            "name": sql.Identifier(segment.table), "new": new, "bounds": sql.SQL(bounds),
            "check": sql.Identifier(ADOPTION_CHECK),
        }  # fmt: skip
        for statement in (
            "ALTER TABLE {log} DETACH PARTITION {old}",
            "DROP TABLE {old}",
            "ALTER TABLE {new} RENAME TO {name}",
            "ALTER TABLE {log} ATTACH PARTITION {old} {bounds}",
            "ALTER TABLE {old} DROP CONSTRAINT {check}",
        ):
            connection.execute(sql.SQL(statement).format(**names))
