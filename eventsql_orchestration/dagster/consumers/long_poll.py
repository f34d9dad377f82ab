"""Ticks that linger: one that found nothing waits for an event until Dagster would look at its sensor again.

Dagster looks at a sensor every 5 seconds, and each look takes milliseconds: an event that comes after it waits for the
next, 2.5 s in the mean. A tick that stays listens for it instead (LISTEN), and claims it at once.

It holds a thread of the daemon and one of the code server meanwhile, of which there are few. So only some ticks linger
at once, the others end as ever; and none does where the daemon evaluates its sensors one after the other.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.ticks import Leased, NothingYet, Watch, evaluate
from eventsql_orchestration.database.notifications import LOG

LINGER_SECONDS: Final = 4.0
"""How long a tick stays, from its beginning. Dagster begins the next one 5 s after it where this one has been stored by
then, and 10 s after it otherwise."""

POLL_SECONDS: Final = 1.0
"""How often a tick looks that is told of nothing: that a lease ends is no news, and a pooler lets none through."""

PAUSE_SECONDS: Final = 0.25
"""How long a tick that was told of events which are not for it, but for another partition of the topic, hears no more:
of a busy topic it would be told all the time."""

MOST_SENSORS: Final = 30
"""Of a code location with more sensors no tick lingers: they wait for threads as it is, and few of them would."""

RESERVED: Final = 3
"""Threads of the daemon, and of the code server, that are left to ticks which do not linger, and to launching runs."""


def evaluate_and_linger(watch: Watch, platform: EventSQL, context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """One tick as `evaluate`, and another look at each notification while it found nothing, for `LINGER_SECONDS`."""
    instance, log, cursor = context.instance, context.log, context.cursor
    deadline = time.monotonic() + LINGER_SECONDS
    result = evaluate(watch, platform, instance, log, cursor)
    if not _nothing_yet(result):
        return result
    with LINGERING.one_of(at_once(instance.get_settings("sensors"), _sensors(context))) as may:
        if not may:
            return result
        with _told(platform, watch.topics) as told:
            while _nothing_yet(result) and (left := deadline - time.monotonic()) > 0:
                if isinstance(result.skip_reason, Leased):
                    # What comes is whoever's who has it.
                    time.sleep(min(left, POLL_SECONDS))
                else:
                    told.wait(min(left, POLL_SECONDS))
                told.clear()
                result = evaluate(watch, platform, instance, log, cursor)
                if _nothing_yet(result):
                    time.sleep(max(0.0, min(PAUSE_SECONDS, deadline - time.monotonic())))
    return result


def _sensors(context: dg.SensorEvaluationContext) -> int:
    """How many sensors the code location of a tick has."""
    return 1 if context.repository_def is None else len(context.repository_def.sensor_defs)


def _nothing_yet(result: dg.SensorResult) -> bool:
    return isinstance(result.skip_reason, NothingYet)


def at_once(settings: Mapping[str, Any], sensors: int = 1, *, cores: int | None = None) -> int:
    """How many ticks of a code location with so many sensors may linger at once, by the `sensors` of dagster.yaml."""
    if not settings.get("use_threads") or sensors > MOST_SENSORS:
        return 0
    # Dagster's code server has as many threads as Python gives a pool by default.
    threads = min(32, (cores or os.cpu_count() or 1) + 4)
    return max(0, min(settings.get("num_workers") or threads, threads) - RESERVED)


class Lingering:
    """The ticks of this process that linger now."""

    def __init__(self) -> None:
        self.ticks = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one_of(self, most: int) -> Iterator[bool]:
        """Whether one more may for the block, where `most` may at once."""
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
def _told(platform: EventSQL, topics: Collection[str]) -> Iterator[threading.Event]:
    """An event that is set when the logs of some topics have new events, on any shard."""
    told = threading.Event()
    with contextlib.ExitStack() as subscriptions:
        for shard in platform.shards:
            for topic in topics:
                subscriptions.callback(shard.listener.subscribe(LOG, topic, told.set))
        yield told
