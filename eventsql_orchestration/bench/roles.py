"""The roles of a benchmark's processes: each gets ready, waits for the others, works, and gives its outcome."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from eventsql_orchestration.bench import statements, workload
from eventsql_orchestration.bench.figure import percentile
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.model import Event, Publication
from eventsql_orchestration.publishing.buffered import Acknowledgement
from eventsql_orchestration.topics.partitioner import default_partition

Outcome: TypeAlias = dict[str, Any]

_NANOSECONDS: Final = 1_000_000_000
_IN_MILLISECONDS: Final = 1_000_000


def _sleep_until(moment: float) -> None:
    """Sleep until a time of `time.monotonic`, unless it has passed."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _times(taken: list[float]) -> Outcome:
    """The number of durations, and their percentiles."""
    taken.sort()
    parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {"events": len(taken), **{name: percentile(taken, part) for name, part in parts.items() if taken}}


def _in_threads(number: int, work: Callable[[int], None]) -> None:
    """Do `work` for the numbers below `number`, all at once. Raises the first error."""
    with ThreadPoolExecutor(number) as threads:
        list(threads.map(work, range(number)))


# Publishing


def publish(
    worker: Worker,
    *,
    topic: str,
    events: int,
    batch: int,
    seed: int,
    straight: bool,
    transfer: bool,
    rate: float | None = None,
) -> Outcome:
    """Publish events in batches, as fast as possible or at a rate.

    `publish` takes batches of one event, with one commit each; `publish_all` takes larger batches. A publisher that is
    behind its rate publishes without waits until it has caught up. Gives the start of the first batch and the end of
    the last batch.
    """
    pool = workload.publications(topic, min(events, workload.POOL), seed=seed)
    with worker.platform(transfer=transfer, straight=straight) as platform:
        platform.registry.cached_topic(topic)
        worker.ready()
        started, published = time.monotonic(), 0

        for publications in workload.batches(pool, events, batch):
            if rate is not None:
                _sleep_until(started + published / rate)
            if len(publications) == 1:
                platform.publisher.publish(publications[0])
            else:
                platform.publisher.publish_all(publications)
            published += len(publications)
            worker.progress(published)

        if rate is not None:
            # The last batch takes its share of the time too.
            _sleep_until(started + published / rate)
        ended = time.monotonic()
        worker.say(events=published)
    return {"started": started, "ended": ended}


def publish_singly(worker: Worker, *, topic: str, events: int, threads: int) -> Outcome:
    """Publish one event per commit, by threads that share the events. Gives the start and the end."""
    pool = workload.publications(topic, min(events, workload.POOL))
    with worker.platform(transfer=True) as platform:
        platform.registry.cached_topic(topic)
        # Each thread has its connection before the clock starts.
        with ExitStack() as opened:
            for _ in range(threads):
                opened.enter_context(platform.database.connection())

        def publish_share(first: int) -> None:
            for position in range(first, events, threads):
                platform.publisher.publish(pool[position % len(pool)])

        worker.ready()
        started = time.monotonic()
        _in_threads(threads, publish_share)
        ended = time.monotonic()
        worker.stopped.wait()
    return {"started": started, "ended": ended}


def publish_timed(worker: Worker, *, topic: str, rate: float, events: int, threads: int) -> Outcome:
    """Publish single events at a rate, each with its time of publication in its value. Gives the actual rate.

    The threads take turns: a commit may take longer than the time until the next event is due.
    """
    pool = workload.publications(topic, min(events, workload.POOL))
    with worker.platform(transfer=True) as platform:
        platform.registry.cached_topic(topic)

        def publish_share(first: int) -> None:
            for position in range(first, events, threads):
                _sleep_until(started + position / rate)
                form = pool[position % len(pool)]
                value = form.value[:-1] + b',"publishedAt":%d}' % time.time_ns()
                platform.publisher.publish(Publication(topic, value, key=form.key))

        worker.ready()
        started = time.monotonic()
        _in_threads(threads, publish_share)
        _sleep_until(started + events / rate)
        return {"rate": events / (time.monotonic() - started)}


def insert_rows(worker: Worker, *, table: str, partitions: int, connections: int, seconds: float) -> Outcome:
    """Commit single rows into a table like the buffer over several connections. Gives rows per second."""
    statement = Queries("bench", worker.schema)("insert_raw", table=table)
    rows = [
        {"topic": table, "partition": default_partition(each, partitions), "key": each.key, "value": each.value}
        for each in workload.publications(table, 10_000)
    ]
    with worker.platform() as platform:
        opened = [platform.database.dedicated() for _ in range(connections)]
        counts = [0] * connections

        def insert(number: int) -> None:
            while time.monotonic() < started + seconds:
                row = rows[(counts[number] * connections + number) % len(rows)]
                opened[number].execute(statement, row)
                counts[number] += 1

        worker.ready()
        started = time.monotonic()
        _in_threads(connections, insert)
        elapsed = time.monotonic() - started
        for connection in opened:
            connection.close()
    return {"rate": sum(counts) / elapsed}


def publish_buffered(worker: Worker, *, topic: str, in_flight: int, seconds: float) -> Outcome:
    """Publish single events through the buffered publisher, with a bounded number of unacknowledged events.

    Gives acknowledged events per second, and the percentiles of the time to the acknowledgement in milliseconds.
    """
    pool = workload.publications(topic)
    taken: list[float] = []
    failures: list[BaseException] = []
    # A semaphore is Python code: it would take a quarter of the process's time.
    free: SimpleQueue[None] = SimpleQueue()
    for _ in range(in_flight):
        free.put(None)

    def acknowledged(called: int, future: Acknowledgement) -> None:
        if (error := future.exception()) is not None:
            failures.append(error)
        taken.append((time.perf_counter_ns() - called) / _IN_MILLISECONDS)
        free.put(None)

    with worker.platform(transfer=True) as platform:
        platform.registry.cached_topic(topic)
        with platform.buffered_publisher() as publisher:
            worker.ready()
            started = time.monotonic()
            for publication in cycle(pool):
                if time.monotonic() - started > seconds:
                    break
                free.get()
                publisher.publish(publication).add_done_callback(partial(acknowledged, time.perf_counter_ns()))
            for _ in range(in_flight):
                free.get()
            elapsed = time.monotonic() - started

    if failures:
        raise failures[0]
    return {"rate": len(taken) / elapsed, **_times(taken)}


# Transferring


def transfer(worker: Worker) -> Outcome:
    """Transfer, as `eventsql transfer` does, until the benchmark says to end."""
    with worker.platform() as platform:
        platform.open()
        worker.ready()
        platform.transfer.run(worker.stopped)
    return {}


def transfer_topic(worker: Worker, *, topic: str) -> Outcome:
    """Transfer the buffered events of one topic, once. Gives the number of events, the start and the end."""
    with worker.platform() as platform:
        platform.open()
        worker.ready()
        started = time.monotonic()
        moved = platform.transfer.run_once([topic])
        return {"events": moved.get(topic, 0), "started": started, "ended": time.monotonic()}


# Consuming


def consume(
    worker: Worker,
    *,
    topic: str,
    consumer: str,
    max_events: int,
    polling_delay: float | None = None,
    handler_delay: float = 0.0,
) -> Outcome:
    """Consume with a handler that counts, until the benchmark says to end.

    The handler sleeps for up to `handler_delay` seconds on each batch.
    """
    handled, lock = 0, threading.Lock()

    def count(events: Sequence[Event], _connection: Connection) -> None:
        nonlocal handled
        with lock:
            handled += len(events)
        if handler_delay:
            time.sleep(random.uniform(min(0.001, handler_delay), handler_delay))  # noqa: S311 - no secret

    options: dict[str, Any] = {} if polling_delay is None else {"polling_delay": polling_delay}
    with worker.platform() as platform:
        platform.registry.consumer(topic, consumer)
        worker.ready()
        with platform.consumers.start_batch(topic, consumer, count, max_events=max_events, **options):
            while not worker.stopped.wait(0.1):
                worker.progress(handled)
    return {}


def consume_as_queue(worker: Worker, *, topic: str, consumer: str, threads: int, transactions: bool) -> Outcome:
    """Consume a topic as a queue with a handler that does nothing, until the benchmark says to end."""

    def handle(_event: Event) -> None:
        """Acknowledged after it returns."""

    def handle_in_transaction(_event: Event, _connection: Connection) -> None:
        """Acknowledged in its transaction."""

    handler = handle_in_transaction if transactions else handle
    with worker.platform() as platform:
        platform.registry.consumer(topic, consumer)
        worker.ready()
        with platform.consumers.start_queue(topic, consumer, handler, workers=threads):
            worker.stopped.wait()
    return {}


def consume_timed(worker: Worker, *, topic: str, consumer: str, warm_up: float) -> Outcome:
    """Consume the events of `publish_timed` until the end. Gives the percentiles of their delays in milliseconds.

    Events of the first `warm_up` seconds do not count.
    """
    arrivals: list[tuple[int, int]] = []

    def record(events: Sequence[Event], _connection: Connection) -> None:
        now = time.time_ns()
        arrivals.extend((json.loads(event.value)["publishedAt"], now) for event in events)

    with worker.platform() as platform:
        platform.registry.consumer(topic, consumer)
        began = worker.ready() + int(warm_up * _NANOSECONDS)
        with platform.consumers.start_batch(topic, consumer, record):
            worker.stopped.wait()
    return _times([(arrived - published) / _IN_MILLISECONDS for published, arrived in arrivals if published >= began])


def idle(worker: Worker, *, topic: str, consumer: str, warm_up: float, seconds: float) -> Outcome:
    """Consume a topic without new events. Gives the number of statements that this takes, and the seconds."""

    def unexpected(events: Sequence[Event], _connection: Connection) -> None:
        raise RuntimeError(f"nobody published, and {len(events)} events came")

    with statements.counted() as counted, worker.platform() as platform:
        platform.registry.consumer(topic, consumer)
        worker.ready()
        with platform.consumers.start_batch(topic, consumer, unexpected):
            worker.stopped.wait(warm_up)
            before, started = counted.sent, time.monotonic()
            worker.stopped.wait(seconds)
            return {"statements": counted.sent - before, "seconds": time.monotonic() - started}
