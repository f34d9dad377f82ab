"""Benchmarks of a single matter: publishing, latency, transfer, consuming, idling, buffering and retention."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.benchmark import Benchmark, duration, option, workers
from eventsql_orchestration.bench.figure import Figure, Sample, quarter_rates, rate
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Session, limit_of, start_publishers
from eventsql_orchestration.errors import BenchmarkError, ValidationError

_NO_RAW_COPY = frozenset({"raw_events"})


@dataclass(frozen=True, kw_only=True)
class Publish(Benchmark):
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
        check_publishers(self.events, self.publishers)

    def measure(self, session: Session) -> list[Figure]:
        return session.beside_raw_copy(lambda: [self._publish(session)])

    def _publish(self, session: Session) -> Figure:
        with (
            session.topic("publish", partitions=self.partitions, storage=self.storage) as topic,
            session.crew() as crew,
        ):
            publishers = start_publishers(
                crew, topic, events=self.events, batch=self.batch, publishers=self.publishers, straight=self.straight
            )
            crew.go()
            outcomes = session.await_outcomes(crew, publishers, events=self.events, step="publishing")

        started, ended = span(outcomes)
        several = "" if self.publishers == 1 else f"_{self.publishers}_publishers"
        buffered = "" if self.straight else "_through_buffer"
        return rate(f"publish{several}{buffered}_batches_of_{self.batch}", self.events / (ended - started))


def span(outcomes: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The start of the first and the end of the last of several processes."""
    return min(each["started"] for each in outcomes), max(each["ended"] for each in outcomes)


def check_publishers(events: int, publishers: int) -> None:
    """Raise `ValidationError` for fewer events than publishers."""
    if events < publishers:
        raise ValidationError(f"{events} events are too few for {publishers} publishers")


@dataclass(frozen=True, kw_only=True)
class Latency(Benchmark):
    """Publish single events at a steady rate: milliseconds from the call of publish to a handler in another process."""

    name = "latency"
    summary = "Time events from publish to handler."
    hidden = _NO_RAW_COPY

    rate: float = option(1_000.0, "Events per second", most=100_000, quick=200.0)
    seconds: float = duration(20.0, "How long", quick=1.0)
    warm_up: float = duration(3.0, "How long before the measurement begins", quick=0.5)
    threads: int = workers(4, "Threads that publish in turns")

    def measure(self, session: Session) -> list[Figure]:
        session.settle()
        length = self.warm_up + self.seconds
        events = max(1, round(self.rate * length))

        with (
            session.topic("latency", partitions=self.partitions, storage=self.storage) as topic,
            session.crew() as crew,
        ):
            consumer = session.consumer(topic)
            publisher = crew.start(
                roles.publish_timed, "the publisher",
                topic=topic, rate=self.rate, events=events, threads=self.threads,
            )  # fmt: skip
            handler = crew.start(
                roles.consume_timed, "the consumer", topic=topic, consumer=consumer, warm_up=self.warm_up
            )
            crew.go()
            session.watch_offsets(
                crew, topic, consumer, events=events, step="publishing one by one", limit=60 + 10 * length, every=0.5
            )
            published = crew.outcome(publisher, limit=60.0)
            taken = crew.stop(handler)

        if not taken["events"]:
            raise BenchmarkError("no event was published after the warm-up: give it more seconds")
        details = {"events": taken["events"], "wanted_rate": self.rate}
        return [
            *(Figure(f"publish_to_handler_{part}", taken[part], "ms") for part in ("p50", "p90", "p99", "max")),
            rate("publish_to_handler_rate", published["rate"], **details),
        ]


@dataclass(frozen=True, kw_only=True)
class Transfer(Benchmark):
    """Transfer out of a buffer that holds many events, and out of a buffer that holds few."""

    name = "transfer"
    summary = "Transfer out of a long and a short buffer."

    events: int = option(5_000_000, "Events in the long buffer", quick=20_000)
    short: int = option(500_000, "Events in the short buffer", quick=5_000)

    def measure(self, session: Session) -> list[Figure]:
        short, long = session.beside_raw_copy(
            lambda: [
                self._transfer(session, "transfer_short_buffer", self.short),
                self._transfer(session, "transfer_long_buffer", self.events),
            ]
        )
        return [short, long, Figure("transfer_long_buffer_ratio", long.value / short.value, "of the short one's")]

    def _transfer(self, session: Session, name: str, events: int) -> Figure:
        with session.topic("transfer", partitions=self.partitions, storage=self.storage) as topic:
            session.fill_buffer(topic, partitions=self.partitions, events=events)
            session.settle()

            with session.crew() as crew:
                transfer = crew.start(roles.transfer_topic, "the transfer", topic=topic)
                samples: list[Sample] = []

                def moved() -> bool:
                    # One writer gives out the ids without gaps, so the newest id is the number of events.
                    samples.append(Sample(time.monotonic(), sum(session.ends(topic))))
                    session.report(f"transferring {events:,} events", min(samples[-1].events, events), events)
                    return transfer.outcome is not None

                crew.go()
                crew.wait(moved, limit=limit_of(events), what="the transfer", every=SAMPLE_SECONDS)
                outcome = crew.outcome(transfer, limit=1.0)

        if outcome["events"] != events:
            raise BenchmarkError(f"the transfer moved {outcome['events']} events of {events}: does another one run?")
        started, ended = outcome["started"], outcome["ended"]
        quarters = quarter_rates(started, [*samples, Sample(ended, events)], events)
        return rate(name, events / (ended - started), events=events, quarters=quarters)


@dataclass(frozen=True, kw_only=True)
class Consume(Benchmark):
    """Consume a full topic: all partitions of a consumer together, and one consumer of the whole topic."""

    name = "consume"
    summary = "Consume by partitions, and as one."

    events: int = option(3_000_000, "Events", quick=20_000)
    processes: int = workers(2, "Processes that share the partitions", quick=1)
    max_events: int = option(5_000, "Events that a handler gets at most")
    rounds: int = option(2, "How often each way is measured", most=100, quick=1)

    def measure(self, session: Session) -> list[Figure]:
        with session.topic("consume", partitions=self.partitions, storage=self.storage) as topic:
            session.fill_log(topic, events=self.events)
            whole, partitions = session.beside_raw_copy(lambda: self._rounds(session, topic))
        ratio = partitions.value / whole.value
        return [whole, partitions, Figure("consume_partitions_ratio", ratio, "of the one consumer's")]

    def _rounds(self, session: Session, topic: str) -> list[Figure]:
        whole, partitions = [], []
        # Both take turns, so that caches and the load of the machine are the same for both.
        for number in range(self.rounds):
            whole.append(self._consume(session, topic, f"whole_{number}", partitioned=False))
            partitions.append(self._consume(session, topic, f"partitioned_{number}", partitioned=True))

        name = f"consume_{self.partitions}_partitions"
        return [
            rate("consume_whole_topic", mean(whole), rounds=self.rounds),
            rate(name, mean(partitions), rounds=self.rounds, processes=self.processes),
        ]

    def _consume(self, session: Session, topic: str, consumer: str, *, partitioned: bool) -> float:
        session.consumer(topic, consumer, partitioned=partitioned)
        step = f"consuming {'by partitions' if partitioned else 'the whole topic'}"

        with session.crew() as crew:
            for number in range(1, (self.processes if partitioned else 1) + 1):
                crew.start(
                    roles.consume, f"consumer {number}", topic=topic, consumer=consumer, max_events=self.max_events
                )
            started = crew.go()
            samples = session.watch_offsets(crew, topic, consumer, events=self.events, step=step, every=0.02)
        return self.events / (samples[-1].at - started)


@dataclass(frozen=True, kw_only=True)
class Idle(Benchmark):
    """Count the statements of a consumer of a topic without new events, per partition and second."""

    name = "idle"
    summary = "Count the statements of an idle consumer."
    hidden = _NO_RAW_COPY

    seconds: float = duration(30.0, "How long", quick=2.0)
    warm_up: float = duration(12.0, "How long before the measurement begins", quick=0.5)

    def measure(self, session: Session) -> list[Figure]:
        with session.topic("idle", partitions=self.partitions, storage=self.storage) as topic, session.crew() as crew:
            consumer = crew.start(
                roles.idle, "the consumer",
                topic=topic, consumer=session.consumer(topic), warm_up=self.warm_up, seconds=self.seconds,
            )  # fmt: skip
            began, length = crew.go(), self.warm_up + self.seconds

            def ended() -> bool:
                session.report("idling", min(round(time.monotonic() - began), round(length)), round(length))
                return consumer.outcome is not None

            crew.wait(ended, limit=length + 60.0, what="the idle consumer")
            outcome = crew.outcome(consumer, limit=1.0)

        rate = outcome["statements"] / outcome["seconds"] / self.partitions
        details = {**outcome, "partitions": self.partitions}
        return [Figure("idle_statements_per_partition", rate, "statements/s", details=details)]


@dataclass(frozen=True, kw_only=True)
class Buffered(Benchmark):
    """Publish single events through the buffered publisher, each acknowledged after its commit.

    It also commits rows one by one over several connections, and counts rows per second. The figure is the fastest run
    with a 99th percentile of at most --most-p99, or else the run with the smallest percentile.
    """

    name = "buffered"
    summary = "Publish single events, many at once."

    in_flight: tuple[int, ...] = option(
        (250, 500, 1_000, 2_000, 4_000),
        "Events that wait for their acknowledgement at once; repeat it to try several",
        quick=(100, 500),
    )
    seconds: float = duration(4.0, "How long each", quick=0.5)
    most_p99: float = option(50.0, "How long acknowledgements may take", least=0.1, most=86_400, metavar="MS")
    connections: int = workers(16, "Connections of the one-row commits", quick=4)

    def measure(self, session: Session) -> list[Figure]:
        return session.beside_raw_copy(lambda: self._compare(session))

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
        with session.raw_table() as table, session.crew() as crew:
            inserter = crew.start(
                roles.insert_rows, "the inserter", table=table, partitions=self.partitions,
                connections=self.connections, seconds=self.seconds,
            )  # fmt: skip
            session.report("commits of one row each", 0, 1)
            crew.go()
            return float(crew.outcome(inserter, limit=60.0 + 2 * self.seconds)["rate"])

    def _acknowledged(self, session: Session, in_flight: int) -> dict[str, Any]:
        with (
            session.topic("buffered", partitions=self.partitions, storage=self.storage) as topic,
            session.crew() as crew,
        ):
            publisher = crew.start(
                roles.publish_buffered, "the publisher", topic=topic, in_flight=in_flight, seconds=self.seconds
            )
            session.report(f"buffered publisher, {in_flight:,} in flight", 0, 1)
            crew.go()
            return {"in_flight": in_flight, **crew.outcome(publisher, limit=60.0 + 2 * self.seconds)}


@dataclass(frozen=True, kw_only=True)
class Retention(Benchmark):
    """Fill a topic, and time how long it takes to lose its oldest half."""

    name = "retention"
    summary = "Let a large topic lose its oldest half."
    hidden = _NO_RAW_COPY

    events: int = option(50_000_000, "Events", quick=20_000)

    @property
    def stored_events(self) -> int:
        return self.events

    def measure(self, session: Session) -> list[Figure]:
        half = self.events // 2
        with session.topic("retention", partitions=self.partitions, storage=self.storage) as topic:
            session.fill_log(topic, events=self.events)
            session.settle()
            session.connection.execute(session.queries("keep_newest"), {"topic": topic, "events": half})

            started = time.monotonic()
            session.platform.retention.run_once([topic])
            elapsed = time.monotonic() - started
            left = session.platform.reader.count(topic)

        if left < half:
            raise BenchmarkError(f"{left} events are left of {self.events}, fewer than one half, which is a defect")
        return [Figure("retention_of_oldest_half", elapsed, "s", details={"events": self.events, "left": left})]
