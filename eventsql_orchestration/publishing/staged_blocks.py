"""Publishing staged blocks (`log/blocks.py`): by a row of the buffer for each, or as the events that it holds."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.log import encoding
from eventsql_orchestration.log.blocks import REFERENCE, unpack

LEAST_BY_BLOCKS: Final = 10_000
"""Events that a publication must have to be published as the blocks that were staged. The events of a smaller one go to
the buffer, where any transfer moves them, many publications' at a time; each block takes a transaction of its own."""

ORPHANED_AFTER_HOURS: Final = 24
"""How long a staged block is kept for a publication that may still come."""

MOST_COPIED: Final = 16 * 1024 * 1024
"""Bytes of the blocks of such a publication at most, which are held in memory."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """Where a staged block is, how many events of which topic it holds, and in how many bytes."""

    attempt: uuid.UUID
    position: int
    topic: str
    events: int
    size: int


class StagedBlocks:
    """Publishes blocks of attempts, in the transactions of its callers."""

    def __init__(self, schema: str) -> None:
        self._queries = Queries("spark", schema)
        self._log = Queries("log", schema)
        self._blocks = Queries("blocks", schema)

    def find(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> list[StagedBlock]:
        """The blocks of attempts that are not published, in the order of `attempts`, each one's in theirs."""
        rows = connection.execute(self._queries("staged_blocks"), {"attempts": list(attempts)})
        blocks: dict[uuid.UUID, list[StagedBlock]] = {}
        for row in rows:
            block = StagedBlock(*row)
            blocks.setdefault(block.attempt, []).append(block)
        return [block for attempt in attempts for block in blocks.get(attempt, ())]

    def publish(
        self, connection: Connection, attempts: Sequence[uuid.UUID], staged: Sequence[StagedBlock] | None = None
    ) -> None:
        """Publish the blocks of attempts, in that order; `staged` are those that were found, where somebody looked.

        Delete the attempts then: their events may have been copied. Raises `DatabaseError` where a block that was found
        is gone.
        """
        if staged is None:
            staged = self.find(connection, attempts)
        if not staged:
            return
        events, size = sum(block.events for block in staged), sum(block.size for block in staged)
        if events < LEAST_BY_BLOCKS and size < MOST_COPIED:
            self._copy(connection, staged, attempts)
            return
        placed = connection.execute(
            self._blocks("place"), {"attempts": list(attempts), "reference": REFERENCE}
        ).rowcount
        if placed != len(staged):
            raise swept()

    def _copy(self, connection: Connection, staged: Sequence[StagedBlock], attempts: Sequence[uuid.UUID]) -> None:
        """Write the events of blocks to the buffer."""
        rows = connection.execute(self._queries("staged_content"), {"attempts": list(attempts)}, binary=True)
        contents = {(attempt, position): packed for attempt, position, packed in rows}
        if len(contents) != len(staged):
            raise swept()
        packed = [(block.topic, contents[block.attempt, block.position]) for block in staged]
        with connection.cursor().copy(self._log("publish_all")) as copy:
            copy.write(encoding.HEADER)
            for topic, block in packed:
                copy.write(unpack(block, encoding.buffer_prefix(topic)))
            copy.write(encoding.TRAILER)

    def delete(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Delete the blocks of attempts that are neither published nor to be."""
        connection.execute(self._queries("delete_attempts"), {"attempts": list(attempts)})

    def sweep(self, connection: Connection) -> None:
        """Delete the blocks of attempts that nobody published or gave up."""
        connection.execute(self._queries("delete_orphans"), {"hours": ORPHANED_AFTER_HOURS})


def swept(attempt: uuid.UUID | None = None, events: int | None = None) -> DatabaseError:
    """That blocks which were staged are not there any more; of an attempt, and so many events, where that is known."""
    who = "an attempt staged events" if attempt is None else f"attempt {attempt} staged {events} events"
    return DatabaseError(
        f"{who}, and they are not all there: those of an attempt that ends more than {ORPHANED_AFTER_HOURS} hours "
        "before its query are given up, and a crash of the server loses those of the last moment; write again, in "
        "smaller batches where the query took so long"
    )
