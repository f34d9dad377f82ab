"""How often a consumer's partitions are passed over where events come fast: seldom enough that passes are worth it.

A pass costs as much as handing over some hundred events, whatever it finds. Where a process makes one for each
publication and partition, its consumer, and the server, have no time left for more. So the faster events come to a
consumer, the longer its partitions rest between two passes, and the more events each of these finds.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import Final

from eventsql_orchestration.boundary import checked

REST_RATE: Final = 2_000.0
"""Events per second above which partitions rest; from twice as many on, for the whole of their time. Below, each is
passed over as soon as it has an event: publish to handler took 10 ms then, with rests it takes that and half a rest."""

MOST_PASSES: Final = 200.0
"""Passes per second over all partitions of a consumer in one process where events come fast. Measured with batches of
100 at 30,000 events/s, 10 partitions, on 2 CPUs: without rests, they took 19 s of the consumer's CPU for a million
events, and 29 s of the server's."""

LEAST_REST: Final = 0.05
MOST_REST: Final = 0.25
"""Seconds that a partition rests where events come fast, whatever the number of partitions."""

_WINDOW: Final = 0.25
"""Seconds over which the rate of events is taken."""


class Pace:
    """The pace of one consumer in this process, over all databases on which it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions = 0
        self._rate = 0.0
        self._at = time.monotonic()

    def join(self, partitions: int) -> None:
        """So many further partitions are passed over; negative where they are not any more."""
        with self._lock:
            self._partitions += partitions

    def rest(self, events: int, now: float) -> float | None:
        """After a pass over so many events: when the partition is due again at the earliest; None for at once.

        By `time.monotonic`, as `now`. Partitions are due together, so that one look finds what all of them have.
        """
        with self._lock:
            rate = self._rate * math.exp((self._at - now) / _WINDOW) + events / _WINDOW
            self._rate, self._at = rate, now
            rest = min(MOST_REST, max(LEAST_REST, self._partitions / MOST_PASSES))
        rest *= min(1.0, rate / REST_RATE - 1.0)
        if rest <= 0.0:
            return None
        # Half a rest at least.
        return (now + rest / 2) // rest * rest + rest


@checked
class Paces:
    """The paces of consumers; each is forgotten with the last consumption that keeps it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: weakref.WeakValueDictionary[tuple[str, str], Pace] = weakref.WeakValueDictionary()

    def of(self, topic: str, consumer: str) -> Pace:
        """The one of a consumer."""
        with self._lock:
            pace = self._of.get((topic, consumer))
            if pace is None:
                pace = self._of[topic, consumer] = Pace()
            return pace
