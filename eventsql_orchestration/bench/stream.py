"""Publishing and consuming at once, in batches or one event per commit.

A rate is the number of events divided by the time from the first publication to the last committed offset.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

from eventsql_orchestration.bench import roles, workload
from eventsql_orchestration.bench.benchmark import (
    BesideRawCopy,
    OnTopic,
    Open,
    check_share,
    connected,
    duration,
    option,
    workers,
)
from eventsql_orchestration.bench.figure import PROCESSOR, Figure, quarter_rates, rate, span
from eventsql_orchestration.bench.processes import Crew, Report, WorkerProcess
from eventsql_orchestration.bench.roles import at_once
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Session, limit_of, start_publishers, uninterrupted
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import BenchmarkError, ValidationError
from eventsql_orchestration.model import COMPRESSIONS, UNCOMPRESSED
from eventsql_orchestration.orchestration.local_processes import lock_file, try_lock


@dataclass(frozen=True, kw_only=True)
class Stream(OnTopic, BesideRawCopy):
    """Publish and consume at once: events per second until the last offset is committed, and in each quarter.

    With --rate, it reproduces the table of EventSQL's own benchmark: events published and consumed per second when N
    are offered for a minute. The consumer there slept 1 to 100 ms on each batch: --handler-delay 100.

    With --shards, it starts servers on this machine. It measures with one server, with two and so on, each beside the
    raw COPY rate of the same number of servers, or at the same --rate. The servers share the machine's processors, disk
    and memory: the figures show the cost of shards in rate and processor time, and not the gain of further machines.
    """

    name = "stream"
    summary = "Publish and consume at once."

    events: int = option(3_000_000, "Events", quick=20_000)
    batch: int | None = option(None, "Events per publication  [default: 5,000; with --rate 100]", kind=int)
    publishers: int = workers(1, "Processes that publish")
    consumers: int = workers(1, "Processes that consume")
    max_events: int = option(5_000, "Events that a handler gets at most")
    polling_delay: float | None = option(
        None, "Polling delay of the consumer  [default: its own]", kind=float, least=0.001, metavar="SECONDS"
    )
    straight: bool = option(
        True, "Every event goes through the buffer, none straight into the log", flag="--through-buffer"
    )
    hold_xmin: bool = option(False, "Measure it again while another transaction stays open")
    rate: float | None = option(None, "Offer N events per second instead", kind=float)
    seconds: float = duration(60.0, "How long, with --rate", quick=2.0)
    handler_delay: float = option(
        0.0, "The handler sleeps for up to MS milliseconds on each batch",
        least=0, most=60_000, metavar="MS",
    )  # fmt: skip
    compression: str = option(UNCOMPRESSED, "How the blocks of the topic are compressed", choices=COMPRESSIONS)
    shards: int | None = option(
        None, "On 1, 2, … N embedded servers of its own, here, instead of the database", kind=int, most=16
    )

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than publishers, and for sizes that contradict each other."""
        check_share(self.total, "events", self.publishers, "publishers")
        if self.hold_xmin and self.rate is not None:
            raise ValidationError("--hold-xmin is measured at full speed: leave out --rate")
        if self.hold_xmin and self.shards is not None:
            raise ValidationError("--shards is measured with nothing else open: leave out --hold-xmin")

    @classmethod
    def sized(cls, *, quick: bool = False, **given: Any) -> Self:
        if "rate" not in given and "seconds" in given:
            raise ValidationError("--seconds is for --rate; without it, --events says when it ends")
        if "rate" in given and "events" in given:
            raise ValidationError("with --rate, --seconds says when it ends: leave out --events")
        return super().sized(quick=quick, **given)

    @property
    def total(self) -> int:
        return self.events if self.rate is None else max(1, round(self.rate * self.seconds))

    @property
    def figure_name(self) -> str:
        several = f"_{self.publishers}_publishers" if self.publishers > 1 else ""
        buffered = "" if self.straight else "_through_buffer"
        return f"publish_and_consume{several}{buffered}{'' if self.rate is None else f'_at_{self.rate:.0f}'}"

    def measure(self, session: Session) -> list[Figure]:
        name = self.figure_name
        if self.rate is not None:
            session.settle()
            consumed, *_ = self._run(session, f"{name}_consumed")
            return [rate(f"{name}_published", consumed.details["published_per_second"]), consumed]

        figures = self.beside_raw_copy(session, lambda: self._run(session, name))
        if self.hold_xmin:
            held_name = f"{name}_xmin_held"
            held = self.beside_raw_copy(session, lambda: self._run(session, held_name, hold_xmin=True))
            ratio = held[0].value / figures[0].value
            figures += [*held, Figure(f"{held_name}_ratio", ratio, "of the figure without")]
        return figures

    def _run(self, session: Session, name: str, *, hold_xmin: bool = False) -> list[Figure]:
        """Publish and consume all events once.

        Gives the rate, the processor time of an event in all processes if the system tells it, and its disk.
        """
        events = self.total
        with self.topic(session, compression=self.compression) as topic, session.crew() as crew:
            consumer = session.consumer(topic)
            processes = self._start(crew, topic, consumer)
            crew.ready()
            meter = session.meter(**processes)

            with session.holding_xmin() if hold_xmin else nullcontext():
                crew.go()
                samples = session.watch_offsets(
                    crew, topic, consumer, events=events, step="publishing and consuming",
                    limit=limit_of(events) + (0.0 if self.rate is None else self.seconds),
                    # With more servers, each server is asked less often: the cost stays the same.
                    every=SAMPLE_SECONDS * len(session.connections),
                )  # fmt: skip
            costs = meter.per_event(events)
            shards = session.consumed(topic, consumer)
            disk = session.disk(topic)
            started, published = span([crew.outcome(each, limit=60.0) for each in processes["publishers"]])

        # At an offered rate, the last batch has its share of the time, although it is consumed before.
        seconds = max(samples[-1].at, published) - started
        quarters = quarter_rates(started, samples, events)
        behind = events - max((each.events for each in samples if each.at <= published), default=0)
        figure = rate(
            name, events / seconds, seconds=seconds, published_per_second=events / (published - started),
            quarters=quarters, last_quarter_to_first=quarters[3] / quarters[0], behind=behind,
            processor_microseconds=costs, **({"of_shards": [each / seconds for each in shards]} if self.shards else {}),
        )  # fmt: skip
        processor = Figure(f"{name}_processor", sum(costs.values()), PROCESSOR, details=costs)
        return [figure, *([processor] if costs else []), Figure(f"{name}_disk", disk / events, "bytes per event")]

    def _start(self, crew: Crew, topic: str, consumer: str) -> dict[str, list[WorkerProcess]]:
        return {
            "publishers": start_publishers(
                crew, topic, events=self.total, batch=self.batch or (5_000 if self.rate is None else 100),
                publishers=self.publishers, straight=self.straight, transfer=self.straight, rate=self.rate,
            ),
            "consumers": [
                crew.start(
                    roles.consume, f"consumer {number}", topic, consumer, max_events=self.max_events,
                    polling_delay=self.polling_delay, handler_delay=self.handler_delay / 1_000,
                )
                for number in range(1, self.consumers + 1)
            ],
            "transfers": [] if self.straight else [crew.start(roles.transfer, "the transfer")],
        }  # fmt: skip

    # On servers of its own

    @property
    def remark(self) -> str:
        shared = (
            "all servers and processes share this machine's CPUs: the figures show the cost of shards, not the gain"
        )
        return "" if self.shards is None else shared

    def run(self, open_platform: Open, *, home: Path, report: Report) -> tuple[list[Figure], dict[str, Any]]:
        if self.shards is None:
            return super().run(open_platform, home=home, report=report)

        measured, environment = [], {}
        with _servers(home / "bench-shards", self.shards) as servers:
            for number in range(1, self.shards + 1):
                dsns = [server.create_database(f"of_{number}") for server in servers[:number]]
                with (
                    EventSQL(*dsns, transfer=False) as platform,
                    Session(platform.open(), home=home, report=report) as session,
                ):
                    measured.append(self._on_shards(session))
                    environment = session.describe()

        ratios = [
            Figure(f"{figure.name}_to_1", figure.value / one.value, f"of that of one server ({one.unit})")
            for figures in measured[1:]
            for figure, one in zip(figures, measured[0], strict=True)
        ]
        return [*chain(*measured), *ratios], {**environment, "benchmark": asdict(self)}

    def _on_shards(self, session: Session) -> list[Figure]:
        """The rate of this number of servers, and the processor time per event."""
        shards = len(session.connections)
        name = f"{self.figure_name}_{shards}_shard{'s' if shards > 1 else ''}"
        if self.rate is None:
            return self.beside_raw_copy(session, lambda: self._run(session, name))
        # An offered rate has no ratio to the raw COPY rate, which is a server's maximum.
        session.settle()
        return self._run(session, name)


@contextmanager
def _servers(home: Path, number: int) -> Iterator[list[EmbeddedPostgres]]:
    """Embedded servers in `home`, removed after the block. Servers of a killed benchmark are removed before it."""
    home.mkdir(parents=True, exist_ok=True)
    with lock_file(home / "lock") as lock:
        if not try_lock(lock):
            raise BenchmarkError(f"another benchmark has its servers in {home}: wait for its end")
        try:
            _destroy(home)
            yield [EmbeddedPostgres(home / f"server-{each}") for each in range(1, number + 1)]
        finally:
            with uninterrupted():
                _destroy(home)
                shutil.rmtree(home, ignore_errors=True)


def _destroy(home: Path) -> None:
    for directory in home.glob("server-*"):
        EmbeddedPostgres(directory).destroy()


@dataclass(frozen=True, kw_only=True)
class Single(OnTopic, BesideRawCopy):
    """Publish one event per commit from the threads of one process, and consume at once in another process.

    The publisher's process also transfers, as by default. The processor time of the server is measured where the server
    runs on this machine.
    """

    name = "single"
    summary = "Publish one event per commit, and consume at once."

    events: int = option(60_000, "Events", quick=2_000)
    threads: int = connected(16, "Threads that publish")

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than threads."""
        check_share(self.events, "events", self.threads, "threads")

    def measure(self, session: Session) -> list[Figure]:
        return self.beside_raw_copy(session, lambda: self._run(session))

    def _run(self, session: Session) -> list[Figure]:
        with self.topic(session) as topic, session.crew() as crew:
            consumer = session.consumer(topic)
            publisher = crew.start(self._publish, "the publisher", topic)
            handler = crew.start(roles.consume, "the consumer", topic, consumer, max_events=1_000)
            crew.ready()
            meter = session.meter(publisher=[publisher], consumer=[handler])

            crew.go()
            samples = session.watch_offsets(
                crew, topic, consumer, events=self.events, step="publishing one event per commit",
                limit=60.0 + self.events / 100,
            )  # fmt: skip
            costs = meter.per_event(self.events)
            published = crew.stop(publisher)

        name, elapsed = "one_event_per_commit", samples[-1].at - published["started"]
        return [
            rate(name, self.events / elapsed, seconds=elapsed, threads=self.threads),
            *(Figure(f"{name}_{kind.removesuffix('s')}", cost, PROCESSOR) for kind, cost in costs.items()),
        ]

    def _publish(self, worker: Worker, topic: str) -> roles.Outcome:
        """Publish one event per commit, by threads that share the events. Gives the start."""
        pool = workload.publications(topic, min(self.events, workload.POOL))
        with worker.platform(transfer=True) as platform:
            platform.registry.cached_topic(topic)
            # Each thread has its connection before the clock starts.
            with ExitStack() as opened:
                for _ in range(self.threads):
                    opened.enter_context(platform.database.connection())

            def publish_share(first: int) -> None:
                for position in range(first, self.events, self.threads):
                    platform.publisher.publish(pool[position % len(pool)])

            worker.ready()
            started = time.monotonic()
            at_once(self.threads, publish_share)
            worker.stopped.wait()
        return {"started": started}
