"""Merging small blocks of a log into larger ones, a window of ids at a time, in the caller's transaction.

Ids, times and contents of events stay, so a reader that goes on after an offset finds the same events after it. One
statement replaces the blocks of a window: every snapshot has each event once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.storage import log_form
from eventsql_orchestration.storage.exchanging import Exchange
from eventsql_orchestration.storage.log_form import ROOM
from eventsql_orchestration.storage.segments import Segment, segment_name

DAMAGED: Final = (psycopg.IntegrityError, psycopg.DataError, psycopg.errors.DataCorrupted)
"""Errors of the server for a block that is not whole."""

WINDOW_IDS: Final = log_form.MOST_IDS
"""The ids of a window: as many as one block can have."""

LEAST_BLOCKS: Final = 4
"""Blocks are merged if each block of `FULL_BYTES` takes the place of at least this number of blocks."""

FULL_BYTES: Final = 1 << 20
"""The bytes of a full block."""


class Window(NamedTuple):
    """The blocks up to the id `upto` that may be merged: their number and events, and their partitions.

    `upto` is None if the log has no further blocks.
    """

    upto: int | None
    blocks: int
    events: int
    partitions: list[int]


class _Small(NamedTuple):
    """The small blocks of a partition: their number, events and stored bytes, and the largest block's bytes and id."""

    partition: int
    blocks: int
    events: int
    bytes: int
    most: int
    largest: int


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


def _are_small(blocks: _Small, size: int | None) -> bool:
    """Whether blocks are small without their compression, too. `size`: the bytes of the largest block's events.

    Reading all blocks would take long: the largest block shows how much larger the events are than the stored bytes.
    """
    if size is None:
        # The largest block is damaged: the merge fails too, and tells which blocks stay as they are.
        return True
    whole = blocks.bytes * max(size, blocks.most) // blocks.most
    return blocks.blocks >= LEAST_BLOCKS * (whole // FULL_BYTES + 1)


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
        values = {
            "topic": self._topic, "after": after, "upto": upto, "ids": WINDOW_IDS, "least": LEAST_BLOCKS,
            "full": FULL_BYTES,
        }  # fmt: skip
        rows = fetch_all(connection, self._query(connection, "window"), values, prepare=False)
        found = [_Small(*own) for _, *own in rows if own[0] is not None]
        sizes = self._sizes(connection, [each.largest for each in found])
        small = [each for each in found if _are_small(each, sizes.get(each.largest))]
        blocks, events = sum(each.blocks for each in small), sum(each.events for each in small)
        return Window(rows[0][0], blocks, events, [each.partition for each in small])

    def _sizes(self, connection: Connection, ids: Sequence[int]) -> dict[int, int]:
        """The bytes of the events of blocks by their ids, without the blocks that are damaged."""
        if not ids:
            return {}
        try:
            return dict(fetch_all(connection, self._query(connection, "sizes"), {"ids": ids}, prepare=False))
        except DAMAGED:
            half = len(ids) // 2
            return {} if not half else self._sizes(connection, ids[:half]) | self._sizes(connection, ids[half:])

    def merge(self, connection: Connection, *, after: int, upto: int, partitions: list[int]) -> Merged:
        """Merge the blocks of these partitions in a window. No other transaction may change blocks meanwhile."""
        values = {"after": after, "upto": upto, "partitions": partitions}
        return Merged(*fetch_one(connection, self._query(connection, "merge"), values, prepare=False))

    def _query(self, connection: Connection, name: str) -> sql.SQL:
        # Another program may change the form between two windows.
        form = log_form.form_now(connection, self._schema, self._topic)
        return self._queries(name, block_store=log_form.store(self._topic, form, blocks=True))

    # Rewriting a segment

    def space(self, connection: Connection, segment: Segment) -> Space:
        return Space(*fetch_one(connection, self._queries("space", table=segment.table), prepare=False))

    def exchange(self, segment: Segment) -> Exchange:
        """The exchange of a segment for a copy."""
        return Exchange(self._schema, segment.log, segment.table)

    def rewrite(self, connection: Connection, source: Connection, segment: Segment) -> sql.Identifier:
        """Copy a closed segment into a new table, in the transaction of `connection`. `source` reads it."""
        new = segment_name(self._topic, segment.start).replace("_segment_", "_rewrite_")
        check = sql.SQL("(eql_id OPERATOR(pg_catalog.>=) {} AND eql_id OPERATOR(pg_catalog.<) {})")
        return self.exchange(segment).copy(
            connection, source, new, order=sql.SQL("eql_id"), check=check.format(segment.start, segment.end)
        )
