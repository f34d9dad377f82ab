"""Moving rows of the buffer to the end of a log, in the order of their buffer ids.

A row of the buffer is an event, or a block of events, or stands for a staged block. Events are moved by one statement,
and blocks by another, so a buffer with both is moved in runs of one kind. Each statement moves the first run that it
sees itself, up to the first row of another kind: rows may have been committed since the last look, and a row must not
pass an earlier row of the same publisher.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import psycopg

from eventsql_orchestration.database import Connection
from eventsql_orchestration.publishing.block_format import REFERENCE
from eventsql_orchestration.publishing.staged_blocks import StagedBlocks
from eventsql_orchestration.storage.appending import LogAppender


class Moved(NamedTuple):
    """The number of events that left the buffer, and whether the move was complete, and not ended by its time limit."""

    events: int
    whole: bool


class BufferMover:
    """Moves the rows of one topic after the other, in its callers' transactions, which hold the topics."""

    def __init__(self, schema: str) -> None:
        self._log = LogAppender(schema)
        self._blocks = StagedBlocks(schema)

    def move(
        self, connection: Connection, topic: str,
        *, low_water: int, upto: int, partitions: int, mixed: bool, most: int, after: int,
        seconds: float = float("inf"),
    ) -> Moved:  # fmt: skip
        """Move the rows with `low_water < buffer id <= upto`, at most `most` blocks by one statement.

        `partitions` is the topic's number of partitions. Without `mixed`, all rows were events at the last look: one
        statement moves them, up to the first block that was committed since. If such a block is before all events, the
        rows are moved as with `mixed`. `after` is the last id of the log. After `seconds`, no further statement begins.
        Raises as `StagedBlocks.move` and `LogAppender.move`.
        """
        bounds = {"low_water": low_water, "upto": upto}
        moved, end = 0, time.monotonic() + seconds
        if not mixed:
            moved = self._log.move(connection, topic, **bounds, partitions=partitions, after=after)
            if moved:
                return Moved(moved, whole=True)
        tried: int | None = None
        while (first := self._log.first_row(connection, topic, **bounds)) is not None:
            buffer_id, partition = first
            if buffer_id == tried:
                # A trigger or a policy that is not the platform's keeps the row there, and each further look would find
                # it again.
                raise psycopg.errors.DataException(f"row {buffer_id} of the buffer was moved, and is still there")
            if moved and time.monotonic() > end:
                return Moved(moved, whole=False)
            tried = buffer_id
            if partition >= -1:
                moved += self._log.move(connection, topic, **bounds, partitions=partitions, after=after + moved)
            elif partition != REFERENCE:
                raise psycopg.errors.DataException(f"row {buffer_id} of the buffer has the partition {partition}")
            else:
                run = self._blocks.move(
                    connection, topic, **bounds, most=most, partitions=partitions, after=after + moved
                )
                moved += run.events
                if run.upto == upto:
                    break
        return Moved(moved, whole=True)
