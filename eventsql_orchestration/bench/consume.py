"""Consuming alone: the partitions of a consumer together, against one consumer that reads the whole topic."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.session import Session, limit_of


@dataclass(frozen=True, slots=True)
class ConsumeSize:
    """How much is consumed, how often by each, and in how many processes the partitions are."""

    events: int = 3_000_000
    partitions: int = 10
    processes: int = 2
    max_events: int = 5_000
    rounds: int = 2


FULL: Final = ConsumeSize()

QUICK: Final = ConsumeSize(events=20_000, processes=1, rounds=1)


def measure(session: Session, size: ConsumeSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    with session.topic("consume", partitions=size.partitions) as topic:
        session.fill_log(topic, events=size.events)
        figures = session.beside_raw_copy(lambda: _contest(session, size, topic))
    ratio = figures[1].value / figures[0].value
    return [*figures, Figure("consume_partitions_ratio", ratio, "of the one consumer's")]


def _contest(session: Session, size: ConsumeSize, topic: str) -> list[Figure]:
    whole: list[float] = []
    partitions: list[float] = []
    # In turns, so that neither has the warmer caches or the calmer machine.
    for number in range(size.rounds):
        whole.append(_run(session, size, topic, f"whole_{number}", partitioned=False))
        partitions.append(_run(session, size, topic, f"partitioned_{number}", partitioned=True))
    details = {"rounds": size.rounds, "processes": size.processes}
    return [
        Figure("consume_whole_topic", mean(whole), EVENTS_PER_SECOND, details={"rounds": size.rounds}),
        Figure(f"consume_{size.partitions}_partitions", mean(partitions), EVENTS_PER_SECOND, details=details),
    ]


def _run(session: Session, size: ConsumeSize, topic: str, consumer: str, *, partitioned: bool) -> float:
    session.consumer(topic, consumer, partitioned=partitioned)
    with session.crew() as crew:
        for number in range(1, (size.processes if partitioned else 1) + 1):
            crew.start(
                "consume", f"consumer {number}", topic=topic, consumer=consumer, max_events=size.max_events,
                polling_delay=None, handler_delay=0.0,
            )  # fmt: skip
        started = crew.go()
        what = f"consuming {'by partitions' if partitioned else 'the whole topic'}"
        samples = session.watch_offsets(
            crew, topic, consumer, events=size.events, limit=limit_of(size.events), what=what, every=0.02
        )
    return size.events / (samples[-1].at - started)
