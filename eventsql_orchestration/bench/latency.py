"""How long an event takes from the call of `publish` in one process to the handler in another, at a steady rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class LatencySize:
    """Events per second, for how many seconds after those of the warm-up, which do not count.

    They are published by `threads` of one process in turns.
    """

    rate: float = 1_000.0
    seconds: float = 20.0
    warm_up: float = 3.0
    threads: int = 4
    partitions: int = 10


FULL: Final = LatencySize()

QUICK: Final = LatencySize(rate=200.0, seconds=1.0, warm_up=0.5)


def measure(session: Session, size: LatencySize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    session.settle()
    events = max(1, round(size.rate * (size.warm_up + size.seconds)))
    with session.topic("latency", partitions=size.partitions) as topic, session.crew() as crew:
        consumer = session.consumer(topic)
        publisher = crew.start(
            "publish_timed", "the publisher", topic=topic, rate=size.rate, events=events, threads=size.threads
        )
        handler = crew.start("consume_timed", "the consumer", topic=topic, consumer=consumer, warm_up=size.warm_up)
        crew.go()
        limit = 60.0 + 10 * (size.warm_up + size.seconds)
        session.watch_offsets(
            crew, topic, consumer, events=events, limit=limit, what="publishing one by one", every=0.5
        )
        published = crew.outcome(publisher, limit=60.0)
        taken = crew.stop(handler)
    if not taken["events"]:
        raise BenchmarkError("no event was published after the warm-up: give it more seconds")
    details = {"events": taken["events"], "wanted_rate": size.rate}
    return [
        *(Figure(f"publish_to_handler_{part}", taken[part], "ms") for part in ("p50", "p90", "p99", "max")),
        Figure("publish_to_handler_rate", published["rate"], EVENTS_PER_SECOND, details=details),
    ]
