"""Blocks on their way: publishing staged blocks, and moving published blocks into the log of their topic.

Events that are published together do not pass through the buffer one by one. A row of the buffer with the partition
`REFERENCE` has a block of them, as the arrays of a log's blocks (`publishing/block_format.py`). Spark's tasks stage
their blocks before they are published: such a block is in `spark_staged_event`, and the row of the buffer stands for
it. The row's buffer id gives the block its place in the order. At that place the transfer moves the arrays into the
log, and deletes the row. The server takes the events of a log in rows out of the arrays.

A transfer that knows no blocks, such as that of EventSQL's Java library, cannot skip a block: a trigger refuses to
delete the block's row.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import psycopg

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.publishing.block_format import REFERENCE
from eventsql_orchestration.publishing.copy_format import EncodedEvent
from eventsql_orchestration.storage.appending import LogAppender, MovedBlocks

LEAST_BY_BLOCKS: Final = 10_000
"""The least number of events in a publication that is published as blocks. The events of a smaller publication go to
the buffer: the transfer gathers the events of many publications into large blocks."""

MOST_COPIED: Final = 16 * 1024 * 1024
"""The most bytes of blocks whose events go to the buffer instead."""

MOST_MOVED: Final = 16 * 1024 * 1024
"""The most bytes of values that one statement moves, unless a single block has more."""

ORPHANED_AFTER_HOURS: Final = 24
"""How long a staged block waits for its publication before a sweep deletes it."""

Erased: TypeAlias = Callable[[EncodedEvent], EncodedEvent]
"""Takes an event. Returns its erased form if it has to be erased, and the same object otherwise."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A staged block: its attempt and position, its topic, its number of events, its size in bytes."""

    attempt: uuid.UUID
    position: int
    topic: str
    events: int
    size: int


class StagedBlocks:
    """Publishes, moves and deletes the blocks of attempts, in its callers' transactions."""

    def __init__(self, schema: str) -> None:
        self._queries = Queries("spark", schema)
        self._blocks = Queries("blocks", schema)
        self._appender = LogAppender(schema)

    def find(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> list[StagedBlock]:
        """The unpublished blocks of attempts, by attempt and position."""
        rows = connection.execute(self._queries("staged_blocks"), {"attempts": list(attempts)})
        return [StagedBlock(*row) for row in rows]

    def publish(self, connection: Connection, attempts: Sequence[uuid.UUID], staged: Sequence[StagedBlock]) -> None:
        """Publish the blocks of attempts, in that order; `staged` are the blocks that `find` has given.

        Delete the attempts afterwards: their events may have been copied. Raises `DatabaseError` if a block is missing.
        """
        if not staged:
            return

        events, size = sum(block.events for block in staged), sum(block.size for block in staged)
        if events < LEAST_BY_BLOCKS and size < MOST_COPIED:
            written = connection.execute(self._blocks("to_buffer"), {"attempts": list(attempts)}).rowcount
            complete = written == events
        else:
            values = {"attempts": list(attempts), "reference": REFERENCE}
            complete = connection.execute(self._blocks("place"), values).rowcount == len(staged)
        if not complete:
            raise missing_blocks()

    def move(
        self, connection: Connection, topic: str,
        *, low_water: int, upto: int, most: int, partitions: int, after: int,
    ) -> MovedBlocks:  # fmt: skip
        """Move the next blocks with `low_water < buffer id <= upto` to the end of the log, at most `most`.

        The blocks end at the first event. `partitions` are those of the topic, which the caller's transaction holds.
        `after` is the last id of the log. Raises `psycopg.errors.DataException` if a block is missing or damaged, or of
        a partition that the topic lacks; otherwise as `LogAppender.move`.
        """
        moved = self._appender.move_blocks(
            connection, topic, low_water=low_water, upto=upto, most=most, size=MOST_MOVED, partitions=partitions,
            reference=REFERENCE, after=after,
        )  # fmt: skip
        if not moved.whole:
            # Its SQLSTATE makes the transfer halve the batch, down to the block.
            raise psycopg.errors.DataException(
                f"{moved.rows} blocks up to row {moved.upto} of the buffer should have {moved.events} events: "
                f"{moved.rows - moved.blocks} blocks are missing or damaged, and {moved.entered} events were found"
            )
        return moved

    def of_topic(self, connection: Connection, topic: str) -> list[tuple[uuid.UUID, int]]:
        """The staged blocks of a topic, published or not: attempt and position."""
        return fetch_all(connection, self._blocks("of_topic"), {"topic": topic})

    def count(self, connection: Connection, attempt: uuid.UUID, position: int, erased: Erased) -> Counter[str]:
        """How many events of each key `erased` would change in a block; none if the block is gone."""
        return self._change(connection, "content", attempt, position, erased)[1]

    def erase(self, connection: Connection, attempt: uuid.UUID, position: int, erased: Erased) -> Counter[str]:
        """Replace the events of a block by the result of `erased`. Returns the number of changed events by key.

        The transfer of the block waits for the end of the transaction.
        """
        content, found = self._change(connection, "hold", attempt, position, erased)
        if found:
            values = {"attempt": attempt, "position": position, **content}
            connection.execute(self._blocks("replace"), values, binary=True)
        return found

    def _change(
        self, connection: Connection, read: str, attempt: uuid.UUID, position: int, erased: Erased
    ) -> tuple[dict[str, object], Counter[str]]:
        found: Counter[str] = Counter()

        def change(event: EncodedEvent) -> EncodedEvent:
            changed = erased(event)
            if changed is not event and event.key is not None:
                found[event.key.decode()] += 1
            return changed

        values = {"attempt": attempt, "position": position}
        row = connection.execute(self._blocks(read), values, binary=True).fetchone()
        if row is None:
            return {}, found

        partition, keys, contents, metadata = row
        none = [None] * len(contents)
        if not len(contents) == len(keys or none) == len(metadata or none):
            raise DatabaseError(
                f"block {position} of attempt {attempt} has {len(contents)} values, {len(keys or none)} keys and "
                f"{len(metadata or none)} metadata"
            )
        changed = [
            change(EncodedEvent(partition, None if key is None else key.encode(), value, (text or "{}").encode()))
            for key, value, text in zip(keys or none, contents, metadata or none, strict=True)
        ]
        texts = [event.metadata.decode() for event in changed]
        return {"values": [event.value for event in changed], "metadata": texts}, found

    def delete(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Delete the blocks of attempts, except published blocks and blocks of a prepared part."""
        connection.execute(self._queries("delete_attempts"), {"attempts": list(attempts)})

    def sweep(self, connection: Connection) -> None:
        """Delete the blocks of attempts that nobody published or gave up within `ORPHANED_AFTER_HOURS`."""
        connection.execute(self._queries("delete_orphans"), {"hours": ORPHANED_AFTER_HOURS})


def missing_blocks(attempt: uuid.UUID | None = None, events: int | None = None) -> DatabaseError:
    """The error for missing staged blocks of an attempt, which has this number of events if it is known."""
    staged = "events that an attempt staged" if attempt is None else f"some of {events} events of attempt {attempt}"
    return DatabaseError(
        f"{staged} are missing: a crash of the server loses the newest blocks, and a sweep deletes the blocks of an "
        f"attempt that ended more than {ORPHANED_AFTER_HOURS} hours before its query. Write again, in smaller batches "
        "if the query took that long"
    )
