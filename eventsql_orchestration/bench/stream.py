"""Publishing and consuming at once: events per second from the first publication to the last committed offset."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.benchmark import Benchmark, Site, duration, option, workers
from eventsql_orchestration.bench.figure import Figure, Sample, quarter_rates, rate
from eventsql_orchestration.bench.figures import check_publishers, span
from eventsql_orchestration.bench.processor import Meter, parent
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Session, limit_of, start_publishers
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import COMPRESSIONS, UNCOMPRESSED

_PROCESSOR_UNIT: Final = "CPU µs per event"
_DISK_UNIT: Final = "bytes per event"


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one run of publishing and consuming at once.

    `started` is the start of the first publication and `published` the end of the last, by `time.monotonic`.
    `of_shards` is the number of events on each shard. `processor` is the processor seconds of each kind of process
    until the last offset, if the system tells them. `disk` is the bytes of the log with its indexes.
    """

    events: int
    started: float
    published: float
    samples: Sequence[Sample]
    of_shards: Sequence[int]
    processor: dict[str, float]
    disk: int

    @property
    def seconds(self) -> float:
        """Seconds from the first publication to the last committed offset."""
        return self.samples[-1].at - self.started

    @property
    def published_per_second(self) -> float:
        return self.events / (self.published - self.started)

    def figure(self, name: str) -> Figure:
        """Events published and consumed per second. `behind` events were not consumed when the last was published."""
        quarters = quarter_rates(self.started, self.samples, self.events)
        behind = self.events - max((each.events for each in self.samples if each.at <= self.published), default=0)
        return rate(
            name, self.events / self.seconds, seconds=self.seconds, published_per_second=self.published_per_second,
            quarters=quarters, last_quarter_to_first=quarters[3] / quarters[0], behind=behind,
            processor_seconds=self.processor,
        )  # fmt: skip

    def figures(self, name: str) -> list[Figure]:
        """The rate, the processor time of an event in all processes if the system tells it, and its disk."""
        costs = {kind: seconds / self.events * 1e6 for kind, seconds in self.processor.items()}
        processor = Figure(f"{name}_processor", sum(costs.values()), _PROCESSOR_UNIT, details=costs)
        disk = Figure(f"{name}_disk", self.disk / self.events, _DISK_UNIT)
        return [self.figure(name), *([processor] if costs else []), disk]


@dataclass(frozen=True, kw_only=True)
class Stream(Benchmark):
    """Publish and consume at once: events per second until the last offset is committed, and in each quarter.

    With --rate it reproduces the table of EventSQL's own benchmark: events published and consumed per second when N
    are offered for a minute. The consumer there slept 1 to 100 ms on each batch: --handler-delay 100.

    With --shards it starts servers on this machine. It measures with one server, with two and so on, each beside the
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
        0.0, "The handler sleeps for up to so many milliseconds on each batch",
        least=0, most=60_000, metavar="MS", scale=0.001,
    )  # fmt: skip
    compression: str = option(UNCOMPRESSED, "How the blocks of the topic are compressed", choices=COMPRESSIONS)
    shards: int | None = option(
        None, "On 1, 2, … N embedded servers of its own, here, instead of the database", kind=int, most=16
    )

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than publishers, and for sizes that contradict each other."""
        check_publishers(self.total, self.publishers)
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
        """The number of events of a run."""
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
            run = self._run(session)
            return [rate(f"{name}_published", run.published_per_second), run.figure(f"{name}_consumed")]

        figures = session.beside_raw_copy(lambda: self._run(session).figures(name))
        if self.hold_xmin:
            held_name = f"{name}_xmin_held"
            held = session.beside_raw_copy(lambda: self._run(session, hold_xmin=True).figures(held_name))
            ratio = held[0].value / figures[0].value
            figures += [*held, Figure(f"{held_name}_ratio", ratio, "of the figure without")]
        return figures

    def _run(self, session: Session, *, hold_xmin: bool = False, servers: Sequence[int] = ()) -> Run:
        """Publish and consume all events once.

        `servers` are the process ids of the database servers to meter; by default the session's, if it runs here.
        """
        events = self.total
        stored = {"storage": self.storage, "compression": self.compression}
        with session.topic("stream", partitions=self.partitions, **stored) as topic, session.crew() as crew:
            consumer = session.consumer(topic)
            processes = {
                "publishers": start_publishers(
                    crew, topic, events=events, batch=self.batch or (5_000 if self.rate is None else 100),
                    publishers=self.publishers, straight=self.straight, transfer=self.straight, rate=self.rate,
                ),
                "consumers": [
                    crew.start(
                        roles.consume, f"consumer {number}", topic=topic, consumer=consumer,
                        max_events=self.max_events, polling_delay=self.polling_delay, handler_delay=self.handler_delay,
                    )
                    for number in range(1, self.consumers + 1)
                ],
                "transfers": [] if self.straight else [crew.start(roles.transfer, "the transfer")],
            }  # fmt: skip
            crew.ready()
            pids = {kind: [each.process.pid for each in members] for kind, members in processes.items()}
            if not servers:
                server = parent(session.connection.info.backend_pid)
                servers = [] if server is None else [server]
            meter = Meter({kind: each for kind, each in {**pids, "servers": servers}.items() if each})

            with session.holding_xmin() if hold_xmin else nullcontext():
                crew.go()
                samples = session.watch_offsets(
                    crew, topic, consumer, events=events, step="publishing and consuming",
                    limit=limit_of(events) + (0.0 if self.rate is None else self.seconds),
                    # With more servers, each server is asked less often: the cost stays the same.
                    every=SAMPLE_SECONDS * max(1, len(servers)),
                )  # fmt: skip
            processor = meter.taken()
            of_shards = session.numbers("consumed", {"topic": topic, "consumer": consumer})
            disk = session.disk(topic)
            outcomes = [crew.outcome(publisher, limit=60.0) for publisher in processes["publishers"]]

        return Run(events, *span(outcomes), samples, of_shards, processor, disk)

    # On servers of its own

    @property
    def remark(self) -> str:
        shared = (
            "all servers and processes share this machine's CPUs: the figures show the cost of shards, not the gain"
        )
        return "" if self.shards is None else shared

    def run(self, site: Site) -> tuple[list[Figure], dict[str, Any]]:
        if self.shards is None:
            return super().run(site)

        measured, environment = [], {}
        with _servers(site.home / "bench-shards", self.shards) as servers:
            for number in range(1, self.shards + 1):
                dsns = [server.create_database(f"of_{number}") for server in list(servers)[:number]]
                with (
                    EventSQL(*dsns, transfer=False) as platform,
                    site.session(platform.open(), self.raw_events) as session,
                ):
                    measured.append(self._on_shards(session, list(servers.values())[:number]))
                    environment = session.describe()

        ratios = [
            Figure(f"{figure.name}_to_1", figure.value / one.value, f"of that of one server ({one.unit})")
            for figures in measured[1:]
            for figure, one in zip(figures, measured[0], strict=True)
        ]
        figures = [figure for figures in measured for figure in figures]
        return [*figures, *ratios], {**environment, "benchmark": asdict(self)}

    def _on_shards(self, session: Session, pids: Sequence[int]) -> list[Figure]:
        """The rate of this number of servers, and the processor time per event."""
        name = f"{self.figure_name}_{len(pids)}_shard{'s' if len(pids) > 1 else ''}"

        def measure() -> list[Figure]:
            run = self._run(session, servers=pids)
            figure, *costs = run.figures(name)
            of_shards = {"of_shards": [events / run.seconds for events in run.of_shards]}
            return [replace(figure, details={**figure.details, **of_shards}), *costs]

        if self.rate is None:
            return session.beside_raw_copy(measure)
        # An offered rate has no ratio to the raw COPY rate, which is a server's maximum.
        session.settle()
        return measure()


@contextmanager
def _servers(home: Path, number: int) -> Iterator[dict[EmbeddedPostgres, int]]:
    """Embedded servers in `home`, with their process ids. They are gone after the block."""
    servers = [EmbeddedPostgres(home / f"server-{each}") for each in range(1, number + 1)]
    try:
        yield {server: server.start().pid for server in servers}
    finally:
        for server in servers:
            server.destroy()
        shutil.rmtree(home, ignore_errors=True)
