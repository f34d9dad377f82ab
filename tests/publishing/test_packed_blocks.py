"""Blocks of events that earlier versions have staged are unpacked."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib

import pytest

from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.packed_blocks import unpack

MEGABYTE = 1024 * 1024


def packed(*rows: bytes) -> bytes:
    """A block as versions before revision 0026 have packed it."""
    mark = os.urandom(16)
    begin = copy_format.log_prefix(*struct.unpack(">qq", mark))
    return mark + zlib.compress(b"".join(begin + row for row in rows), 1)


@pytest.mark.parametrize("size", [0, 1, 100, 3 * MEGABYTE, 8 * MEGABYTE - 20])
def test_a_block_is_unpacked_in_pieces_with_each_rows_first_bytes_replaced(size: int) -> None:
    rows = [os.urandom(size), b"", b"second", os.urandom(9 * MEGABYTE), b"last"]
    assert b"".join(unpack(packed(*rows), b"begin")) == b"".join(b"begin" + row for row in rows)


def test_a_block_that_unpacks_to_much_takes_little_memory() -> None:
    packer = zlib.compressobj(1)
    block = bytes(16) + b"".join(packer.compress(bytes(MEGABYTE)) for _ in range(300)) + packer.flush()
    tracemalloc.start()
    try:
        assert sum(len(rows) for rows in unpack(block, b"begin")) == 300 * MEGABYTE
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 60 * MEGABYTE


@pytest.mark.parametrize(
    "damaged",
    [b"", b"no block", bytes(16), bytes(16) + b"garbage", bytes(16) + zlib.compress(bytes(1000))[:-6]],
    ids=["empty", "without a mark", "only a mark", "garbage", "cut off"],
)
def test_a_damaged_block_is_an_error(damaged: bytes) -> None:
    with pytest.raises(zlib.error):
        list(unpack(damaged, b"begin"))
