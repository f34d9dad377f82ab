"""A consuming run: takes its claim over, consumes it, and continues with further ranges within its limits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from eventsql_orchestration import Consumer, Shard
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.errors import ClaimLostError, ConsumerNotFoundError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.validation import advised

POLL: Final = 0.05
"""Seconds between two looks for further events, well below the transfer's own delay."""

Consume: TypeAlias = Callable[[Claim], BatchResult]
"""Consumes the rest of a claim. Raises `ClaimLostError`."""


@dataclass(slots=True)
class Drained:
    """The claims of a run so far, in order, with the result of each.

    If the run lost a claim, `lost` says how, and the run fails. `note` tells people why the run did nothing, or did not
    consume everything; `add_note` adds a reason.
    """

    claims: list[tuple[Claim, BatchResult]] = field(default_factory=list)
    lost: str | None = None
    note: str | None = None
    started: float = field(default_factory=time.monotonic)

    def add_note(self, reason: str) -> None:
        self.note = reason if self.note is None else f"{self.note}; {reason}"

    @property
    def events(self) -> int:
        return sum(result.consumed for _, result in self.claims)

    @property
    def failures(self) -> list[tuple[Claim, Failure]]:
        """The events that hold their partitions up, and their claims. A dead letter holds no partition up."""
        return [(claim, consumed.failure) for claim, consumed in self.claims if consumed.failure is not None]

    @property
    def over(self) -> bool:
        """Whether the run has to end."""
        return bool(self.failures) or self.lost is not None

    @property
    def dead_letters(self) -> list[Failure]:
        return [letter for _, consumed in self.claims for letter in consumed.dead_letters]

    @property
    def said(self) -> list[dict[str, Any]]:
        """The metadata of each claim."""
        return [consumed.metadata for _, consumed in self.claims]

    def ranges(self) -> list[dict[str, int | str]]:
        """The ranges of offsets for a run's metadata: `after` exclusive, `upto` inclusive."""
        return [
            {
                **({} if claim.shard is None else {"shard": claim.shard}),
                "claim": claim.id,
                "partition": claim.range.partition,
                "after": claim.position,
                "upto": claim.range.upto,
                "events": consumed.consumed,
            }
            for claim, consumed in self.claims
        ]


def advice_after(failure: Failure, topic: str, consumer: str, *, accepts: bool) -> str:
    """What becomes of an event that failed, and what to do. `accepts`: whether the topic has dead letters."""
    letters = topic + DEAD_LETTER_SUFFIX
    if failure.outcome != Failure.BLOCKED:
        return f"it is retried after a pause; after its last attempt, it goes to topic {letters} if that exists"
    resume = f"run `{advised('consumer resume', topic, consumer)}`"
    if not accepts:
        then = f"correct the consumer and {resume}, or create topic {letters} for dead letters"
        return f"the partition is blocked: {then}"
    return (
        "the partition is blocked, because the dead letter factory made no dead letter of the event: correct the "
        f"consumer or the factory, then {resume}"
    )


@dataclass
class Draining:
    """Consumes claims, then the events after them, until an event fails, a limit is reached or no more events come.

    It works on one shard. A run that continues on another shard uses the same `drained`.
    """

    shard: Shard
    consumer: Consumer
    consume: Consume
    limits: RunLimits
    owner: str
    drained: Drained = field(default_factory=Drained)
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._deadline = self.drained.started + self.limits.drain_seconds

    def take_over(self, claim_id: int, *, previous: str | None = None) -> Claim:
        """Adopt the claim that the run was requested for.

        With `previous`, a claim that has another owner by now counts as lost. Raises `ClaimLostError`.
        """
        claim = self.shard.claims.adopt(claim_id, owner=self.owner, lease=self.limits.lease, previous=previous)
        return self._mine(claim)

    def take_over_held(self, claim: Claim) -> Claim | None:
        """Adopt a claim from the owner that `claim` names; None if it is lost: another owner consumes its events."""
        with suppress(ClaimLostError):
            return self.take_over(claim.id, previous=claim.owner)
        return None

    def take_over_live(self, partition: int, may: Callable[[Claim], bool]) -> Claim | None:
        """Adopt the live claim of a partition if `may` allows it; None if there is no such claim, or if it is lost."""
        live = self.shard.claims.live(self.consumer.topic, self.consumer.name, partition)
        return None if live is None or not may(live) else self.take_over_held(live)

    def _mine(self, claim: Claim) -> Claim:
        return replace(claim, shard=self.shard.name)

    def partitions(self) -> list[int]:
        """The partitions that the consumer has now. Raises `ConsumerNotFoundError`."""
        return [state.partition for state in self.shard.registry.consumer(self.consumer.topic, self.consumer.name)]

    def claim(self, partition: int, *, named: bool = False) -> Claim | NoClaim:
        """Claim all waiting events, even a single one.

        With `named`, a person has named the partition: raises `ConsumerNotFoundError` if the topic does not have it.
        """
        return self._claim(partition, most=self.limits.max_events, min_events=1, named=named)

    def _claim_if_due(self, partition: int, *, most: int) -> Claim | NoClaim:
        """Claim as a sensor does: if enough events wait, or if events have waited long enough."""
        return self._claim(partition, most=most, min_events=self.limits.min_events)

    def _claim(self, partition: int, *, most: int, min_events: int, named: bool = False) -> Claim | NoClaim:
        try:
            found = self.shard.claims.claim(
                self.consumer.topic, self.consumer.name, partition,
                owner=self.owner, min_events=min_events, max_events=most, max_wait=self.limits.max_wait,
                lease=self.limits.lease,
            )  # fmt: skip
        except ConsumerNotFoundError:
            # The topic has fewer partitions now, and the consumer has entered that layout since the partition was read.
            if named or partition in self.partitions():
                raise
            return NoClaim(f"the topic has no partition {partition} any more", waiting=0)
        return self._mine(found) if isinstance(found, Claim) else found

    def run(self, claim: Claim) -> None:
        """Consume `claim` and the events after it."""
        if self.consume_one(claim):
            self.go_on([claim.range.partition])

    def consume_one(self, claim: Claim) -> bool:
        """Consume `claim` only. False if it is lost, or if an event holds its partition up."""
        try:
            with self.shard.claims.heartbeat(claim, lease=self.limits.lease):
                consumed = self.consume(claim)
        except ClaimLostError as error:
            self.drained.lost = str(error)
            return False
        self.drained.claims.append((claim, consumed))
        return consumed.failure is None

    def go_on(self, partitions: Iterable[int]) -> None:
        """Consume the events that come next: a range of each partition in turn, except those that are held up."""
        turns = deque(partitions)
        while self.drained.lost is None and (claim := self._next(turns)) is not None:
            if not self.consume_one(claim):
                turns.remove(claim.range.partition)

    def _next(self, turns: deque[int]) -> Claim | None:
        """Claim the next range of the first partition that has events, and move the partition to the end of `turns`."""
        limits = self.limits
        left = limits.drain_events - self.drained.events
        if left < limits.min_events:
            return None
        idle_until = time.monotonic() + limits.drain_idle
        while turns and self._goes_on(turns[0]):
            for partition in self._with_events(turns):
                found = self._claim_if_due(partition, most=min(limits.max_events, left))
                turns.remove(partition)
                if isinstance(found, Claim):
                    turns.append(partition)
                    return found
                if not self._is_succeeded(found):
                    turns.append(partition)
            if time.monotonic() >= idle_until:
                return None
            time.sleep(POLL)
        return None

    def _with_events(self, turns: deque[int]) -> list[int]:
        """The partitions to claim, in turn. If there are several, one statement looks for events first."""
        if len(turns) == 1:
            return list(turns)
        waiting = {each.partition for each in self.shard.claims.standings(self.consumer) if each.waiting}
        return [partition for partition in turns if partition in waiting]

    def _goes_on(self, partition: int) -> bool:  # noqa: ARG002 - a subclass asks for the partition
        """Whether the run may claim a further range of the partition."""
        return time.monotonic() < self._deadline

    def _is_succeeded(self, found: NoClaim) -> bool:
        """Whether another owner has the partition now, and gets its next events."""
        return found.leased_by is not None
