"""The lag of consumers as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LagCause(StrEnum):
    """Why a consumer partition is behind."""

    NONE = "none"
    PAUSED = "paused"
    BLOCKED = "blocked"
    RETRYING = "retrying"
    LEASED = "leased"
    TRANSFER = "transfer"
    WAITING = "waiting"
    HELD_BACK = "held back"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """The lag of one consumer partition.

    `events` are not consumed yet, and `buffered` of them not transferred. `seconds` is the age of the oldest. `end` is
    the newest offset of the partition's log. `shard` is the name of its shard if there are several. If the shard is
    unreachable, the numbers are unknown, and `seconds` is how long it has been unreachable.
    """

    topic: str
    consumer: str
    partition: int
    events: int
    seconds: float
    last_event_id: int
    end: int
    buffered: int
    cause: LagCause
    detail: str
    shard: str | None = None
