"""Every benchmark by its name, and all figures of a database at the sizes of the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from eventsql_orchestration.bench.airflow import Airflow
from eventsql_orchestration.bench.benchmark import Benchmark, option
from eventsql_orchestration.bench.capture import Capture
from eventsql_orchestration.bench.dagster import Dagster
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.figures import Buffered, Consume, Idle, Latency, Publish, Retention, Transfer
from eventsql_orchestration.bench.queue import QueueBenchmark
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.single import Single
from eventsql_orchestration.bench.spark import Spark
from eventsql_orchestration.bench.store import Store
from eventsql_orchestration.bench.stream import Stream
from eventsql_orchestration.bench.views import ViewsBenchmark


@dataclass(frozen=True, kw_only=True)
class All(Benchmark):
    """Measure the figures that need a database alone, one after the other, at the sizes of docs/benchmarks.md.

    Queues, Spark, Dagster, Airflow and several servers have commands of their own.
    """

    name = "all"
    summary = "Measure the figures that need a database alone."

    quick: bool = option(False, quick=True)
    retention_events: int = option(50_000_000, "Events of the topic that loses its oldest half", quick=20_000)

    @property
    def stored_events(self) -> int:
        return self.retention_events

    @property
    def parts(self) -> list[Benchmark]:
        """The benchmarks of the table, in order."""
        common: dict[str, Any] = {"quick": self.quick, "partitions": self.partitions, "storage": self.storage}
        return [
            Stream.sized(**common),
            Stream.sized(publishers=4, **common),
            Stream.sized(straight=False, hold_xmin=True, **common),
            *(each.sized(**common) for each in (Single, Transfer, Publish, Buffered, Latency, Idle, Consume)),
            Retention.sized(events=self.retention_events, **common),
            *(each.sized(**common) for each in (Capture, Store, ViewsBenchmark)),
        ]

    def measure(self, session: Session) -> list[Figure]:
        return [figure for benchmark in self.parts for figure in benchmark.measure(session)]


_ALONE: Final = (
    Stream,
    Single,
    Publish,
    Latency,
    Transfer,
    Consume,
    Idle,
    Buffered,
    Capture,
    Retention,
    QueueBenchmark,
    Store,
    ViewsBenchmark,
    Spark,
    Dagster,
    Airflow,
)

BENCHMARKS: Final = MappingProxyType({each.name: each for each in (*_ALONE, All)})
