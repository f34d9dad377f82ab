"""Consuming: a full topic by partitions and as one, and the statements of a consumer with nothing to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.benchmark import BesideRawCopy, OnTopic, duration, option, workers
from eventsql_orchestration.bench.figure import Figure, rate, ratio
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.statements import counted
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.database import Connection
from eventsql_orchestration.model import Event


@dataclass(frozen=True, kw_only=True)
class Consume(OnTopic, BesideRawCopy):
    """Consume a full topic: all partitions of a consumer together, and one consumer of the whole topic."""

    name = "consume"
    summary = "Consume by partitions, and as one."

    events: int = option(3_000_000, "Events", quick=20_000)
    processes: int = workers(2, "Processes that share the partitions", quick=1)
    max_events: int = option(5_000, "Events that a handler gets at most")
    rounds: int = option(2, "How often each way is measured; the median counts", most=100, quick=1)

    def measure(self, session: Session) -> list[Figure]:
        with self.topic(session) as topic:
            session.fill_log(topic, events=self.events)
            return self.beside_raw_copy(session, lambda: self._compare(session, topic))

    def _compare(self, session: Session, topic: str) -> list[Figure]:
        # Both take turns, so that caches and the load of the machine are the same for both.
        rates = session.in_turns(
            "consuming", self.rounds, {ways: partial(self._consume, session, topic, ways) for ways in (False, True)}
        )
        whole, partitions = rates[False], rates[True]
        return [
            rate("consume_whole_topic", median(whole), rounds=whole),
            rate(
                f"consume_{self.partitions}_partitions", median(partitions), rounds=partitions, processes=self.processes
            ),
            ratio("consume_partitions_ratio", partitions, whole, "of the one consumer's"),
        ]

    def _consume(self, session: Session, topic: str, partitioned: bool) -> float:
        consumer = session.consumer(topic, f"bench_{time.monotonic_ns()}", partitioned=partitioned)
        step = f"consuming {'by partitions' if partitioned else 'the whole topic'}"

        with session.crew() as crew:
            for number in range(1, (self.processes if partitioned else 1) + 1):
                crew.start(roles.consume, f"consumer {number}", topic, consumer, max_events=self.max_events)
            started = crew.go()
            samples = session.watch_offsets(crew, topic, consumer, events=self.events, step=step, every=0.02)
        return self.events / (samples[-1].at - started)


@dataclass(frozen=True, kw_only=True)
class Idle(OnTopic):
    """Count the statements of a consumer of a topic without new events, per partition and second."""

    name = "idle"
    summary = "Count the statements of an idle consumer."

    seconds: float = duration(30.0, "How long", quick=2.0)
    warm_up: float = duration(12.0, "How long before the measurement begins", quick=0.5)

    def measure(self, session: Session) -> list[Figure]:
        with self.topic(session) as topic, session.crew() as crew:
            consumer = crew.start(self._consume, "the consumer", topic, session.consumer(topic))
            began, length = crew.go(), self.warm_up + self.seconds

            def ended() -> bool:
                session.report("idling", min(round(time.monotonic() - began), round(length)), round(length))
                return consumer.outcome is not None

            crew.wait(ended, limit=length + 60.0, what="the idle consumer")
            outcome = crew.outcome(consumer, limit=1.0)

        rate = outcome["statements"] / outcome["seconds"] / self.partitions
        details = {**outcome, "partitions": self.partitions}
        return [Figure("idle_statements_per_partition", rate, "statements/s", details=details)]

    def _consume(self, worker: Worker, topic: str, consumer: str) -> roles.Outcome:
        """Consume a topic without new events. Gives the number of statements that this takes, and the seconds."""

        def unexpected(events: Sequence[Event], _connection: Connection) -> None:
            raise RuntimeError(f"nobody published, and {len(events)} events came")

        with counted() as statements, worker.platform() as platform:
            platform.registry.consumer(topic, consumer)
            worker.ready()
            with platform.consumers.start_batch(topic, consumer, unexpected):
                worker.stopped.wait(self.warm_up)
                before, started = statements.sent, time.monotonic()
                worker.stopped.wait(self.seconds)
                return {"statements": statements.sent - before, "seconds": time.monotonic() - started}
