"""The limits of publishers that collect events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from eventsql_orchestration.validation import Duration, check_seconds, check_whole

MAX_FLUSHES: Final = 1_000
"""Each flush has a thread, and a connection while it commits."""


class BufferOptions(TypedDict, total=False):
    """The fields of `BufferLimits` as keyword options."""

    max_events: int
    max_bytes: int
    max_age: Duration
    flushes: int
    max_pending_events: int
    max_pending_bytes: int


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """When events are flushed, and how many may wait.

    A lane flushes if `max_events` events or `max_bytes` bytes (of values, keys and metadata) wait in it, or if its
    oldest event has waited for `max_age` seconds. Events that come during a flush go into the lane's next flush
    together.

    `flushes` is the number of lanes, and so the most flushes under way. `max_pending_events` and `max_pending_bytes`
    bound the events that are given and not acknowledged. A single larger event is let in alone.

    Raises `ValidationError` for limits that no event could meet.
    """

    max_events: int = 1_000
    max_bytes: int = 4 * 1024 * 1024
    max_age: Duration = 0.01
    flushes: int = 2
    max_pending_events: int = 3_000
    max_pending_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("max_events", "max_bytes", "max_pending_events", "max_pending_bytes"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("flushes", self.flushes, least=1, most=MAX_FLUSHES)
        check_seconds("max_age", self.max_age, zero=True)
