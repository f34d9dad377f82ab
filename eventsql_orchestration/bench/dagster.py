"""How soon Dagster runs a consumer after a publication, and how many ticks and runs a daemon does on this machine."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from eventsql_orchestration.bench.benchmark import Benchmark, duration, option
from eventsql_orchestration.bench.figure import Figure, delays
from eventsql_orchestration.bench.session import Session

if TYPE_CHECKING:
    from eventsql_orchestration.bench.dagster_daemon import Daemon

    Start = Callable[..., AbstractContextManager[Daemon]]

PUBLISH_EVERY: Final = 0.1
"""Seconds between two events for a run that drains."""

PARTS: Final = ("cold", "draining", "handover", "transfer", "ticks", "runs", "launchers")
"""The parts of the benchmark, each with a daemon of its own."""


@dataclass(frozen=True, kw_only=True)
class Dagster(Benchmark):
    """Start a separate daemon and time it: publish to first step, publish to a run that drains, ticks and runs.

    Steady traffic goes on over several runs, which take over from one another. The daemon's storage is a schema of its
    own in this database; the benchmark drops the schema at the end. It takes some 10 minutes.
    """

    name = "dagster"
    summary = "Time Dagster from publish to run."

    cold: int = option(12, "Runs from rest", quick=1)
    drained: int = option(150, "Events for a run that drains", quick=5)
    steady: float = duration(180.0, "Duration of steady traffic", quick=15.0)
    window: float = duration(30.0, "Duration of each run of steady traffic", quick=12.0)
    rest: float = duration(125.0, "Duration of an empty buffer", quick=5.0)
    sensors: tuple[int, ...] = option((10, 100, 300), quick=(3,))
    seconds: float = duration(30.0, "Duration of each number of sensors", quick=6.0)
    runs: int = option(20, "Runs at once", quick=2)
    launcher: str = option("prefork", "The launcher of the runs", choices=("prefork", "default"))
    only: tuple[str, ...] = option((), "Measure this part; repeat it  [default: all]", choices=PARTS)

    def measure(self, session: Session) -> list[Figure]:
        """Raises `BenchmarkError` for a daemon that makes no progress, `ModuleNotFoundError` without Dagster."""
        # Only the figures need Dagster.
        from eventsql_orchestration.bench import dagster_daemon  # noqa: PLC0415

        daemon = partial(dagster_daemon.daemon, session, launcher=self.launcher)
        parts = self.only or PARTS
        return [*self._latencies(daemon, parts), *self._rates(daemon, parts)]

    def _latencies(self, daemon: Start, parts: Container[str]) -> Iterator[Figure]:
        from eventsql_orchestration.bench import dagster_measurements as dagster  # noqa: PLC0415

        if "cold" in parts:
            with daemon("cold") as running:
                yield delays("dagster_cold_start", dagster.cold_starts(running, self.cold))

        if "draining" in parts:
            with daemon("drain", drain=self.drained * PUBLISH_EVERY * 1.5 + 10) as running:
                yield delays("dagster_draining", dagster.drained(running, self.drained, PUBLISH_EVERY))

        if "handover" in parts:
            with daemon("steady", drain=self.window, idle=1.0) as running:
                traffic = dagster.steady_traffic(running, self.steady, PUBLISH_EVERY)
            yield delays("dagster_steady", traffic.delays, runs=traffic.runs)
            if traffic.hand_overs:
                within = 1_000 * max(traffic.gaps_within)
                yield delays("dagster_steady_around_handover", traffic.delays_around)
                yield delays("dagster_gap_at_handover", traffic.gaps, most_within_a_run=within)

        if "transfer" in parts:
            with daemon("transfer", drain=self.window, idle=1.0, transfers=True) as running:
                runs, ticks = dagster.transfer_at_rest(running, self.rest)
                traffic = dagster.steady_traffic(running, self.steady, PUBLISH_EVERY)
                moved = dagster.transfer_delays(running)
            yield Figure("dagster_transfer_at_rest", runs, "runs/h", details={"ticks_per_hour": ticks})
            yield delays("dagster_transfer", moved)
            yield delays("dagster_transferred_and_consumed", traffic.delays, runs=traffic.runs)

    def _rates(self, daemon: Start, parts: Container[str]) -> Iterator[Figure]:
        from eventsql_orchestration.bench import dagster_measurements as dagster  # noqa: PLC0415

        for sensors in self.sensors if "ticks" in parts else ():
            with daemon("ticks", partitions=sensors) as running:
                rate = dagster.ticks_per_minute(running, self.seconds) / sensors
            yield Figure(f"dagster_ticks_{sensors}_sensors", rate, "looks/min per partition")

        if "runs" in parts:
            most = max(*self.sensors, self.runs)
            with daemon("consumer", partitions=most, sensor="consumer") as running:
                dagster.runs_at_once(running, 1)
                rate = dagster.ticks_per_minute(running, self.seconds)
                per_second, processor = dagster.runs_at_once(running, self.runs)
            yield Figure(f"dagster_ticks_1_sensor_{most}_partitions", rate, "looks/min per partition")
            yield Figure("dagster_runs", per_second, "runs/s", details={"processor_seconds_per_run": processor})

        if "launchers" in parts:
            measured = {}
            for launcher in ("default", "prefork"):
                with daemon(launcher, partitions=self.runs, sensor="consumer", launcher=launcher) as running:
                    dagster.runs_at_once(running, 1)
                    measured[launcher] = dagster.runs_at_once(running, self.runs)
            costs = {f"{launcher}_processor_seconds": processor for launcher, (_, processor) in measured.items()}
            rates = {f"{launcher}_runs_per_second": per_second for launcher, (per_second, _) in measured.items()}
            default, prefork = costs.values()
            # Some systems do not tell the processor time.
            if default and prefork:
                details = {**costs, **rates}
                yield Figure("dagster_launcher_cost", prefork / default, "of the default launcher", details=details)
