"""What the processes of the benchmarks do: each gets ready, waits for the others, works, says what it came to."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from eventsql_orchestration.bench import statements, workload
from eventsql_orchestration.bench.figure import percentile
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.log.buffered import Acknowledgement
from eventsql_orchestration.log.partitioner import default_partition
from eventsql_orchestration.model import Event, Publication
from eventsql_orchestration.platform import EventSQL

if TYPE_CHECKING:
    from eventsql_orchestration.bench.worker import Wire

_NANOSECONDS: Final = 1_000_000_000
_IN_MILLISECONDS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process works."""

    dsns: Sequence[str]
    schema: str

    def platform(self, *, transfer: bool = False, straight: bool = True) -> EventSQL:
        return EventSQL(*self.dsns, schema=self.schema, migrate=False, transfer=transfer, straight=straight)


# Publishing


def publish(
    wire: Wire,
    place: Place,
    *,
    topic: str,
    events: int,
    batch: int,
    seed: int,
    straight: bool,
    transfer: bool,
    rate: float | None = None,
) -> dict[str, object]:
    """Publish events in batches, as fast as it goes or so many per second; gives when the first began, the last ended.

    Batches of one are published by `publish`, one commit each, others by `publish_all`. A publisher that is behind its
    rate does not wait until it has caught up.
    """
    pool = workload.publications(topic, min(events, workload.POOL), seed=seed)
    with place.platform(transfer=transfer, straight=straight) as platform:
        platform.registry.cached_topic(topic)
        wire.ready()
        started, published = time.monotonic(), 0
        for publications in workload.batches(pool, events, batch):
            if rate is not None:
                time.sleep(max(0.0, started + published / rate - time.monotonic()))
            if len(publications) == 1:
                platform.publisher.publish(publications[0])
            else:
                platform.publisher.publish_all(publications)
            published += len(publications)
            wire.progress(published)
        if rate is not None:
            # The last batch has its share of the time too.
            time.sleep(max(0.0, started + published / rate - time.monotonic()))
        ended = time.monotonic()
        wire.say(events=published)
    return {"started": started, "ended": ended}


def publish_timed(wire: Wire, place: Place, *, topic: str, rate: float, events: int, threads: int) -> dict[str, object]:
    """Publish single events at a rate, each with the time at which it was published in its value.

    The threads take turns: a commit may take longer than the time until the next event is due.
    """
    pool = workload.publications(topic, min(events, workload.POOL))
    with place.platform(transfer=True) as platform:
        platform.registry.cached_topic(topic)

        def publish_share(first: int) -> None:
            for position in range(first, events, threads):
                time.sleep(max(0.0, started + position / rate - time.monotonic()))
                form = pool[position % len(pool)]
                value = form.value[:-1] + b',"publishedAt":%d}' % time.time_ns()
                platform.publisher.publish(Publication(topic, value, key=form.key))

        wire.ready()
        started = time.monotonic()
        _in_threads(threads, publish_share)
        time.sleep(max(0.0, started + events / rate - time.monotonic()))
        ended = time.monotonic()
    return {"rate": events / (ended - started)}


def insert_rows(
    wire: Wire, place: Place, *, table: str, partitions: int, connections: int, seconds: float
) -> dict[str, object]:
    """Commit single rows into a table like the buffer over several connections; gives rows per second."""
    queries = Queries("bench", place.schema)
    rows = [
        {"topic": table, "partition": default_partition(each, partitions), "key": each.key, "value": each.value}
        for each in workload.publications(table, 10_000)
    ]
    with place.platform() as platform:
        opened = [platform.database.dedicated() for _ in range(connections)]
        counts = [0] * connections

        def insert(number: int) -> None:
            while time.monotonic() < started + seconds:
                row = rows[(counts[number] * connections + number) % len(rows)]
                opened[number].execute(queries("insert_raw", topic=table), row)
                counts[number] += 1

        wire.ready()
        started = time.monotonic()
        _in_threads(connections, insert)
        elapsed = time.monotonic() - started
        for connection in opened:
            connection.close()
    return {"rate": sum(counts) / elapsed, "rows": sum(counts)}


def publish_buffered(wire: Wire, place: Place, *, topic: str, in_flight: int, seconds: float) -> dict[str, object]:
    """Publish single events through the buffered publisher, so many unacknowledged at most.

    Gives acknowledged events per second, and how long acknowledgements took, in milliseconds.
    """
    pool = workload.publications(topic)
    taken: list[float] = []
    failures: list[BaseException] = []
    free = threading.Semaphore(in_flight)

    def acknowledged(called: int, future: Acknowledgement) -> None:
        if (error := future.exception()) is not None:
            failures.append(error)
        taken.append((time.perf_counter_ns() - called) / _IN_MILLISECONDS)
        free.release()

    with place.platform(transfer=True) as platform:
        platform.registry.cached_topic(topic)
        with platform.buffered_publisher() as publisher:
            wire.ready()
            started = time.monotonic()
            for publication in cycle(pool):
                if time.monotonic() - started > seconds:
                    break
                free.acquire()
                publisher.publish(publication).add_done_callback(partial(acknowledged, time.perf_counter_ns()))
            for _ in range(in_flight):
                free.acquire()
            elapsed = time.monotonic() - started
    if failures:
        raise failures[0]
    taken.sort()
    return {
        "events": len(taken),
        "rate": len(taken) / elapsed,
        "p50": percentile(taken, 0.5),
        "p99": percentile(taken, 0.99),
        "max": taken[-1],
    }


def _in_threads(number: int, work: Callable[[int], None]) -> None:
    """Do `work` for each number below this one at once; raises the first error of any."""
    with ThreadPoolExecutor(number) as threads:
        for done in [threads.submit(work, each) for each in range(number)]:
            done.result()


# Transferring


def transfer(wire: Wire, place: Place) -> dict[str, object]:
    """Transfer, as `eventsql transfer` does, until told to end."""
    with place.platform() as platform:
        platform.open()
        wire.ready()
        platform.transfer_until(wire.stopped)
    return {}


def transfer_topic(wire: Wire, place: Place, *, topic: str) -> dict[str, object]:
    """Transfer what one topic has in the buffer, once; gives the number of events, and when it began and ended."""
    with place.platform() as platform:
        platform.database.ensure_schema()
        wire.ready()
        started = time.monotonic()
        moved = platform.transfer.run_once([topic])
        ended = time.monotonic()
    return {"events": moved.get(topic, 0), "started": started, "ended": ended}


# Consuming


def consume(
    wire: Wire,
    place: Place,
    *,
    topic: str,
    consumer: str,
    max_events: int,
    polling_delay: float | None,
    handler_delay: float,
) -> dict[str, object]:
    """Consume with a handler that counts, until told to end; gives the number of events that it was handed.

    With `handler_delay` it sleeps for up to so many seconds on each batch.
    """
    handled, lock = 0, threading.Lock()

    def count(events: Sequence[Event], _connection: Connection) -> None:
        nonlocal handled
        with lock:
            handled += len(events)
        if handler_delay:
            time.sleep(random.uniform(min(0.001, handler_delay), handler_delay))  # noqa: S311 - no secret

    options: dict[str, Any] = {} if polling_delay is None else {"polling_delay": polling_delay}
    with place.platform() as platform:
        platform.registry.consumer(topic, consumer)
        wire.ready()
        with platform.consumers.start_batch(topic, consumer, count, max_events=max_events, **options):
            while not wire.stopped.wait(0.1):
                wire.progress(handled)
    return {"handled": handled}


def consume_timed(wire: Wire, place: Place, *, topic: str, consumer: str, warm_up: float) -> dict[str, object]:
    """Consume what `publish_timed` publishes until told to end; gives how long events took to come, in milliseconds.

    Those that were published within the first `warm_up` seconds do not count.
    """
    arrivals: list[tuple[int, int]] = []

    def record(events: Sequence[Event], _connection: Connection) -> None:
        now = time.time_ns()
        arrivals.extend((json.loads(event.value)["publishedAt"], now) for event in events)

    with place.platform() as platform:
        platform.registry.consumer(topic, consumer)
        began = wire.ready()
        with platform.consumers.start_batch(topic, consumer, record):
            while not wire.stopped.wait(0.1):
                wire.progress(len(arrivals))
    counted = began + int(warm_up * _NANOSECONDS)
    taken = sorted((came - left) / _IN_MILLISECONDS for left, came in arrivals if left >= counted)
    if not taken:
        return {"events": 0}
    return {
        "events": len(taken),
        "p50": percentile(taken, 0.5),
        "p90": percentile(taken, 0.9),
        "p99": percentile(taken, 0.99),
        "max": taken[-1],
    }


def idle(wire: Wire, place: Place, *, topic: str, consumer: str, warm_up: float, seconds: float) -> dict[str, object]:
    """Consume a topic to which nobody publishes; gives the number of statements that this takes, and the seconds."""

    def unexpected(events: Sequence[Event], _connection: Connection) -> None:
        raise RuntimeError(f"nobody published, and {len(events)} events came")

    with statements.counted() as counted, place.platform() as platform:
        platform.registry.consumer(topic, consumer)
        wire.ready()
        with platform.consumers.start_batch(topic, consumer, unexpected):
            wire.stopped.wait(warm_up)
            before, started = counted.sent, time.monotonic()
            wire.stopped.wait(seconds)
            sent, elapsed = counted.sent - before, time.monotonic() - started
    return {"statements": sent, "seconds": elapsed}


ROLES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    role.__name__: role
    for role in (
        publish, publish_timed, publish_buffered, insert_rows, transfer, transfer_topic, consume, consume_timed, idle,
    )
}  # fmt: skip
