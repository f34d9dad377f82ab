"""What a consumer costs while nobody publishes: statements per second of one of its partitions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import Session


@dataclass(frozen=True, slots=True)
class IdleSize:
    """For how many seconds statements are counted, after those of the warm-up."""

    seconds: float = 30.0
    warm_up: float = 12.0
    partitions: int = 10


FULL: Final = IdleSize()

QUICK: Final = IdleSize(seconds=2.0, warm_up=0.5)


def measure(session: Session, size: IdleSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    with session.topic("idle", partitions=size.partitions) as topic, session.crew() as crew:
        name = session.consumer(topic)
        consumer = crew.start(
            "idle", "the consumer", topic=topic, consumer=name, warm_up=size.warm_up, seconds=size.seconds
        )
        begun, length = crew.go(), size.warm_up + size.seconds

        def ended() -> bool:
            session.report("idling", min(round(time.monotonic() - begun), round(length)), round(length))
            return consumer.outcome is not None

        crew.wait(ended, limit=length + 60.0, what="the idle consumer")
        outcome = crew.outcome(consumer, limit=1.0)
    rate = outcome["statements"] / outcome["seconds"]
    return [
        Figure(
            "idle_statements_per_partition", rate / size.partitions, "statements/s",
            details={"statements": outcome["statements"], "seconds": outcome["seconds"], "partitions": size.partitions},
        )
    ]  # fmt: skip
