"""Figures: measured numbers with their units, and rates of events as a part of the raw COPY rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

EVENTS_PER_SECOND: Final = "events/s"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    `ratio_to_raw_copy` is None unless the figure is a rate at full speed. `details` are further numbers of the same
    run, in types that JSON has.
    """

    name: str
    value: float
    unit: str
    ratio_to_raw_copy: float | None = None
    details: Mapping[str, object] = field(default_factory=dict)


def rate(name: str, events_per_second: float, **details: object) -> Figure:
    """A figure in events per second."""
    return Figure(name, events_per_second, EVENTS_PER_SECOND, details=details)


@dataclass(frozen=True, slots=True)
class Sample:
    """The number of events that were done at a time of `time.monotonic`."""

    at: float
    events: int


def quarter_rates(started: float, samples: Sequence[Sample], events: int) -> list[float]:
    """Events per second of each quarter of `events`, from `started` on.

    The end of a quarter is interpolated between the samples around it.
    """
    points = [Sample(started, 0), *samples]
    ends = [started]

    for quarter in range(1, 5):
        wanted = events * quarter / 4
        before, after = next(((a, b) for a, b in pairwise(points) if b.events >= wanted), (points[-1], points[-1]))
        share = 1.0 if after.events == before.events else (wanted - before.events) / (after.events - before.events)
        ends.append(before.at + share * (after.at - before.at))

    return [events / 4 / max(b - a, 1e-9) for a, b in pairwise(ends)]


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the sorted values do not exceed. `ordered` has at least one value."""
    return ordered[min(len(ordered) - 1, max(0, round(part * len(ordered)) - 1))]
