"""Blocks: many events of one topic, encoded once by whoever has them, that take one row's place in the buffer.

Published in bulk, events need not pass through the buffer one by one: they lie in a block, compressed, in
`spark_staged_event`, and a row of the buffer with the partition `REFERENCE` stands for them. Its buffer id says when
their turn is; the transfer then copies them into the log, and deletes the block and the row. What moves rows and knows
nothing of blocks, as EventSQL's Java library does, cannot pass one by: a trigger keeps the row from being deleted
before its block.

Imports no database: Spark's tasks make blocks.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.log import encoding

REFERENCE: Final = -2
"""The partition of a row of the buffer that stands for a block. No event has it."""

_LEVEL: Final = 1
"""Of zlib, which every Python has, and so every transfer. Measured: 0.33 µs an event to pack, 0.19 to unpack."""

_MARK: Final = struct.Struct(">qq")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a log, encoded for COPY, whose times are not known yet, and the number of events of each partition.

    In the place of each row's times stands `mark`.
    """

    topic: str
    mark: bytes
    rows: bytes
    partitions: Mapping[int, int]

    @property
    def events(self) -> int:
        return sum(self.partitions.values())

    def pack(self) -> bytes:
        return self.mark + zlib.compress(self.rows, _LEVEL)

    def metadata(self) -> dict[str, object]:
        """What is known of it without unpacking it, for JSON."""
        return {
            "events": self.events,
            "partitions": {str(number): events for number, events in self.partitions.items()},
        }


def new_mark() -> bytes:
    """Random, so that no event holds it."""
    return os.urandom(_MARK.size)


def prefix(mark: bytes) -> bytes:
    """What begins each row of a block."""
    return encoding.log_prefix(*_MARK.unpack(mark))


def join(first: Block, second: Block) -> Block:
    """Two blocks of one topic and mark as one."""
    partitions = dict(first.partitions)
    for partition, events in second.partitions.items():
        partitions[partition] = partitions.get(partition, 0) + events
    return Block(first.topic, first.mark, first.rows + second.rows, partitions)


def unpack(packed: bytes, begin: bytes) -> bytes:
    """The rows of a packed block, with `begin` as what begins each. Raises `zlib.error` for anything else."""
    rows = zlib.decompress(memoryview(packed)[_MARK.size :])
    return rows.replace(prefix(packed[: _MARK.size]), begin)
