"""Throttling: the faster events come to a consumer, the longer its partitions rest between two batches.

A poll costs as much as handing over some hundred events, whatever it finds. If a process polled once for each
publication and partition, neither the consumer nor the server would have time for anything else.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.forks import after_fork

REST_RATE: Final = 2_000.0
"""Events per second above which partitions rest; from twice that rate on, they rest for the full time. Below this rate,
each partition is polled as soon as it has an event. Then an event takes 10 ms from its publication to the handler; with
rests, it takes half a rest more."""

MOST_POLLS: Final = 200.0
"""Polls per second over all partitions of a consumer in one process while events come fast. Measured with batches of
100 at 30,000 events/s, 10 partitions, 2 CPUs: without rests, a million events took 19 s of the consumer's CPU and 29 s
of the server's."""

LEAST_REST: Final = 0.05
MOST_REST: Final = 0.25
"""Bounds of a partition's rest in seconds while events come fast, whatever the number of partitions."""

_WINDOW: Final = 0.25
"""Seconds over which the rate of events is averaged."""


class Throttle:
    """The rests of one consumer in this process, over all of its databases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions = 0
        self._rate = 0.0
        self._at = time.monotonic()

    def join(self, partitions: int) -> None:
        """Count further partitions; a negative number for partitions that are no longer polled."""
        with self._lock:
            self._partitions += partitions

    def rest(self, events: int, now: float) -> float | None:
        """The earliest time for the next poll of a partition that had this number of events; None for at once.

        Times are those of `time.monotonic`. Partitions become due together, so one look finds events for all of them.
        """
        with self._lock:
            rate = self._rate * math.exp((self._at - now) / _WINDOW) + events / _WINDOW
            self._rate, self._at = rate, now
            rest = min(MOST_REST, max(LEAST_REST, self._partitions / MOST_POLLS))

        rest *= min(1.0, rate / REST_RATE - 1.0)
        if rest <= 0.0:
            return None
        # Half a rest at least.
        return (now + rest / 2) // rest * rest + rest


@checked
class Throttles:
    """The throttles of consumers. Each is forgotten with the last consumption that uses it."""

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self, Throttles._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. Existing throttles belong to consumptions of the parent process."""
        self._lock = threading.Lock()
        self._of: weakref.WeakValueDictionary[tuple[str, str], Throttle] = weakref.WeakValueDictionary()

    def of(self, topic: str, consumer: str) -> Throttle:
        with self._lock:
            throttle = self._of.get((topic, consumer))
            if throttle is None:
                throttle = self._of[topic, consumer] = Throttle()
            return throttle
