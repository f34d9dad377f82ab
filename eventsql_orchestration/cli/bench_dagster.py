"""`eventsql bench dagster`: how soon Dagster runs what was published, and how much of it a daemon here takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from eventsql_orchestration.bench.figure import Figure, percentile
from eventsql_orchestration.bench.session import Session

MILLISECONDS: Final = "ms"

PUBLISH_EVERY: Final = 0.1
"""Seconds between two events for a run that drains."""


@dataclass(frozen=True, slots=True)
class Size:
    """`cold` runs from rest; `drained` events, one each 0.1 s; `steady` seconds of them, for runs that drain `window`
    seconds; `sensors` that tick for `seconds`; `runs` at once. `only` are the parts that are measured, all if empty.
    """

    cold: int = 12
    drained: int = 150
    steady: float = 180.0
    window: float = 30.0
    sensors: tuple[int, ...] = (10, 100, 300)
    seconds: float = 30.0
    runs: int = 20
    only: tuple[str, ...] = ()


FULL: Final = Size()
QUICK: Final = Size(cold=1, drained=5, steady=15.0, window=12.0, sensors=(3,), seconds=6.0, runs=2)


def measure(session: Session, size: Size) -> list[Figure]:
    """Raises `BenchmarkError` where the daemon does not come to it, `MissingExtraError` without Dagster."""
    return [figure for part in size.only or PARTS for figure in PARTS[part](session, size)]


# Only these figures need Dagster.
def _cold(session: Session, size: Size) -> Iterable[Figure]:
    from eventsql_orchestration.dagster import measuring  # noqa: PLC0415

    with (
        session.topic("cold", partitions=1) as topic,
        measuring.daemon(session.platform, topic, partitions=1) as running,
    ):
        yield _delays("dagster_cold_start", measuring.cold_starts(running, size.cold, session.report))


def _draining(session: Session, size: Size) -> Iterable[Figure]:
    from eventsql_orchestration.dagster import measuring  # noqa: PLC0415

    drain = size.drained * PUBLISH_EVERY * 1.5 + 10
    with (
        session.topic("drain", partitions=1) as topic,
        measuring.daemon(session.platform, topic, partitions=1, drain=drain) as running,
    ):
        delays = measuring.drained(running, size.drained, PUBLISH_EVERY, session.report)
        yield _delays("dagster_draining", delays)


def _handover(session: Session, size: Size) -> Iterable[Figure]:
    from eventsql_orchestration.dagster import measuring, steady  # noqa: PLC0415

    with (
        session.topic("steady", partitions=1) as topic,
        measuring.daemon(session.platform, topic, partitions=1, drain=size.window, idle=1.0) as running,
    ):
        found = steady.steady_traffic(running, size.steady, PUBLISH_EVERY, session.report)
    yield _delays("dagster_steady", found.delays, runs=found.runs)
    if found.hand_overs:
        yield _delays("dagster_steady_around_handover", found.delays_around)
        yield _delays("dagster_gap_at_handover", found.gaps, most_within_a_run=1_000 * max(found.gaps_within))


def _ticks(session: Session, size: Size) -> Iterable[Figure]:
    from eventsql_orchestration.dagster import measuring  # noqa: PLC0415

    for sensors in size.sensors:
        with (
            session.topic("ticks", partitions=sensors) as topic,
            measuring.daemon(session.platform, topic, partitions=sensors) as running,
        ):
            rate = measuring.ticks_per_minute(running, size.seconds)
        yield Figure(f"dagster_ticks_{sensors}_sensors", rate / sensors, "looks/min per partition")


def _runs(session: Session, size: Size) -> Iterable[Figure]:
    from eventsql_orchestration.dagster import measuring  # noqa: PLC0415

    most = max(*size.sensors, size.runs)
    with (
        session.topic("consumer", partitions=most) as topic,
        measuring.daemon(session.platform, topic, partitions=most, sensor="consumer") as running,
    ):
        rate = measuring.ticks_per_minute(running, size.seconds)
        yield Figure(f"dagster_ticks_1_sensor_{most}_partitions", rate, "looks/min per partition")
        yield Figure("dagster_runs", measuring.runs_per_second(running, size.runs), "runs/s")


PARTS: Final[Mapping[str, Callable[[Session, Size], Iterable[Figure]]]] = MappingProxyType(
    {"cold": _cold, "draining": _draining, "handover": _handover, "ticks": _ticks, "runs": _runs}
)
"""What can be measured by itself, each with a daemon of its own."""


def _delays(name: str, delays: Sequence[float], **more: float) -> Figure:
    """The median of delays in seconds, as milliseconds."""
    ordered = sorted(1_000 * delay for delay in delays)
    details = {
        "least": ordered[0],
        "p90": percentile(ordered, 0.9),
        "p99": percentile(ordered, 0.99),
        "most": ordered[-1],
        "measured": len(ordered),
        **more,
    }
    return Figure(name, percentile(ordered, 0.5), MILLISECONDS, details=details)
