"""The work of processes of several benchmarks: each gets ready, waits for the others, works, and gives its outcome."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from eventsql_orchestration.bench import workload
from eventsql_orchestration.bench.worker import Worker
from eventsql_orchestration.database import Connection
from eventsql_orchestration.model import Event

Outcome: TypeAlias = dict[str, Any]


def sleep_until(moment: float) -> None:
    """Sleep until a time of `time.monotonic`, unless it has passed."""
    time.sleep(max(0.0, moment - time.monotonic()))


def at_once(threads: int, work: Callable[[int], object]) -> float:
    """Do `work` for the numbers below `threads`, each in a thread of its own. Gives the seconds until all are done.

    Raises the first error.
    """
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        for _ in pool.map(work, range(threads)):
            pass
        return time.perf_counter() - started


def publish(
    worker: Worker,
    topic: str,
    *,
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
                sleep_until(started + published / rate)
            if len(publications) == 1:
                platform.publisher.publish(publications[0])
            else:
                platform.publisher.publish_all(publications)
            published += len(publications)
            worker.progress(published)

        if rate is not None:
            # The last batch takes its share of the time too.
            sleep_until(started + published / rate)
        ended = time.monotonic()
        worker.say(events=published)
    return {"started": started, "ended": ended}


def transfer(worker: Worker) -> Outcome:
    """Transfer, as `eventsql transfer` does, until the benchmark says to end."""
    with worker.platform() as platform:
        platform.open()
        worker.ready()
        platform.transfer.run(worker.stopped)
    return {}


def consume(
    worker: Worker,
    topic: str,
    consumer: str,
    *,
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


def run_program(worker: Worker, *, command: Sequence[str], directory: str, environment: dict[str, str]) -> Outcome:
    """Run a program until the benchmark ends this process, and the program with it."""
    process = subprocess.Popen(
        command, cwd=directory, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=sys.stderr
    )
    worker.ready()
    # If the program ends by itself, this process has its exit code and its last words.
    os._exit(process.wait() or 1)
