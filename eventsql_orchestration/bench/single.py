"""One event per commit, as most services publish: events per second, and processor time of each kind of process."""

from __future__ import annotations

from dataclasses import dataclass

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.benchmark import Benchmark, option, workers
from eventsql_orchestration.bench.figure import Figure, rate
from eventsql_orchestration.bench.figures import check_publishers
from eventsql_orchestration.bench.processor import Meter, parent
from eventsql_orchestration.bench.session import Session

_NAME = "one_event_per_commit"
_MICROSECONDS = 1e6


@dataclass(frozen=True, kw_only=True)
class Single(Benchmark):
    """Publish one event per commit from the threads of one process, and consume at once in another process.

    The publisher's process also transfers, as by default. The processor time of the server is measured where the server
    runs on this machine.
    """

    name = "single"
    summary = "Publish one event per commit, and consume at once."

    events: int = option(60_000, "Events", quick=2_000)
    threads: int = workers(16, "Threads that publish")

    def __post_init__(self) -> None:
        """Raise `ValidationError` for fewer events than threads."""
        check_publishers(self.events, self.threads)

    def measure(self, session: Session) -> list[Figure]:
        return session.beside_raw_copy(lambda: self._run(session))

    def _run(self, session: Session) -> list[Figure]:
        with session.topic("single", partitions=self.partitions, storage=self.storage) as topic, session.crew() as crew:
            consumer = session.consumer(topic)
            publisher = crew.start(
                roles.publish_singly, "the publisher", topic=topic, events=self.events, threads=self.threads
            )
            handler = crew.start(roles.consume, "the consumer", topic=topic, consumer=consumer, max_events=1_000)
            server = parent(session.connection.info.backend_pid)
            crew.ready()
            meter = Meter(
                {
                    "publisher": [publisher.process.pid],
                    "consumer": [handler.process.pid],
                    "server": [] if server is None else [server],
                }
            )

            crew.go()
            samples = session.watch_offsets(
                crew, topic, consumer, events=self.events, step="publishing one event per commit",
                limit=60.0 + self.events / 100,
            )  # fmt: skip
            processor = {kind: seconds for kind, seconds in meter.taken().items() if seconds}
            published = crew.stop(publisher)

        elapsed = samples[-1].at - published["started"]
        costs = {kind: seconds / self.events * _MICROSECONDS for kind, seconds in processor.items()}
        return [
            rate(_NAME, self.events / elapsed, seconds=elapsed, threads=self.threads),
            *(Figure(f"{_NAME}_{kind}", cost, "CPU µs per event") for kind, cost in costs.items()),
        ]
