"""Figures: measured numbers with their units, and rates of events as a part of the raw COPY rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

EVENTS_PER_SECOND: Final = "events/s"
PROCESSOR: Final = "CPU µs per event"


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
    details: Mapping[str, Any] = field(default_factory=dict)


def rate(name: str, events_per_second: float, **details: object) -> Figure:
    """A figure in events per second."""
    return Figure(name, events_per_second, EVENTS_PER_SECOND, details=details)


def ratio(name: str, ours: Sequence[float], theirs: Sequence[float], unit: str) -> Figure:
    """The median ratio of values that were measured in turns: the machine's speed drifts for both alike."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return Figure(name, median(ratios), unit, details=percentiles(ratios))


def delays(name: str, seconds: Iterable[float], **details: object) -> Figure:
    """The median of delays in milliseconds, with their other percentiles."""
    parts = percentiles([1_000 * each for each in seconds])
    return Figure(name, parts.pop("p50"), "ms", details={**parts, **details})


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The percentiles of values that figures show, and the number of the values. There is at least one."""
    ordered = sorted(values)
    parts = {"least": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    return {**{name: percentile(ordered, part) for name, part in parts.items()}, "measured": len(ordered)}


def percentile(ordered: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the sorted values do not exceed. `ordered` has at least one value."""
    return ordered[min(len(ordered) - 1, max(0, round(part * len(ordered)) - 1))]


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


def span(outcomes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The start of the first and the end of the last of several processes."""
    return min(each["started"] for each in outcomes), max(each["ended"] for each in outcomes)
