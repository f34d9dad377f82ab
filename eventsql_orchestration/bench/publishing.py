"""Publishing without consumers: in batches, and one by one through the buffered publisher."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from statistics import mean
from typing import Any

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.benchmark import BesideRawCopy, OnTopic, check_share, duration, option, workers
from eventsql_orchestration.bench.figure import Figure, percentiles, rate, span
from eventsql_orchestration.bench.roles import Outcome, at_once
from eventsql_orchestration.bench.session import Session, limit_of, start_publishers
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.database import Queries
from eventsql_orchestration.publishing.buffered import Acknowledgement
from eventsql_orchestration.topics.partitioner import default_partition


@dataclass(frozen=True, kw_only=True)
class Publish(OnTopic, BesideRawCopy):
    """Publish in batches, without consumers: committed events per second."""

    name = "publish"
    summary = "Publish in batches, without consumers."

    events: int = option(1_000_000, "Events", quick=20_000)
    batch: int = option(1_000, "Events per publication")
    publishers: int = workers(1, "Processes that publish")
    straight: bool = option(
        True, "Every event goes through the buffer, none straight into the log", flag="--through-buffer"
    )

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than publishers."""
        check_share(self.events, "events", self.publishers, "publishers")

    def measure(self, session: Session) -> list[Figure]:
        return self.beside_raw_copy(session, lambda: [self._publish(session)])

    def _publish(self, session: Session) -> Figure:
        with self.topic(session) as topic, session.crew() as crew:
            publishers = start_publishers(
                crew, topic, events=self.events, batch=self.batch, publishers=self.publishers, straight=self.straight
            )
            crew.go()
            outcomes = crew.outcomes(publishers, events=self.events, step="publishing", limit=limit_of(self.events))

        started, ended = span(outcomes)
        several = "" if self.publishers == 1 else f"_{self.publishers}_publishers"
        buffered = "" if self.straight else "_through_buffer"
        return rate(f"publish{several}{buffered}_batches_of_{self.batch}", self.events / (ended - started))


@dataclass(frozen=True, kw_only=True)
class Buffered(OnTopic, BesideRawCopy):
    """Publish single events through the buffered publisher, each acknowledged after its commit.

    It also commits rows one by one over several connections, and counts rows per second. The figure is the fastest run
    with a 99th percentile of at most --most-p99, or else the run with the smallest percentile.
    """

    name = "buffered"
    summary = "Publish single events, many at once."

    in_flight: tuple[int, ...] = option(
        (250, 500, 750, 1_000, 1_500, 2_000),
        "Events that wait for their acknowledgement at once; repeat it to try several",
        quick=(100, 500),
    )
    seconds: float = duration(4.0, "How long each", quick=0.5)
    most_p99: float = option(50.0, "How long acknowledgements may take", least=0.1, most=86_400, metavar="MS")
    connections: int = workers(16, "Connections of the one-row commits", quick=4)

    def measure(self, session: Session) -> list[Figure]:
        return self.beside_raw_copy(session, lambda: self._compare(session))

    def _compare(self, session: Session) -> list[Figure]:
        before = self._one_row_commits(session)
        tried = [self._acknowledged(session, number) for number in self.in_flight]
        rows = mean((before, self._one_row_commits(session)))

        kept = [each for each in tried if each["p99"] <= self.most_p99]
        best = max(kept, key=lambda each: each["rate"]) if kept else min(tried, key=lambda each: each["p99"])
        chosen = {"in_flight": best["in_flight"], "most": self.most_p99, "kept": bool(kept)}
        return [
            rate(f"one_row_commits_{self.connections}_connections", rows),
            rate("buffered_publish", best["rate"], tried=tried),
            Figure("buffered_publish_p99", best["p99"], "ms", details=chosen),
            Figure("buffered_publish_ratio", best["rate"] / rows, "times the one-row commits"),
        ]

    def _one_row_commits(self, session: Session) -> float:
        with session.raw_table() as table:
            return float(self._outcome(session, "commits of one row each", self._insert_rows, table)["rate"])

    def _acknowledged(self, session: Session, in_flight: int) -> Outcome:
        with self.topic(session) as topic:
            step = f"buffered publisher, {in_flight:,} in flight"
            outcome = self._outcome(session, step, self._publish_buffered, topic, in_flight)
            return {"in_flight": in_flight, **outcome}

    def _outcome(self, session: Session, step: str, role: Callable[..., Outcome], *arguments: Any) -> Outcome:
        session.report(step, 0, 1)
        with session.crew() as crew:
            process = crew.start(role, step, *arguments)
            crew.go()
            return crew.outcome(process, limit=60.0 + 2 * self.seconds)

    # The roles of processes

    def _insert_rows(self, worker: Worker, table: str) -> Outcome:
        """Commit single rows into a table like the buffer over several connections. Gives rows per second."""
        statement = Queries("bench", worker.schema)("insert_raw", table=table)
        rows = [
            {
                "topic": table,
                "partition": default_partition(each, self.partitions),
                "key": each.key,
                "value": each.value,
            }
            for each in workload.publications(table, 10_000)
        ]
        with worker.platform() as platform:
            opened = [platform.database.dedicated() for _ in range(self.connections)]
            counts = [0] * self.connections

            def insert(number: int) -> None:
                while time.monotonic() < started + self.seconds:
                    row = rows[(counts[number] * self.connections + number) % len(rows)]
                    opened[number].execute(statement, row)
                    counts[number] += 1

            worker.ready()
            started = time.monotonic()
            elapsed = at_once(self.connections, insert)
            for connection in opened:
                connection.close()
        return {"rate": sum(counts) / elapsed}

    def _publish_buffered(self, worker: Worker, topic: str, in_flight: int) -> Outcome:
        """Publish single events through the buffered publisher, with a bounded number of unacknowledged events.

        Gives acknowledged events per second, and the percentiles of the time to the acknowledgement in milliseconds.
        """
        pool = workload.publications(topic)
        taken: list[float] = []
        failures: list[BaseException] = []
        # A semaphore is Python code: it would take a quarter of the process's time.
        free: SimpleQueue[None] = SimpleQueue()
        for _ in range(in_flight):
            free.put(None)

        def acknowledged(called: int, future: Acknowledgement) -> None:
            if (error := future.exception()) is not None:
                failures.append(error)
            taken.append((time.perf_counter_ns() - called) / 1e6)
            free.put(None)

        with worker.platform(transfer=True) as platform:
            platform.registry.cached_topic(topic)
            with platform.buffered_publisher() as publisher:
                worker.ready()
                started = time.monotonic()
                for publication in cycle(pool):
                    if time.monotonic() - started > self.seconds:
                        break
                    free.get()
                    publisher.publish(publication).add_done_callback(partial(acknowledged, time.perf_counter_ns()))
                for _ in range(in_flight):
                    free.get()
                elapsed = time.monotonic() - started

        if failures:
            raise failures[0]
        return {"rate": len(taken) / elapsed, **percentiles(taken)}
