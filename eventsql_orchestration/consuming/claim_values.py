"""Values that `Claims` returns: claims, reasons why nothing was claimed, and the state of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.model import OffsetRange
from eventsql_orchestration.validation import check_kind, check_name, check_text, check_whole


@dataclass(frozen=True, slots=True)
class Claim:
    """A range of a consumer partition that one owner may consume.

    `range` never changes. `position` is the offset that the owner has committed up to, `range.after` at first. `epoch`
    is the fencing token: when another owner takes the partition over, the partition gets a new epoch. `shard` is set by
    callers that handle claims of several shards.
    """

    id: int
    consumer: str
    range: OffsetRange
    events: int
    epoch: int
    owner: str
    position: int
    shard: str | None = None

    def __post_init__(self) -> None:
        check_kind("range", self.range, OffsetRange)
        check_name("consumer name", self.consumer)
        check_text("owner", self.owner)
        for name in ("id", "events", "epoch", "position"):
            check_whole(f"{name} of a claim", getattr(self, name), least=0)

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> Claim:
        claim_id, topic, consumer, partition, after, upto, events, epoch, owner, _state = row
        return cls(claim_id, consumer, OffsetRange(topic, partition, after, upto), events, epoch, owner, after)

    @property
    def key(self) -> ConsumerPartition:
        return ConsumerPartition(self.range.topic, self.consumer, self.range.partition)

    @property
    def remaining(self) -> OffsetRange:
        """The part of the range that is not committed yet."""
        return replace(self.range, after=self.position)

    def __str__(self) -> str:
        return f"claim {self.id} of {self.range} for consumer {self.consumer!r}"


@dataclass(frozen=True, slots=True)
class NoClaim:
    """The reason why nothing was claimed, as one sentence.

    If too few events wait, `waiting` is their number and `due_in` the seconds until they suffice. `waiting` is None if
    the partition cannot be claimed. `leased_by` is the owner of its lease, if it is leased.
    """

    reason: str
    waiting: int | None = None
    due_in: float | None = None
    leased_by: str | None = None


@dataclass(frozen=True, slots=True)
class LastClaim:
    """Owner of the latest claim of a partition, and seconds since it ended, or since it was made if it is live."""

    owner: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionClaims:
    """State of a partition: whether events wait after its offset, who has it, its live and its latest claim."""

    partition: int
    waiting: bool
    leased: bool
    claim: Claim | None
    last: LastClaim | None = None
    offset: int = 0
    paused: bool = False

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> PartitionClaims:
        partition, offset, waiting, leased, paused, owner, seconds, *claim = row
        live = None if claim[0] is None else Claim.of_row(claim)
        last = None if owner is None else LastClaim(owner, seconds)
        return cls(partition, waiting, leased, live, last, offset, paused)
