"""How long a large topic takes to lose its oldest half."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import Figure
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError


@dataclass(frozen=True, slots=True)
class RetentionSize:
    """How many events the topic holds before."""

    events: int = 50_000_000
    partitions: int = 10


FULL: Final = RetentionSize()

QUICK: Final = RetentionSize(events=20_000)


def measure(session: Session, size: RetentionSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    with session.topic("retention", partitions=size.partitions) as topic:
        session.fill_log(topic, events=size.events)
        session.settle()
        session.connection.execute(session.queries("keep_newest"), {"topic": topic, "events": size.events // 2})
        started = time.monotonic()
        session.platform.retention.run_once([topic])
        seconds = time.monotonic() - started
        left = session.platform.reader.count(topic)
    if left < size.events // 2:
        raise BenchmarkError(f"{left} events are left of {size.events} that were to lose one half, which is a defect")
    return [Figure("retention_of_oldest_half", seconds, "s", details={"events": size.events, "left": left})]
