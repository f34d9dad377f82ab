"""Packed blocks: events that versions before revision 0026 have staged, as compressed rows of a log.

Such a block is in the column `eql_value` of `spark_staged_event`: 16 random bytes, and the rows compressed with zlib.
In the rows, these bytes stand in place of both times. A block that waits in the buffer during an upgrade is moved as it
is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.copy_format import EncodedEvent

REFERENCE: Final = -2
"""The partition of a row of the buffer that stands for a packed block. No event has this partition."""

_MARK: Final = struct.Struct(">qq")

_PIECE: Final = 8 * 1024 * 1024
"""Bytes that are unpacked at once: all of an ordinary block."""


def replaced(packed: bytes, change: Callable[[EncodedEvent], EncodedEvent]) -> bytes:
    """A packed block with changed events. Raises as `unpack`, and `ValueError` for an incomplete event."""
    begin = copy_format.log_prefix(*_MARK.unpack_from(packed))
    packer = zlib.compressobj(1)
    parts = [packed[: _MARK.size]]
    for events in copy_format.decode_rows(unpack(packed, b"")):
        parts += [packer.compress(begin + copy_format.encode_again(change(event))) for event in events]
    return b"".join((*parts, packer.flush()))


def unpack(packed: bytes, begin: bytes) -> Iterator[bytes]:
    """The rows of a packed block in pieces, each row with `begin` as its first bytes.

    A piece has at most some `_PIECE` bytes, however large the block is. Raises `zlib.error` for anything else.
    """
    if len(packed) < _MARK.size:
        raise zlib.error("the block is incomplete")
    old = copy_format.log_prefix(*_MARK.unpack_from(packed))
    packed = packed[_MARK.size :]
    unpacker = zlib.decompressobj()
    kept = b""
    while not unpacker.eof:
        rows = unpacker.decompress(packed, _PIECE)
        packed = unpacker.unconsumed_tail
        if not (rows or packed or unpacker.eof):
            raise zlib.error("the block is incomplete")

        *whole, rest = (kept + rows).split(old)
        # The next piece may go on in the middle of a row's first bytes.
        end = max(0, len(rest) - len(old) + 1)
        kept = rest[end:]
        yield begin.join([*whole, rest[:end]])
    yield kept
