"""Publishing alone: events per second of `publish_all`, committed, with nobody consuming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench.figure import EVENTS_PER_SECOND, Figure
from eventsql_orchestration.bench.session import Session, limit_of
from eventsql_orchestration.errors import ValidationError


@dataclass(frozen=True, slots=True)
class PublishSize:
    """How much is published, in batches of how many events, by how many processes."""

    events: int = 1_000_000
    batch: int = 1_000
    publishers: int = 1
    partitions: int = 10
    straight: bool = True

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than publishers."""
        if self.events < self.publishers:
            raise ValidationError(f"{self.events} events are too few for {self.publishers} publishers")


FULL: Final = PublishSize()

QUICK: Final = PublishSize(events=20_000)


def measure(session: Session, size: PublishSize) -> list[Figure]:
    """Raises `BenchmarkError`."""
    return session.beside_raw_copy(lambda: [_run(session, size)])


def _run(session: Session, size: PublishSize) -> Figure:
    with session.topic("publish", partitions=size.partitions) as topic, session.crew() as crew:
        shares = [size.events // size.publishers + (n < size.events % size.publishers) for n in range(size.publishers)]
        publishers = [
            crew.start(
                "publish", f"publisher {number}", topic=topic, events=share, batch=size.batch, seed=number,
                straight=size.straight, transfer=True,
            )
            for number, share in enumerate(shares, start=1)
        ]  # fmt: skip
        crew.go()

        def published() -> bool:
            session.report("publishing", sum(each.events for each in publishers), size.events)
            return all(each.outcome is not None for each in publishers)

        crew.wait(published, limit=limit_of(size.events), what="publishing")
        outcomes = [crew.outcome(publisher, limit=1.0) for publisher in publishers]
    seconds = max(each["ended"] for each in outcomes) - min(each["started"] for each in outcomes)
    name = "publish" if size.publishers == 1 else f"publish_{size.publishers}_publishers"
    if not size.straight:
        name += "_through_buffer"
    return Figure(f"{name}_batches_of_{size.batch}", size.events / seconds, EVENTS_PER_SECOND)
