"""The log of a topic: how fast the transfer fills it, and how soon retention removes its oldest half."""

from __future__ import annotations

import time
from dataclasses import dataclass

from eventsql_orchestration.bench.benchmark import BesideRawCopy, OnTopic, check_share, option
from eventsql_orchestration.bench.figure import Figure, Sample, quarter_rates, rate
from eventsql_orchestration.bench.roles import Outcome
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Session, limit_of
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.errors import BenchmarkError, ValidationError


@dataclass(frozen=True, kw_only=True)
class Transfer(OnTopic, BesideRawCopy):
    """Transfer out of a buffer that holds many events, and out of a buffer that holds few."""

    name = "transfer"
    summary = "Transfer out of a long and a short buffer."

    events: int = option(5_000_000, "Events in the long buffer", quick=20_000)
    short: int = option(500_000, "Events in the short buffer", quick=5_000)

    def __post_init__(self) -> None:
        """Raise `ValidationError` unless the short buffer is shorter than the long buffer."""
        if self.short >= self.events:
            raise ValidationError(f"--short must be less than --events: {self.short} and {self.events}")

    def measure(self, session: Session) -> list[Figure]:
        short, long = self.beside_raw_copy(
            session,
            lambda: [
                self._transfer(session, "transfer_short_buffer", self.short),
                self._transfer(session, "transfer_long_buffer", self.events),
            ],
        )
        return [short, long, Figure("transfer_long_buffer_ratio", long.value / short.value, "of the short one's")]

    def _transfer(self, session: Session, name: str, events: int) -> Figure:
        with self.topic(session) as topic:
            session.fill_buffer(topic, partitions=self.partitions, events=events)
            session.settle()

            with session.crew() as crew:
                transfer = crew.start(_transfer, "the transfer", topic)
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


def _transfer(worker: Worker, topic: str) -> Outcome:
    """Transfer the buffered events of one topic, once. Gives the number of events, the start and the end."""
    with worker.platform() as platform:
        platform.open()
        worker.ready()
        started = time.monotonic()
        moved = platform.transfer.run_once([topic])
        return {"events": moved.get(topic, 0), "started": started, "ended": time.monotonic()}


@dataclass(frozen=True, kw_only=True)
class Retention(OnTopic):
    """Fill a topic, and time how long it takes to lose its oldest half."""

    name = "retention"
    summary = "Let a large topic lose its oldest half."

    events: int = option(50_000_000, "Events", quick=20_000)

    def __post_init__(self) -> None:
        """Raise `ValidationError` for a topic without two halves."""
        check_share(self.events, "events", 2, "halves")

    @property
    def stored_events(self) -> int:
        return self.events

    def measure(self, session: Session) -> list[Figure]:
        half = self.events // 2
        with self.topic(session) as topic:
            session.fill_log(topic, events=half)
            # This run closes the segment, and has nothing to remove yet.
            self._retain(session, topic, half)
            session.fill_log(topic, events=self.events - half)
            session.settle()
            elapsed = self._retain(session, topic, half)
            left = session.platform.reader.count(topic)

        if not half <= left < self.events:
            raise BenchmarkError(f"{left} events are left of {self.events}, so the topic did not lose its oldest half")
        return [Figure("retention_of_oldest_half", elapsed, "s", details={"events": self.events, "left": left})]

    def _retain(self, session: Session, topic: str, events: int) -> float:
        """The seconds of a run of retention that leaves the newest `events` events of a topic."""
        set_to = session.queries("keep_newest")
        session.connection.execute(set_to, {"topic": topic, "events": events})
        started = time.monotonic()
        session.platform.retention.run_once([topic])
        elapsed = time.monotonic() - started
        # Publishers, which fill the topic, run retention too.
        session.connection.execute(set_to, {"topic": topic, "events": None})
        return elapsed
