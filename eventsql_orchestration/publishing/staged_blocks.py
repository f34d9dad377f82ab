"""Staged blocks (`publishing/blocks.py`): publishing them, and moving published blocks into the log of their topic."""

from __future__ import annotations

import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import psycopg

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import encode_rows
from eventsql_orchestration.publishing.blocks import REFERENCE, replaced, unpack
from eventsql_orchestration.publishing.copy_format import EncodedEvent
from eventsql_orchestration.storage.appending import LogAppender

LEAST_BY_BLOCKS: Final = 10_000
"""The least events of a publication that is published as blocks. The events of a smaller one go to the buffer, where
the transfer moves those of many publications together; each block takes a transaction of its own."""

MOST_COPIED: Final = 16 * 1024 * 1024
"""The most bytes of blocks that are copied to the buffer instead. They are held in memory."""

ORPHANED_AFTER_HOURS: Final = 24
"""How long a staged block waits for its publication before a sweep deletes it."""

Erased: TypeAlias = Callable[[EncodedEvent], EncodedEvent]
"""Gives the erased event for one that is to be erased, and the same object for any other."""


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
        self._log = Queries("log", schema)
        self._blocks = Queries("blocks", schema)
        self._appender = LogAppender(schema)

    def find(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> list[StagedBlock]:
        """The unpublished blocks of attempts, in the order of `attempts` and then of their positions."""
        rows = connection.execute(self._queries("staged_blocks"), {"attempts": list(attempts)})
        blocks = [StagedBlock(*row) for row in rows]
        order = {attempt: number for number, attempt in enumerate(attempts)}
        return sorted(blocks, key=lambda block: (order[block.attempt], block.position))

    def publish(
        self, connection: Connection, attempts: Sequence[uuid.UUID], staged: Sequence[StagedBlock] | None = None
    ) -> None:
        """Publish the blocks of attempts, in that order. `staged` are the blocks if the caller has found them already.

        Delete the attempts afterwards: their events may have been copied. Raises `DatabaseError` if a block is missing.
        """
        if staged is None:
            staged = self.find(connection, attempts)
        if not staged:
            return

        events, size = sum(block.events for block in staged), sum(block.size for block in staged)
        if events < LEAST_BY_BLOCKS and size < MOST_COPIED:
            self._copy(connection, staged, attempts)
            return
        values = {"attempts": list(attempts), "reference": REFERENCE}
        if connection.execute(self._blocks("place"), values).rowcount != len(staged):
            raise missing_blocks()

    def _copy(self, connection: Connection, staged: Sequence[StagedBlock], attempts: Sequence[uuid.UUID]) -> None:
        """Write the events of blocks to the buffer."""
        rows = connection.execute(self._queries("staged_content"), {"attempts": list(attempts)}, binary=True)
        contents = {(attempt, position): packed for attempt, position, packed in rows}
        if len(contents) != len(staged):
            raise missing_blocks()

        with connection.cursor().copy(self._log("publish_all")) as copy:
            copy.write(copy_format.HEADER)
            for block in staged:
                packed = contents[block.attempt, block.position]
                for piece in unpack(packed, copy_format.buffer_prefix(block.topic)):
                    copy.write(piece)
            copy.write(copy_format.TRAILER)

    def move(self, connection: Connection, topic: str, reference: int, *, zoned: bool, blocks: bool = False) -> int:
        """Copy the block that the buffer's row `reference` stands for to the end of the log. Gives its events.

        The caller's transaction holds the topic. `zoned`: the log's times have a time zone. `blocks`: the log is in
        blocks. Raises `psycopg.DataError` if the block is missing or damaged.
        """
        row = connection.execute(self._blocks("take"), {"id": reference, "zoned": zoned}, binary=True).fetchone()
        if row is None:
            raise _damaged(reference, "is gone")
        packed, events, published, now = row
        times = copy_format.microseconds(now), copy_format.microseconds(published)
        if blocks:
            try:
                copied = self._copy_blocks(connection, topic, packed, *times)
            except (zlib.error, ValueError) as error:
                raise _damaged(reference, f"cannot be unpacked ({error})") from error
            if copied != events:
                raise _damaged(reference, f"has {copied} events instead of {events}")
            return copied

        prefix = copy_format.log_prefix(*times)
        with connection.cursor() as cursor:
            try:
                with self._appender.copy(cursor, topic) as copy:
                    copy.write(copy_format.HEADER)
                    for rows in unpack(packed, prefix):
                        copy.write(rows)
                    copy.write(copy_format.TRAILER)
            except zlib.error as error:
                raise _damaged(reference, f"cannot be unpacked ({error})") from error
            if cursor.rowcount != events:
                raise _damaged(reference, f"has {cursor.rowcount} events instead of {events}")
        return int(events)

    def _copy_blocks(self, connection: Connection, topic: str, packed: bytes, now: int, published: int) -> int:
        """Copy the events of a staged block to the end of a log in blocks; gives their number."""
        copied = 0
        for events in copy_format.decode_rows(unpack(packed, b"")):
            if not events:
                continue
            first = self._appender.draw(connection, topic, len(events))
            if first is None:
                raise psycopg.errors.SerializationFailure(f"another program drew ids of topic {topic!r}")
            with self._appender.copy(connection.cursor(), topic) as copy:
                copy.write(copy_format.HEADER)
                for block in encode_rows(events):
                    copy.write(block.row(first, published, now))
                    first += block.events
                copy.write(copy_format.TRAILER)
            copied += len(events)
        return copied

    def of_topic(self, connection: Connection, topic: str) -> list[tuple[uuid.UUID, int]]:
        """The staged blocks of a topic, published or not: attempt and position."""
        return [
            (attempt, position) for attempt, position in connection.execute(self._blocks("of_topic"), {"topic": topic})
        ]

    def count(self, connection: Connection, attempt: uuid.UUID, position: int, erased: Erased) -> Counter[str]:
        """How many events of each key `erased` would change in a block; none if the block is gone."""
        return self._change(connection, "content", attempt, position, erased)[1]

    def erase(self, connection: Connection, attempt: uuid.UUID, position: int, erased: Erased) -> Counter[str]:
        """Replace the events of a block by what `erased` gives; gives the number of changed events by key.

        The transfer of the block waits for the end of the transaction.
        """
        content, found = self._change(connection, "hold", attempt, position, erased)
        if found:
            values = {"attempt": attempt, "position": position, "content": content}
            connection.execute(self._blocks("replace"), values, binary=True)
        return found

    def _change(
        self, connection: Connection, read: str, attempt: uuid.UUID, position: int, erased: Erased
    ) -> tuple[bytes, Counter[str]]:
        found: Counter[str] = Counter()

        def change(event: EncodedEvent) -> EncodedEvent:
            changed = erased(event)
            if changed is not event and event.key is not None:
                found[event.key.decode()] += 1
            return changed

        values = {"attempt": attempt, "position": position}
        row = connection.execute(self._blocks(read), values, binary=True).fetchone()
        if row is None:
            return b"", found
        try:
            return replaced(row[0], change), found
        except (zlib.error, ValueError) as error:
            raise psycopg.DataError(f"block {position} of attempt {attempt} cannot be unpacked ({error})") from error

    def delete(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Delete the blocks of attempts, except published blocks and blocks of a prepared part."""
        connection.execute(self._queries("delete_attempts"), {"attempts": list(attempts)})

    def sweep(self, connection: Connection) -> None:
        """Delete the blocks of attempts that nobody published or gave up within `ORPHANED_AFTER_HOURS`."""
        connection.execute(self._queries("delete_orphans"), {"hours": ORPHANED_AFTER_HOURS})


def missing_blocks(attempt: uuid.UUID | None = None, events: int | None = None) -> DatabaseError:
    """The error for staged blocks that are missing, of one attempt with this number of events if that is known."""
    staged = "events that an attempt staged" if attempt is None else f"some of {events} events of attempt {attempt}"
    return DatabaseError(
        f"{staged} are missing: a crash of the server loses the newest blocks, and a sweep deletes the blocks of an "
        f"attempt that ended more than {ORPHANED_AFTER_HOURS} hours before its query. Write again, in smaller batches "
        "if the query took that long"
    )


def _damaged(reference: int, how: str) -> psycopg.DataError:
    return psycopg.DataError(f"the block of events of row {reference} of the buffer {how}")
