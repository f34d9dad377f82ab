"""Cutting ranges of offsets into tasks of the same number of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PROBES: Final = 256
"""The parts of a range that are searched for events. A gap wider than a part is always found. Measured over a million
events: 5 to 10 ms."""

SAMPLE: Final = 32
"""The events of each part that are read in the index, to estimate how dense its offsets are."""

EVENTS_PER_TASK: Final = 250_000
"""The default number of events of a task: less than a second of reading, and several times what Spark needs to start a
task."""

Interval = tuple[int, int]
"""`after` exclusive, `upto` inclusive."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The offsets from the first to the last event of a part of a log, and an estimate of its events."""

    first: int
    last: int
    events: int

    @classmethod
    def estimate(cls, first: int, last: int, sampled: int, upto: int) -> Stretch:
        """Estimate a part whose first `sampled` events reach from `first` to `upto`."""
        return cls(first, last, max(1, (last - first + 1) * sampled // (upto - first + 1)))

    def offset_of(self, event: int) -> int:
        """The offset up to which the stretch has `event` events, if they lie evenly in it."""
        return self.first - 1 + (self.last - self.first + 1) * event // self.events


@dataclass(frozen=True, slots=True)
class Occupied:
    """A range of one log, and its stretches with events, in order."""

    after: int
    upto: int
    stretches: Sequence[Stretch]

    @property
    def events(self) -> int:
        return sum(stretch.events for stretch in self.stretches)


def equal_parts(after: int, upto: int, parts: int) -> list[Interval]:
    """A range of offsets, cut into at most `parts` parts of equal width."""
    parts = min(parts, upto - after)
    edges = [after + (upto - after) * part // parts for part in range(parts + 1)] if parts else []
    return list(pairwise(edges))


def even_tasks(ranges: Sequence[Occupied], tasks: int) -> list[list[tuple[int, Interval]]]:
    """Cut ranges into at most `tasks` tasks of equally many events. A task is a list of (index of range, interval).

    The intervals of a range cover it completely. A range without events has none.
    """
    total = sum(each.events for each in ranges)
    tasks = min(tasks, total)
    found: list[list[tuple[int, Interval]]] = [[] for _ in range(tasks)]
    task = before = 0
    for index, each in enumerate(ranges):
        if not each.events:
            continue
        while total * (task + 1) // tasks <= before:
            task += 1
        start, shares = task, []
        while (share := total * (task + 1) // tasks - before) < each.events:
            shares.append(share)
            task += 1
        for number, bounds in enumerate(pairwise([each.after, *_edges(each, shares), each.upto]), start):
            found[number].append((index, bounds))
        before += each.events
    return found


def _edges(occupied: Occupied, wanted: Sequence[int]) -> Iterator[int]:
    """For each of the growing numbers in `wanted`, the offset up to which the range has that many events."""
    passed, stretches = 0, iter(occupied.stretches)
    stretch = next(stretches)
    for events in wanted:
        while passed + stretch.events < events:
            passed += stretch.events
            stretch = next(stretches)
        yield stretch.offset_of(events - passed)


def shares(waiting: Sequence[int], most: int) -> list[int]:
    """Share `most` events among queues of `waiting` events as evenly as possible. Gives each queue's share."""
    given = [0] * len(waiting)
    left = most
    order = sorted(range(len(waiting)), key=waiting.__getitem__)
    for place, index in enumerate(order):
        given[index] = min(waiting[index], left // (len(order) - place))
        left -= given[index]
    return given
