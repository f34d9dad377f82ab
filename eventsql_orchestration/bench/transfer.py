"""Transferring alone: events per second out of a long buffer, and whether a short one is left any faster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure, Sample, quarter_rates
from eventsql_orchestration.bench.session import SAMPLE_SECONDS, Session, limit_of
from eventsql_orchestration.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class TransferSize:
    """How many events lie in the long buffer, and how many in the short one."""

    events: int = 5_000_000
    short: int = 500_000
    partitions: int = 10


FULL: Final = TransferSize()

QUICK: Final = TransferSize(events=20_000, short=5_000)


def measure(session: Session, size: TransferSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    figures = session.beside_raw_copy(
        lambda: [
            _run(session, "transfer_short_buffer", size.short, size.partitions),
            _run(session, "transfer_long_buffer", size.events, size.partitions),
        ]
    )
    return [*figures, Figure("transfer_long_buffer_ratio", figures[1].value / figures[0].value, "of the short one's")]


def _run(session: Session, name: str, events: int, partitions: int) -> Figure:
    with session.topic("transfer", partitions=partitions) as topic:
        session.fill_buffer(topic, partitions=partitions, events=events)
        session.settle()
        with session.crew() as crew:
            transfer = crew.start("transfer_topic", "the transfer", topic=topic)
            samples: list[Sample] = []

            def moved() -> bool:
                # Ids are given out by one writer in a row, so the newest is the number of events.
                row = session.connection.execute(session.queries("newest", topic=topic)).fetchone()
                assert row is not None, "an aggregate gives one row"
                samples.append(Sample(time.monotonic(), int(row[0])))
                session.report(f"transferring {events:,} events", min(samples[-1].events, events), events)
                return transfer.outcome is not None

            crew.go()
            crew.wait(moved, limit=limit_of(events), what="the transfer", every=SAMPLE_SECONDS)
            outcome = crew.outcome(transfer, limit=1.0)
    if outcome["events"] != events:
        raise BenchmarkError(f"the transfer moved {outcome['events']} events of {events}: does another one run?")
    seconds = outcome["ended"] - outcome["started"]
    quarters = quarter_rates(outcome["started"], [*samples, Sample(outcome["ended"], events)], events)
    return Figure(name, events / seconds, EVENTS_PER_SECOND, details={"events": events, "quarters": quarters})
