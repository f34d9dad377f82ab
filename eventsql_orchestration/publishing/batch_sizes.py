"""How many buffered events a transaction moves into their log."""

from __future__ import annotations

from typing import Final

FIRST_BATCH: Final = 1_000
LEAST_BATCH: Final = 100
MOST_BATCH: Final = 20_000
"""Events moved in one transaction. Measured: batches of 3,000 to 30,000 move at the same rate. Only a failed batch
makes the next batches smaller than `LEAST_BATCH`."""

MOST_BYTES: Final = 16 * 1024 * 1024
"""The most bytes of buffered events that a transaction moves, unless a single event is larger. The time of the last
batch decides the number of events in the next batch, whose events may be far larger. Measured on a busy machine: 300
events of 1 MiB at once held their topic for 5 to 6 s."""

BATCH_SECONDS: Final = 0.2
"""The time that a transaction should hold its topic. Batches shrink if events are large or the server is slow."""


class BatchSizes:
    """The number of events in the next batch of each topic: large events shrink only the batches of their own topic."""

    def __init__(self, fixed: int | None) -> None:
        """`fixed` is the number of events. With None, it follows their size and the server's speed."""
        self._fixed = fixed
        self._sizes: dict[str, int] = {}

    def of(self, topic: str) -> int:
        return min(self._sizes.get(topic, self._fixed or FIRST_BATCH), self._fixed or MOST_BATCH)

    def at_most(self, topic: str, most: int) -> int:
        """`most`, or fewer if a batch of the topic has failed."""
        return min(self._sizes.get(topic, most), most)

    def fit(self, topic: str, size: int, seconds: float) -> None:
        """Adapt to the time that a full batch took."""
        if seconds < BATCH_SECONDS / 2:
            size = min(size * 2, self._fixed or MOST_BATCH)
        elif seconds > BATCH_SECONDS and self._fixed is None:
            size = max(min(size, LEAST_BATCH), size // 2)
        self._sizes[topic] = size

    def halve(self, topic: str, size: int) -> None:
        """Adapt to a batch that failed."""
        self._sizes[topic] = max(1, size // 2)

    def double(self, topic: str, size: int) -> None:
        """Adapt to a batch that did not fail, if one has failed before."""
        if topic in self._sizes:
            self._sizes[topic] = max(size * 2, self._sizes[topic])
