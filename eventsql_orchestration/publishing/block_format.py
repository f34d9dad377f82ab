"""Blocks of a log in PostgreSQL's binary COPY format: `storage/sql/forms.sql` describes them.

An array travels as its number of dimensions, whether it has NULLs, its type, its length, its first index, and its
elements, each behind its length. Measured: 0.9 µs an event of 150 bytes, of which half is the key's SHA-256.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from eventsql_orchestration.database.binary import BYTEA, JSON, NULL, TEXT, encode_integer
from eventsql_orchestration.model import Publication
from eventsql_orchestration.publishing import copy_format

MOST_EVENTS: Final = 10_000
MOST_BYTES: Final = 1024 * 1024
"""Events of a block, and its bytes unless a single event is larger. Reading one event of a block reads the block."""

STAGED_COLUMNS: Final = (
    "eql_attempt", "eql_position", "eql_topic", "eql_partition", "eql_value", "eql_metadata",
    "eql_keys", "eql_values", "eql_event_metadata",
)  # fmt: skip
"""The columns of a staged block. `eql_value` is empty, `eql_metadata` describes the block."""

REFERENCE: Final = -3
"""The partition of a row of the buffer that has a block, or stands for a staged block. No event has this partition."""

_COLUMNS: Final = 9
_BUFFERED_COLUMNS: Final = len(copy_format.BLOCK_COLUMNS) + len(copy_format.BUFFER_COLUMNS)

_array = struct.Struct(">iiiiii")
_begin = struct.Struct(">hiqihiiiqiqi")
_staged = struct.Struct(">hi16siqi")
_partition = struct.Struct(">ih")
_buffered = struct.Struct(">hiiih")
_no_event = struct.Struct(">iii2sih")


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block without its ids and times: partition, number of events, and the encoded keys, values and metadata."""

    partition: int
    events: int
    arrays: bytes

    def row(self, first: int, published: int, now: int) -> bytes:
        """The row of a block whose first event has the id `first`.

        `published` and `now` are microseconds since 2000 in UTC: when its events were published, and entered the log.
        """
        begin = _begin.pack(
            _COLUMNS, 8, first + self.events - 1, 2, self.partition, 4, self.events, 8, published, 8, now, -1
        )
        return begin + self.arrays

    def buffered_row(self, topic: str) -> bytes:
        """The row of a block in the buffer: `copy_format.BLOCK_COLUMNS`, and an event without content."""
        name = topic.encode()
        return b"".join((
            _buffered.pack(_BUFFERED_COLUMNS, 4, self.events, 2, self.partition), self.arrays,
            encode_integer(len(name)), name, _no_event.pack(-1, 0, 2, b"{}", 2, REFERENCE),
        ))  # fmt: skip

    def staged_row(self, attempt: uuid.UUID, position: int, topic: str) -> bytes:
        """The row of a block that an attempt has staged, with the columns `STAGED_COLUMNS`.

        `position` is the number of the events that the attempt has staged before.
        """
        name = topic.encode()
        described = json.dumps({"events": self.events, "partitions": {str(self.partition): self.events}}).encode()
        return b"".join((
            _staged.pack(len(STAGED_COLUMNS), 16, attempt.bytes, 8, position, len(name)), name,
            _partition.pack(2, self.partition), encode_integer(0), encode_integer(len(described)), described,
            self.arrays,
        ))  # fmt: skip


def encode_blocks(publications: Iterable[Publication], partitions: Iterable[int]) -> Iterator[EncodedBlock]:
    """The blocks of events, those of each partition in their order. Each block is encoded when it is asked for."""
    keys: defaultdict[int, list[bytes | None]] = defaultdict(list)
    values: defaultdict[int, list[bytes]] = defaultdict(list)
    metadata: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
    # One loop: most of the time goes into bringing each event from memory to the processor.
    for each, partition in zip(publications, partitions, strict=True):
        key = each.key
        if each.metadata:
            metadata[partition][len(values[partition])] = copy_format.encode_metadata(each.metadata)
        keys[partition].append(None if key is None else key.encode())
        values[partition].append(each.value)
    for partition, own in values.items():
        given = metadata.get(partition)
        texts = None if given is None else [given.get(number, b"{}") for number in range(len(own))]
        yield from _blocks(partition, keys[partition], own, texts)


def _blocks(
    partition: int, keys: Sequence[bytes | None], values: Sequence[bytes], metadata: Sequence[bytes] | None
) -> Iterator[EncodedBlock]:
    """The blocks of events of a partition. `metadata` is JSON; None stands for no metadata in any of them."""
    for start, end in _cuts(keys, values, metadata):
        own = keys[start:end]
        # Joined once: a block is larger than the caches of a processor.
        parts = [NULL] if all(key is None for key in own) else _array_parts(TEXT, own)
        parts += _array_parts(BYTEA, values[start:end])
        parts += [NULL] if metadata is None else _array_parts(JSON, metadata[start:end])
        yield EncodedBlock(partition, end - start, b"".join(parts))


def _cuts(
    keys: Sequence[bytes | None], values: Sequence[bytes], metadata: Sequence[bytes] | None
) -> Iterator[tuple[int, int]]:
    """Where each block begins and ends, by `MOST_EVENTS` and `MOST_BYTES`."""
    total = sum(map(len, values)) + sum(map(len, filter(None, keys))) + sum(map(len, metadata or ()))
    if len(values) <= MOST_EVENTS and total <= MOST_BYTES:
        yield 0, len(values)
        return

    start = size = 0
    for number, value in enumerate(values):
        own = len(value) + len(keys[number] or b"") + (0 if metadata is None else len(metadata[number]))
        if number > start and (number - start == MOST_EVENTS or size + own > MOST_BYTES):
            yield start, number
            start, size = number, 0
        size += own
    yield start, len(values)


def array_field(of_type: int, elements: int, body: bytes, *, nulls: bool) -> bytes:
    """An array. `body` has the elements, each behind its length. `nulls` says that some elements are NULL."""
    return _array.pack(len(body) + 20, 1, nulls, of_type, elements, 1) + body


def _array_parts(of_type: int, elements: Sequence[bytes | None]) -> list[bytes]:
    """The parts to join to an array."""
    if None in elements:
        body = b"".join(NULL if each is None else encode_integer(len(each)) + each for each in elements)
        return [array_field(of_type, len(elements), body, nulls=True)]
    given = cast("Sequence[bytes]", elements)
    lengths = list(map(len, given))
    begin = _array.pack(sum(lengths) + 4 * len(given) + 20, 1, False, of_type, len(given), 1)
    if min(lengths) == max(lengths):
        # Keys often have one length, as UUIDs do.
        length = encode_integer(lengths[0])
        return [begin, length, length.join(given)]
    parts = [b""] * (2 * len(given))
    parts[::2], parts[1::2] = map(encode_integer, lengths), given
    return [begin, *parts]
