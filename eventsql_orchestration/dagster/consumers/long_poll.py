"""Lingering ticks: a tick that found nothing waits for an event until Dagster would evaluate its sensor again.

Dagster evaluates a sensor every 5 seconds, and each look takes milliseconds. An event that comes after a look waits for
the next look, 2.5 s on average. A lingering tick listens for the event instead (LISTEN), and claims it at once.

A lingering tick holds a thread of the daemon and a thread of the code server. There are few of both, so only some ticks
linger at once. No tick lingers if the daemon evaluates its sensors one after the other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.tick import Answer, Leased, NothingYet, Watch, evaluate
from eventsql_orchestration.dagster.tags import location_tags

MOST_SENSORS: Final = 30
"""Maximum number of sensors in a code location whose ticks linger. With more sensors, ticks wait for threads anyway."""

RESERVED: Final = 3
"""Threads of the daemon and of the code server that are reserved for other ticks and for launching runs."""

_SERVER_LIMITS: Final = ("DAGSTER_GRPC_MAX_WORKERS", "DAGSTER_CODE_SERVER_MAX_WORKERS")
"""The variables of Dagster for the threads of `dagster api grpc` and of `dagster code-server start`."""


def evaluate_and_linger(watch: Watch, platform: EventSQL, context: dg.SensorEvaluationContext) -> Answer:
    """One tick, like `evaluate`. If it finds nothing, it looks again at each notification, for `linger` seconds."""
    own_runs = location_tags(context.code_location_origin, context.repository_name)
    look = partial(evaluate, watch, platform, context.instance, lambda: context.log, own_runs=own_runs)
    deadline = time.monotonic() + watch.options.linger
    answer = look()
    if not isinstance(answer, NothingYet):
        return answer

    sensors = 1 if context.repository_def is None else len(context.repository_def.sensor_defs)
    with LINGERING.one_of(at_once(context.instance.get_settings("sensors"), sensors)) as may:
        return _linger(watch, platform, look, answer, deadline) if may else answer


def _linger(watch: Watch, platform: EventSQL, look: Callable[[], Answer], answer: Answer, deadline: float) -> Answer:
    """Look again at each notification until the tick finds something or the deadline has come."""
    options = watch.options
    with _told(platform, watch.notified_by) as told:
        while isinstance(answer, NothingYet) and (left := deadline - time.monotonic()) > 0:
            if isinstance(answer, Leased):
                # New events belong to the owner of the lease.
                time.sleep(min(left, options.poll))
            else:
                told.wait(min(left, options.poll))
            told.clear()

            answer = look()
            if isinstance(answer, NothingYet):
                time.sleep(max(0.0, min(options.pause, deadline - time.monotonic())))
    return answer


def at_once(settings: Mapping[str, Any], sensors: int = 1) -> int:
    """The number of ticks of a code location that may linger at once, by the `sensors` settings of dagster.yaml."""
    if not settings.get("use_threads") or sensors > MOST_SENSORS:
        return 0
    # The thread pool of Dagster's code server has Python's default size, unless one of the variables limits it. Since
    # Python 3.13, that size follows the processors that the process may use.
    threads = min(32, (getattr(os, "process_cpu_count", os.cpu_count)() or 1) + 4)
    limits = [int(limit) for name in _SERVER_LIMITS if (limit := os.environ.get(name, "")).isdecimal()]
    return max(0, min(settings.get("num_workers") or threads, threads, *limits) - RESERVED)


class Lingering:
    """The number of ticks of this process that linger now."""

    def __init__(self) -> None:
        self.ticks = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one_of(self, most: int) -> Iterator[bool]:
        """Whether one more tick may linger during the block. At most `most` ticks linger at once."""
        with self._lock:
            may = self.ticks < most
            self.ticks += may
        try:
            yield may
        finally:
            with self._lock:
                self.ticks -= may


LINGERING: Final = Lingering()


@contextlib.contextmanager
def _told(platform: EventSQL, notified_by: Collection[tuple[str, str]]) -> Iterator[threading.Event]:
    """A `threading.Event` that each of these notifications sets, from any shard."""
    told = threading.Event()
    with contextlib.ExitStack() as subscriptions:
        for shard in platform.shards:
            for kind, name in notified_by:
                subscriptions.callback(shard.listener.subscribe(kind, name, told.set))
        yield told
