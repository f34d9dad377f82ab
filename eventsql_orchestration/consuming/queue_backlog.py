"""The events that a process has of a topic consumed as a queue, and the order of their keys."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from eventsql_orchestration.consuming.delivery import Delivery
from eventsql_orchestration.storage.reading import BATCH_BYTES, bytes_of

MOST_AHEAD: Final = 1_000
"""The most events that wait in a process for its workers."""

AHEAD_SECONDS: Final = 1.0
"""A process fetches events ahead for about this many seconds of work. With more, other processes might be idle."""


class Backlog:
    """The events of a process that are not settled. Call its methods with the lock of the consumption.

    While an event waits for a worker or a worker has it, later events of its key and partition stand behind it.
    """

    def __init__(self) -> None:
        self.ready: deque[Delivery] = deque()
        self.bytes = 0
        """The bytes of the values of all these events."""
        self._unsettled: dict[int, set[Delivery]] = {}
        """The deliveries of each partition."""
        self._behind: dict[tuple[int, int | None], deque[Delivery]] = {}

    def add(self, deliveries: Iterable[Delivery]) -> None:
        for each in deliveries:
            self._unsettled.setdefault(each.partition, set()).add(each)
            self.bytes += bytes_of([each.event])
            if each.key is None:
                self.ready.append(each)
            elif (behind := self._behind.get(_line_of(each))) is not None:
                behind.append(each)
            else:
                self._behind[_line_of(each)] = deque()
                self.ready.append(each)

    def settled(self, done: Delivery) -> None:
        """Forget an event, and let the next event of its key go."""
        self._forget(done)
        if done.key is None:
            return
        behind = self._behind[_line_of(done)]
        if behind:
            self.ready.append(behind.popleft())
        else:
            del self._behind[_line_of(done)]

    def behind(self, delivery: Delivery) -> list[Delivery]:
        return [] if delivery.key is None else list(self._behind[_line_of(delivery)])

    def drop_behind(self, delivery: Delivery) -> None:
        """Forget the events that stand behind `delivery`. The caller has to give them back."""
        if delivery.key is not None:
            behind = self._behind[_line_of(delivery)]
            for each in behind:
                self._forget(each)
            behind.clear()

    def clear(self) -> None:
        """Forget all events that no worker has."""
        for each in self.ready:
            self._forget(each)
            if each.key is not None:
                for later in self._behind.pop(_line_of(each)):
                    self._forget(later)
        self.ready.clear()
        for behind in self._behind.values():
            for each in behind:
                self._forget(each)
            behind.clear()

    @property
    def full(self) -> bool:
        """Whether the events are as many bytes as a batch may have."""
        return self.bytes >= BATCH_BYTES

    def unsettled(self, partition: int) -> list[Delivery]:
        """The events of a partition."""
        return list(self._unsettled.get(partition, ()))

    def idle(self, partition: int) -> bool:
        """Whether there is no event of a partition."""
        return partition not in self._unsettled

    def _forget(self, gone: Delivery) -> None:
        unsettled = self._unsettled[gone.partition]
        unsettled.remove(gone)
        self.bytes -= bytes_of([gone.event])
        if not unsettled:
            del self._unsettled[gone.partition]


def _line_of(delivery: Delivery) -> tuple[int, int | None]:
    """The deliveries that go one after another. A key may have events in several partitions, which have no order."""
    return delivery.partition, delivery.key


class Ahead:
    """How many events may wait for `workers`: as many as they handle in about a second. Call it with the same lock."""

    def __init__(self, workers: int) -> None:
        self.most = 2 * workers
        self._workers = workers
        self._fetched_at = time.monotonic()

    def adapt(self, *, waiting: int) -> None:
        """Estimate the number anew, from the time since the last call. At that call, `most` events were fetched."""
        now = time.monotonic()
        took, self._fetched_at = now - self._fetched_at, now
        if took > AHEAD_SECONDS:
            self.most = max(self._workers, self.most // 2)
        elif not waiting and took < AHEAD_SECONDS / 2:
            self.most = min(MOST_AHEAD, 2 * self.most)
