"""Divides a range of offsets into ranges that hold about as many events each, without counting them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

PROBES: Final = 256
"""Parts of a range in which the first and the last event are looked up: 512 steps down an index in one query. Measured
over a million events: 5 to 10 ms. A gap that is wider than a part is always seen, a smaller one may be."""

EVENTS_PER_SPLIT: Final = 250_000
"""Events of a task when nobody asked for a number of tasks: less than a second of reading, and several times what Spark
needs to start one."""

Bounds = tuple[int, int]
"""`after` exclusive, `upto` inclusive."""


def equal_parts(after: int, upto: int, parts: int) -> list[Bounds]:
    """A range of offsets in at most so many parts of equal width."""
    parts = min(parts, upto - after)
    edges = [after + (upto - after) * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(edges))


def even_splits(after: int, upto: int, occupied: Sequence[Bounds], splits: int | None) -> list[Bounds]:
    """A range of offsets in consecutive parts that together are the whole range; none where it holds no event.

    `occupied` gives the first and last offset of each stretch that holds events, in order; events are taken to lie
    evenly within one. `splits` is the number of parts wanted, None for one for each `EVENTS_PER_SPLIT` offsets.
    """
    total = sum(last - first + 1 for first, last in occupied)
    if not total:
        return []
    splits = min(splits or -(-total // EVENTS_PER_SPLIT), total)
    edges = [after]
    passed, stretch = 0, iter(occupied)
    first, last = next(stretch)
    for split in range(1, splits):
        wanted = total * split // splits
        while passed + last - first + 1 < wanted:
            passed += last - first + 1
            first, last = next(stretch)
        edges.append(first + wanted - passed - 1)
    return list(zip(edges, [*edges[1:], upto], strict=True))
