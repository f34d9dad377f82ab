"""Every benchmark, and the whole table: every figure at the sizes of the documentation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from eventsql_orchestration.bench.airflow import Airflow
from eventsql_orchestration.bench.benchmark import Benchmark, BesideRawCopy, OnTopic, option
from eventsql_orchestration.bench.capture import Capture
from eventsql_orchestration.bench.consuming import Consume, Idle
from eventsql_orchestration.bench.dagster import Dagster
from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.latency import Latency
from eventsql_orchestration.bench.log import Retention, Transfer
from eventsql_orchestration.bench.publishing import Buffered, Publish
from eventsql_orchestration.bench.queue import QueueBenchmark
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.spark import Spark
from eventsql_orchestration.bench.store import Store
from eventsql_orchestration.bench.stream import Single, Stream
from eventsql_orchestration.bench.views import ViewsBenchmark


@dataclass(frozen=True, kw_only=True)
class All(OnTopic, BesideRawCopy):
    """Measure every figure that needs no other program, at the sizes of docs/benchmarks.md, one after the other.

    The commands `spark`, `dagster` and `airflow` measure beside these programs; `stream --shards` and `stream --rate`
    are for special questions.
    """

    name = "all"
    summary = "Measure the whole table."

    quick: bool = option(False, quick=True)
    retention_events: int = option(50_000_000, "Events of the topic that loses its oldest half", quick=20_000)

    @property
    def stored_events(self) -> int:
        return self.retention_events

    @property
    def parts(self) -> list[Benchmark]:
        return [
            self._sized(Stream),
            self._sized(Stream, publishers=4),
            self._sized(Stream, straight=False, hold_xmin=True),
            *self._all_sized(Single, Transfer, Publish, Buffered, Latency, Idle, Consume),
            self._sized(Retention, events=self.retention_events),
            *self._all_sized(Capture, QueueBenchmark, Store, ViewsBenchmark),
        ]

    def measure(self, session: Session) -> list[Figure]:
        return [figure for benchmark in self.parts for figure in benchmark.measure(session)]

    def _all_sized(self, *benchmarks: type[Benchmark]) -> list[Benchmark]:
        return [self._sized(each) for each in benchmarks]

    def _sized(self, benchmark: type[Benchmark], **given: Any) -> Benchmark:
        """A benchmark with these options as far as it has them."""
        common = {each.name for each in (*fields(OnTopic), *fields(BesideRawCopy))}
        shared = {each.name: getattr(self, each.name) for each in fields(benchmark) if each.name in common}
        return benchmark.sized(quick=self.quick, **shared, **given)


BENCHMARKS: Final[tuple[type[Benchmark], ...]] = (
    Stream, Single, Publish, Latency, Transfer, Consume, Idle, Buffered, Capture, Retention, QueueBenchmark, Store,
    ViewsBenchmark, Spark, Dagster, Airflow, All,
)  # fmt: skip
