"""How soon Airflow runs the task of a consumer after a publication, beside the least that Airflow takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from eventsql_orchestration.bench import airflow_redis
from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.figure import Figure, delays
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import MissingExtraError


@dataclass(frozen=True, kw_only=True)
class Airflow(Benchmark):
    """Start a separate Airflow and time it: from publish to the first instruction of the task that consumes.

    In turns with it, the same Airflow runs a second DAG for each line of a file, and a third DAG for each message of
    Redis. The trigger of the second DAG only reads the file, so its time is the least that Airflow takes from an event
    to a task. The third DAG uses Airflow's own provider. Airflow's tables are in a database of their own on this
    server; the benchmark drops it at the end.
    """

    name = "airflow"
    summary = "Time Airflow from publish to task."

    cold: int = option(12, "Runs from rest", quick=1)

    @property
    def remark(self) -> str:
        missing = airflow_redis.missing()
        return f"Airflow's Redis provider is not measured: install {' and '.join(missing)}" if missing else ""

    def measure(self, session: Session) -> list[Figure]:
        """Raises `BenchmarkError` for an Airflow that makes no progress, `MissingExtraError` without Airflow."""
        if importlib.util.find_spec("airflow") is None:
            raise MissingExtraError("airflow", "Airflow")
        # Only these figures need Airflow.
        from eventsql_orchestration.bench import airflow_process  # noqa: PLC0415

        with airflow_process.airflow(session) as running:
            starts = running.cold_starts(self.cold)
        ours = _delays("airflow_cold_start", starts.pop(airflow_process.PUBLISHED))
        others = [_delays(f"airflow_{kind}", those) for kind, those in starts.items()]
        ratios = [
            Figure(f"{ours.name}_to_{kind}", ours.value / other.value, f"of {other.name}")
            for kind, other in zip(starts, others, strict=True)
        ]
        return [ours, *others, *ratios]


def _delays(name: str, starts: Sequence[dict[str, float]]) -> Figure:
    """The median time to the first instruction in milliseconds, with the medians of the steps before it."""
    medians = {f"to_{step}": delays(step, [each[step] for each in starts]).value for step in starts[0]}
    return delays(name, [each["first"] for each in starts], **medians)
