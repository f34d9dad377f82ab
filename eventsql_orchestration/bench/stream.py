"""Publishing and consuming at once: events per second from the first publication to the last committed offset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure, Sample, quarter_rates
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.bench.processor import Meter
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Report, Session, limit_of, watch
from eventsql_orchestration.errors import ValidationError

PACED_BATCH: Final = 100
"""Events per publication where a rate is asked for: a service's batch rather than a loader's."""


@dataclass(frozen=True, slots=True)
class StreamSize:
    """How much is published and consumed at once, and by whom.

    `max_events` is the consumer's. Without `straight` every event goes through the buffer, and a process of its own
    transfers. `hold_xmin` measures it again while another transaction stays open. With `rate` (events per second) it
    takes `seconds`, and `events` is not looked at. `handler_delay`: the handler sleeps for up to so many seconds on
    each batch. None leaves a value to the platform, or to what fits the rate.
    """

    events: int = 3_000_000
    batch: int | None = None
    publishers: int = 1
    consumers: int = 1
    partitions: int = 10
    max_events: int = 5_000
    polling_delay: float | None = None
    straight: bool = True
    hold_xmin: bool = False
    rate: float | None = None
    seconds: float = 60.0
    handler_delay: float = 0.0

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than publishers, and for `hold_xmin` at a rate."""
        if self.total < self.publishers:
            raise ValidationError(f"{self.total} events are too few for {self.publishers} publishers")
        if self.hold_xmin and self.rate is not None:
            raise ValidationError("an open transaction is measured at full speed: leave out the rate, or hold no xmin")

    @property
    def total(self) -> int:
        """The number of events of a run."""
        return self.events if self.rate is None else max(1, round(self.rate * self.seconds))

    @property
    def publication(self) -> int:
        """Events per publication."""
        return self.batch or (5_000 if self.rate is None else PACED_BATCH)

    @property
    def name(self) -> str:
        """The name of the figure."""
        parts = ["publish_and_consume"]
        if self.publishers > 1:
            parts.append(f"{self.publishers}_publishers")
        if not self.straight:
            parts.append("through_buffer")
        if self.rate is not None:
            parts.append(f"at_{self.rate:.0f}")
        return "_".join(parts)


FULL: Final = StreamSize()

QUICK: Final = StreamSize(events=20_000, seconds=2.0)


@dataclass(frozen=True, slots=True)
class Run:
    """What publishing and consuming at once came to.

    `started` and `published` are when the first publication began and the last ended, by `time.monotonic`; `processor`
    is the processor seconds of each kind of process until the last offset, where the system tells.
    """

    events: int
    started: float
    published: float
    samples: Sequence[Sample]
    processor: dict[str, float]

    @property
    def seconds(self) -> float:
        """From the first publication to the last committed offset."""
        return self.samples[-1].at - self.started

    @property
    def per_second(self) -> float:
        """Events published and consumed."""
        return self.events / self.seconds

    @property
    def published_per_second(self) -> float:
        return self.events / (self.published - self.started)

    @property
    def behind(self) -> int:
        """Events that were not consumed yet when the last was published."""
        return self.events - max((each.events for each in self.samples if each.at <= self.published), default=0)

    def details(self) -> dict[str, object]:
        quarters = quarter_rates(self.started, self.samples, self.events)
        return {
            "seconds": self.seconds,
            "published_per_second": self.published_per_second,
            "quarters": quarters,
            "last_quarter_to_first": quarters[3] / quarters[0],
            "behind": self.behind,
            "processor_seconds": self.processor,
        }


def measure(session: Session, size: StreamSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    if size.rate is not None:
        session.settle()
        return _paced(session, size)
    figures = session.beside_raw_copy(lambda: [_figure(size.name, _run(session, size))])
    if size.hold_xmin:
        name = f"{size.name}_xmin_held"
        held = session.beside_raw_copy(lambda: [_figure(name, _run(session, size, hold_xmin=True))])
        ratio = held[0].value / figures[0].value
        figures += [*held, Figure(f"{name}_ratio", ratio, "of the figure without")]
    return figures


def _figure(name: str, run: Run) -> Figure:
    return Figure(name, run.per_second, EVENTS_PER_SECOND, details=run.details())


def _paced(session: Session, size: StreamSize) -> list[Figure]:
    run = _run(session, size)
    return [
        Figure(f"{size.name}_published", run.published_per_second, EVENTS_PER_SECOND),
        Figure(f"{size.name}_consumed", run.per_second, EVENTS_PER_SECOND, details=run.details()),
    ]


def _run(session: Session, size: StreamSize, *, hold_xmin: bool = False) -> Run:
    with session.topic("stream", partitions=size.partitions) as topic, session.crew() as crew:
        consumer = session.consumer(topic)
        with session.holding_xmin() if hold_xmin else nullcontext():
            return play(
                crew, size, topic, consumer, consumed=lambda: session.consumed(topic, consumer), report=session.report
            )


def play(
    crew: Crew,
    size: StreamSize,
    topic: str,
    consumer: str,
    *,
    consumed: Callable[[], int],
    report: Report,
    servers: Sequence[int] = (),
) -> Run:
    """Publish and consume with the processes of `crew`, until `consumed` gives all events.

    `servers` are the process ids of the database servers, where they are the benchmark's own. Each is asked for
    offsets the less often the more there are, so that this costs the same. Raises `BenchmarkError`.
    """
    events, label = size.total, "publishing and consuming"
    shares = [events // size.publishers + (n < events % size.publishers) for n in range(size.publishers)]
    publishers = [
        crew.start(
            "publish", f"publisher {number}", topic=topic, events=share, batch=size.publication, seed=number,
            straight=size.straight, transfer=size.straight,
            rate=None if size.rate is None else size.rate / size.publishers,
        )
        for number, share in enumerate(shares, start=1)
    ]  # fmt: skip
    others = {
        "consumers": [
            crew.start(
                "consume", f"consumer {number}", topic=topic, consumer=consumer, max_events=size.max_events,
                polling_delay=size.polling_delay, handler_delay=size.handler_delay,
            )
            for number in range(1, size.consumers + 1)
        ],
        "transfers": [] if size.straight else [crew.start("transfer", "the transfer")],
    }  # fmt: skip
    crew.ready()
    processes = {"publishers": publishers, **others}
    meter = Meter(
        {
            **{kind: [each.process.pid for each in members] for kind, members in processes.items() if members},
            **({"servers": servers} if servers else {}),
        }
    )
    crew.go()
    limit = limit_of(events) + (size.seconds if size.rate is not None else 0.0)
    every = SAMPLE_SECONDS * max(1, len(servers))
    samples = watch(crew, consumed, events=events, limit=limit, what=label, report=report, every=every)
    processor = meter.taken()
    outcomes = [crew.outcome(publisher, limit=60.0) for publisher in publishers]
    return Run(
        events, min(each["started"] for each in outcomes), max(each["ended"] for each in outcomes), samples, processor
    )
