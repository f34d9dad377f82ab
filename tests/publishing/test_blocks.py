"""Unpacking blocks of events."""

from __future__ import annotations

import os
import tracemalloc
import zlib

import pytest

from eventsql_orchestration.publishing.blocks import Block, new_mark, prefix, unpack

MEGABYTE = 1024 * 1024


@pytest.mark.parametrize("size", [0, 1, 100, 3 * MEGABYTE, 8 * MEGABYTE - 20])
def test_a_block_is_unpacked_in_pieces_with_each_rows_first_bytes_replaced(size: int) -> None:
    mark = new_mark()
    rows = [os.urandom(size), b"", b"second", os.urandom(9 * MEGABYTE), b"last"]
    block = Block("orders", mark, b"".join(prefix(mark) + row for row in rows), {0: len(rows)})
    assert b"".join(unpack(block.pack(), b"begin")) == b"".join(b"begin" + row for row in rows)


def test_a_block_that_unpacks_to_much_takes_little_memory() -> None:
    packer = zlib.compressobj(1)
    packed = new_mark() + b"".join(packer.compress(bytes(MEGABYTE)) for _ in range(300)) + packer.flush()
    tracemalloc.start()
    try:
        assert sum(len(rows) for rows in unpack(packed, b"begin")) == 300 * MEGABYTE
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 60 * MEGABYTE


@pytest.mark.parametrize(
    "packed",
    [b"", b"no block", new_mark(), new_mark() + b"garbage", new_mark() + zlib.compress(bytes(1000))[:-6]],
    ids=["empty", "without a mark", "only a mark", "garbage", "cut off"],
)
def test_a_damaged_block_is_an_error(packed: bytes) -> None:
    with pytest.raises(zlib.error):
        list(unpack(packed, b"begin"))
