"""How soon Airflow runs the task of a consumer after a publication, beside the least that Airflow takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.figure import Figure, percentile
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import MissingExtraError


@dataclass(frozen=True, kw_only=True)
class Airflow(Benchmark):
    """Start a separate Airflow and time it: from publish to the first instruction of the task that consumes.

    Beside it, in turns, a DAG of the same Airflow runs for each line of a file, by a trigger that does nothing else:
    the least that Airflow takes from an event to a task, whatever queue the event comes from. Airflow's tables are in
    a database of their own on this server; the benchmark drops it at the end.
    """

    name = "airflow"
    summary = "Time Airflow from publish to task."
    hidden = frozenset({"partitions", "storage", "raw_events"})

    cold: int = option(12, "Runs from rest", quick=1)

    def measure(self, session: Session) -> list[Figure]:
        """Raises `BenchmarkError` for an Airflow that makes no progress, `MissingExtraError` without Airflow."""
        if importlib.util.find_spec("airflow") is None:
            raise MissingExtraError("airflow", "Airflow")
        # Only these figures need Airflow.
        from eventsql_orchestration.bench import airflow_process  # noqa: PLC0415

        with airflow_process.airflow(session) as running:
            published, lines = running.cold_starts(self.cold)
        ours, least = _delays("airflow_cold_start", published), _delays("airflow_least", lines)
        return [ours, least, Figure("airflow_cold_start_ratio", ours.value / least.value, "of the least")]


def _delays(name: str, delays: Sequence[float]) -> Figure:
    """The median of delays in seconds, as milliseconds."""
    ordered = sorted(1_000 * delay for delay in delays)
    details = {"least": ordered[0], "p90": percentile(ordered, 0.9), "most": ordered[-1], "measured": len(ordered)}
    return Figure(name, percentile(ordered, 0.5), "ms", details=details)
