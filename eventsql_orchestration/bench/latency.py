"""How long an event takes from publish to a handler in another process."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.benchmark import OnTopic, duration, option, workers
from eventsql_orchestration.bench.figure import Figure, percentiles, rate
from eventsql_orchestration.bench.roles import Outcome, at_once, sleep_until
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Event, Publication

_NANOSECONDS: Final = 1_000_000_000
_IN_MILLISECONDS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Latency(OnTopic):
    """Publish single events at a steady rate: milliseconds from the call of publish to a handler in another process."""

    name = "latency"
    summary = "Time events from publish to handler."

    rate: float = option(1_000.0, "Events per second", most=100_000, quick=200.0)
    seconds: float = duration(20.0, "How long", quick=1.0)
    warm_up: float = duration(3.0, "How long before the measurement begins", quick=0.5)
    threads: int = workers(4, "Threads that publish in turns")

    @property
    def _events(self) -> int:
        return max(1, round(self.rate * (self.warm_up + self.seconds)))

    def measure(self, session: Session) -> list[Figure]:
        session.settle()
        with self.topic(session) as topic, session.crew() as crew:
            consumer = session.consumer(topic)
            publisher = crew.start(self._publish, "the publisher", topic)
            handler = crew.start(self._consume, "the consumer", topic, consumer)
            crew.go()
            session.watch_offsets(
                crew, topic, consumer, events=self._events, step="publishing one by one",
                limit=60 + 10 * (self.warm_up + self.seconds), every=0.5,
            )  # fmt: skip
            published = crew.outcome(publisher, limit=60.0)
            taken = crew.stop(handler)

        if not taken:
            raise BenchmarkError("no event was published after the warm-up: give it more seconds")
        details = {"events": taken["measured"], "wanted_rate": self.rate, "calls_late": published["calls_late"]}
        parts = {"p50": "p50", "p90": "p90", "p99": "p99", "max": "most"}
        return [
            *(Figure(f"publish_to_handler_{name}", taken[part], "ms") for name, part in parts.items()),
            rate("publish_to_handler_rate", published["rate"], **details),
        ]

    # The roles of processes

    def _publish(self, worker: Worker, topic: str) -> Outcome:
        """Publish single events at a rate, each with its time of publication in its value.

        The threads take turns: a commit may take longer than the time until the next event is due. Gives the actual
        rate, and the percentiles of how late the calls were, in milliseconds: the delay of an event begins with its
        call.
        """
        pool = workload.publications(topic, min(self._events, workload.POOL))
        late: list[float] = []
        with worker.platform(transfer=True) as platform:
            platform.registry.cached_topic(topic)

            def publish_share(first: int) -> None:
                for position in range(first, self._events, self.threads):
                    due = started + position / self.rate
                    sleep_until(due)
                    late.append(1_000 * (time.monotonic() - due))
                    form = pool[position % len(pool)]
                    value = form.value[:-1] + b',"publishedAt":%d}' % time.time_ns()
                    platform.publisher.publish(Publication(topic, value, key=form.key))

            worker.ready()
            started = time.monotonic()
            at_once(self.threads, publish_share)
            sleep_until(started + self._events / self.rate)
            return {"rate": self._events / (time.monotonic() - started), "calls_late": percentiles(late)}

    def _consume(self, worker: Worker, topic: str, consumer: str) -> Outcome:
        """Consume events until the end. Gives the percentiles of their delays in milliseconds.

        Events of the warm-up do not count.
        """
        arrivals: list[tuple[int, int]] = []

        def record(events: Sequence[Event], _connection: Connection) -> None:
            now = time.time_ns()
            arrivals.extend((json.loads(event.value)["publishedAt"], now) for event in events)

        with worker.platform() as platform:
            platform.registry.consumer(topic, consumer)
            began = worker.ready() + int(self.warm_up * _NANOSECONDS)
            with platform.consumers.start_batch(topic, consumer, record):
                worker.stopped.wait()
        counted = [(arrived - published) / _IN_MILLISECONDS for published, arrived in arrivals if published >= began]
        return percentiles(counted) if counted else {}
