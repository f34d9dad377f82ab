"""Publishing single events through the buffered publisher, each acknowledged after its commit, against commits of one
row each over many connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.session import Session


@dataclass(frozen=True, slots=True)
class BufferedSize:
    """How many events wait for their acknowledgement at once, tried one after the other, each for so many seconds.

    The figure is that of the fastest whose 99th percentile is at most `most_p99` milliseconds; where there is none, of
    the one with the least. What it is compared with is `connections` that commit one row each at a time.
    """

    in_flight: tuple[int, ...] = (250, 500, 1_000, 2_000, 4_000)
    seconds: float = 4.0
    most_p99: float = 50.0
    connections: int = 16
    partitions: int = 10


FULL: Final = BufferedSize()

QUICK: Final = BufferedSize(in_flight=(100, 500), seconds=0.5, connections=4)


def measure(session: Session, size: BufferedSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    return session.beside_raw_copy(lambda: _compare(session, size))


def _compare(session: Session, size: BufferedSize) -> list[Figure]:
    before = _one_row_commits(session, size)
    tried = [_acknowledged(session, size, number) for number in size.in_flight]
    after = _one_row_commits(session, size)
    kept = [each for each in tried if each["p99"] <= size.most_p99]
    fastest = (
        max(kept, key=lambda each: float(each["rate"])) if kept else min(tried, key=lambda each: float(each["p99"]))
    )
    rows = mean((before, after))
    chosen = {"in_flight": fastest["in_flight"], "most": size.most_p99, "kept": bool(kept)}
    return [
        Figure(f"one_row_commits_{size.connections}_connections", rows, EVENTS_PER_SECOND),
        Figure("buffered_publish", fastest["rate"], EVENTS_PER_SECOND, details={"tried": tried}),
        Figure("buffered_publish_p99", fastest["p99"], "ms", details=chosen),
        Figure("buffered_publish_ratio", fastest["rate"] / rows, "times the one-row commits"),
    ]


def _one_row_commits(session: Session, size: BufferedSize) -> float:
    with session.raw_table() as table, session.crew() as crew:
        inserter = crew.start(
            "insert_rows", "the inserter", table=table, partitions=size.partitions,
            connections=size.connections, seconds=size.seconds,
        )  # fmt: skip
        session.report("commits of one row each", 0, 1)
        crew.go()
        return float(crew.outcome(inserter, limit=60.0 + 2 * size.seconds)["rate"])


def _acknowledged(session: Session, size: BufferedSize, in_flight: int) -> dict[str, Any]:
    with session.topic("buffered", partitions=size.partitions) as topic, session.crew() as crew:
        publisher = crew.start(
            "publish_buffered", "the publisher", topic=topic, in_flight=in_flight, seconds=size.seconds
        )
        session.report(f"buffered publisher, {in_flight:,} in flight", 0, 1)
        crew.go()
        outcome = crew.outcome(publisher, limit=60.0 + 2 * size.seconds)
    return {"in_flight": in_flight, **outcome}
