"""`eventsql bench dagster`: how soon Dagster runs what was published, and how much of it a daemon here takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import Figure, percentile
from eventsql_orchestration.bench.session import Session

MILLISECONDS: Final = "ms"


@dataclass(frozen=True, slots=True)
class Size:
    """`cold` runs from rest; `drained` events, one each 0.1 s; `sensors` that tick for `seconds`; `runs` at once."""

    cold: int = 12
    drained: int = 150
    sensors: tuple[int, ...] = (10, 100, 300)
    seconds: float = 30.0
    runs: int = 20


FULL: Final = Size()
QUICK: Final = Size(cold=1, drained=5, sensors=(3,), seconds=6.0, runs=2)


def measure(session: Session, size: Size) -> list[Figure]:
    """Raises `BenchmarkError` where the daemon does not come to it, `MissingExtraError` without Dagster."""
    # Only this figure needs Dagster.
    from eventsql_orchestration.dagster import measuring  # noqa: PLC0415

    platform, figures = session.platform, []
    drain = size.drained * 0.15 + 10
    with (
        session.topic("cold", partitions=1) as topic,
        measuring.daemon(platform, topic, partitions=1) as running,
    ):
        figures.append(_delays("dagster_cold_start", measuring.cold_starts(running, size.cold, session.report)))
    with (
        session.topic("drain", partitions=1) as topic,
        measuring.daemon(platform, topic, partitions=1, drain=drain) as running,
    ):
        delays = measuring.drained(running, size.drained, 0.1, session.report)
        figures.append(_delays("dagster_draining", delays))
    for sensors in size.sensors:
        with (
            session.topic("ticks", partitions=sensors) as topic,
            measuring.daemon(platform, topic, partitions=sensors) as running,
        ):
            rate = measuring.ticks_per_minute(running, size.seconds)
            figures.append(Figure(f"dagster_ticks_{sensors}_sensors", rate / sensors, "looks/min per partition"))
    most = max(*size.sensors, size.runs)
    with (
        session.topic("consumer", partitions=most) as topic,
        measuring.daemon(platform, topic, partitions=most, sensor="consumer") as running,
    ):
        rate = measuring.ticks_per_minute(running, size.seconds)
        figures.append(Figure(f"dagster_ticks_1_sensor_{most}_partitions", rate, "looks/min per partition"))
        figures.append(Figure("dagster_runs", measuring.runs_per_second(running, size.runs), "runs/s"))
    return figures


def _delays(name: str, delays: Sequence[float]) -> Figure:
    ordered = sorted(1_000 * delay for delay in delays)
    details = {"least": ordered[0], "p90": percentile(ordered, 0.9), "most": ordered[-1], "measured": len(ordered)}
    return Figure(name, percentile(ordered, 0.5), MILLISECONDS, details=details)
