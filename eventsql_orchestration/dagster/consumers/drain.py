"""What a consuming run does: takes over its claim, consumes it, and goes on with further ranges within its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import Consumer, EventSQL
from eventsql_orchestration.dagster.batches import BatchConsumer, Consumed, DeadLetter, ReplayError
from eventsql_orchestration.dagster.claim_times import is_another_claim
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.log.claim_pruning import RUN_OWNER
from eventsql_orchestration.log.claims import Claim, NoClaim
from eventsql_orchestration.log.consumption import ConsumerPartition, Failure

POLL: Final = 0.05
"""Seconds between two looks for further events of a run that drains: well below the transfer's own delay."""

PATIENCE: Final = 30.0
"""Seconds that a successor waits for the run before it, which may be busy with a long range."""

ASK_SECONDS: Final = 1.0
"""Seconds between two looks of a run at another one: whether that has ended, or is on its way."""

OVERTIME: Final = 30.0
"""Seconds after the end of its window in which a run goes on for a successor that is on its way: on a machine that is
busy, a run may take longer to start than is left of the window when it is requested."""

OWNER_PREFIX: Final = RUN_OWNER


def owner_of_run(run_id: str) -> str:
    """The owner of a claim that a run has taken over."""
    return OWNER_PREFIX + run_id


def run_of_owner(owner: str) -> str | None:
    """The run that owns a claim, or None where none has taken it over yet."""
    return owner.removeprefix(OWNER_PREFIX) if owner.startswith(OWNER_PREFIX) else None


Consume: TypeAlias = Callable[[Claim], Consumed]
"""Consumes the rest of a claim. Raises `ClaimLostError`."""


@dataclass(slots=True)
class Drained:
    """What a run came to so far: its claims in order with what became of each.

    `lost` says how the run lost a claim that it had or was requested for; then it fails. `note` is for people: why
    there was nothing to do, or was not all done.
    """

    claims: list[tuple[Claim, Consumed]] = field(default_factory=list)
    lost: str | None = None
    note: str | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def events(self) -> int:
        return sum(consumed.events for _, consumed in self.claims)

    @property
    def failure(self) -> tuple[Claim, Failure] | None:
        """The event that ended the run; never one that became a dead letter."""
        if not self.claims:
            return None
        claim, consumed = self.claims[-1]
        return None if consumed.failure is None else (claim, consumed.failure)

    @property
    def over(self) -> bool:
        """Whether the run is to consume nothing more."""
        return self.failure is not None or self.lost is not None

    @property
    def dead_letters(self) -> list[DeadLetter]:
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
                "events": consumed.events,
            }
            for claim, consumed in self.claims
        ]


class Draining:
    """Consumes a claim, then what comes after it, until an event fails, a limit is reached or nothing more comes.

    It is on one database; a run that goes on with another shard has one `drained` for both. `successor_comes` tells, of
    a run whose window ends, whether another was requested to take over and will be there soon.
    """

    def __init__(
        self,
        platform: EventSQL,
        consume: Consume,
        limits: Limits,
        *,
        owner: str,
        drained: Drained | None = None,
        successor_comes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._platform = platform
        self._consume = consume
        self._limits = limits
        self._owner = owner
        self.drained = Drained() if drained is None else drained
        self._deadline = self.drained.started + limits.drain_seconds
        self._predecessor: str | None = None
        self._successor_comes = successor_comes
        self._comes = False
        self._asks_at = self._deadline

    @property
    def shard(self) -> str | None:
        """The name of its shard, where there are several."""
        return self._platform.shard

    def require_claim_of(self, consumer: Consumer, claim_id: int) -> None:
        """Raises `ForeignClaimError` for a claim of another consumer, whose events this one would take from it."""
        try:
            claim, _ = self._platform.claims.get(claim_id)
        except ClaimLostError:
            # Whoever takes it over says so.
            return
        if (claim.range.topic, claim.consumer) != (consumer.topic, consumer.name):
            raise ForeignClaimError(claim, consumer)

    def take_over(self, claim_id: int) -> Claim | None:
        """Adopt the claim that the run was requested for; None, with a note of why, when it is not to be had."""
        try:
            return self._mine(self._platform.claims.adopt(claim_id, owner=self._owner, lease=self._limits.lease))
        except ClaimLostError as error:
            self.drained.note = str(error)
            return None

    def is_another_claim(self, claim_id: int, tags: Mapping[str, str]) -> bool:
        """Whether the run of these tags was requested for another claim of that id, with a note where it was."""
        if not is_another_claim(self._platform, claim_id, tags):
            return False
        self.drained.note = (
            f"claim {claim_id} was made at another time than the one that this run was requested for: the database was "
            "restored or made anew since"
        )
        return True

    @contextmanager
    def keeping(self, claim_id: int, tags: Mapping[str, str]) -> Iterator[None]:
        """Hold the claim that the run was requested for, as long as another of its steps goes first."""
        if is_another_claim(self._platform, claim_id, tags):
            yield
            return
        try:
            claim = self._platform.claims.adopt(claim_id, owner=self._owner, lease=self._limits.lease)
        except ClaimLostError:
            # Its own step has been, or finds out.
            yield
            return
        with self._platform.claims.heartbeat(claim, lease=self._limits.lease):
            yield

    def first_of(self, run_id: str, consumer: Consumer, partition: int) -> int | None:
        """The first claim of a partition that a run has committed; None where none is known of any more."""
        return self._platform.claims.first_of(owner_of_run(run_id), consumer.topic, consumer.name, partition)

    def committed(self, claim_id: int) -> Claim | None:
        """The claim, where it was committed; None in any other state. Raises `ClaimLostError` for an unknown one."""
        claim, state = self._platform.claims.get(claim_id)
        return self._mine(claim) if state == "committed" else None

    def is_committed(self, claim_id: int) -> bool:
        """Whether a claim is known to have been committed."""
        with suppress(ClaimLostError):
            return self.committed(claim_id) is not None
        return False

    def replay(self, claim: Claim) -> None:
        """Hand a committed claim's range to the function once more, without a lease; the offset stays where it is.

        Raises `ReplayError` where the function cannot be handed a range twice, or events of it are gone.
        """
        if not isinstance(self._consume, BatchConsumer):
            raise ReplayError(
                f"{claim} cannot be replayed: its function commits the claim itself, and it is committed. "
                f"Replay the range as a consumer of its own, or move the offset with `eventsql seek`"
            )
        self.drained.claims.append((claim, self._consume.replay(claim)))

    def partitions(self, consumer: Consumer) -> list[int]:
        """The partitions that a consumer has now. Raises `ConsumerNotFoundError`."""
        return [state.partition for state in self._platform.registry.consumer(consumer.topic, consumer.name)]

    def claim(self, topic: str, consumer: str, partition: int) -> Claim | str:
        """Claim what waits, however little it is; a sentence where nothing can be claimed."""
        found = self._platform.claims.claim(
            topic, consumer, partition,
            owner=self._owner, max_events=self._limits.max_events, lease=self._limits.lease,
        )  # fmt: skip
        return self._mine(found) if isinstance(found, Claim) else found.reason

    def _mine(self, claim: Claim) -> Claim:
        return replace(claim, shard=self.shard)

    def run(self, claim: Claim) -> None:
        """Consume `claim` and what comes after it."""
        current: Claim | None = claim
        while current is not None:
            try:
                with self._platform.claims.heartbeat(current, lease=self._limits.lease):
                    consumed = self._consume(current)
            except ClaimLostError as error:
                self.drained.lost = str(error)
                return
            self.drained.claims.append((current, consumed))
            if consumed.failure is not None:
                return
            current = self._next(current)

    def _next(self, previous: Claim) -> Claim | None:
        limits = self._limits
        left = limits.drain_events - self.drained.events
        if left < limits.min_events:
            return None
        idle_until = time.monotonic() + limits.drain_idle
        while self._goes_on(previous.key):
            found = self._claim_if_due(previous.key, most=min(limits.max_events, left))
            if isinstance(found, Claim):
                return found
            # A successor has begun: what comes is for it. The run that this one succeeds ends when it finds that out.
            succeeded = found.leased_by not in (None, self._predecessor)
            if time.monotonic() >= idle_until or succeeded:
                return None
            time.sleep(POLL)
        return None

    def _goes_on(self, key: ConsumerPartition) -> bool:
        """Whether the window lasts, or its end is put off until a successor that is on its way has claimed."""
        now = time.monotonic()
        if now < self._deadline:
            return True
        # Windows of no length have no successors.
        if not self._limits.drain_seconds or now >= self._deadline + OVERTIME:
            return False
        if now >= self._asks_at:
            self._comes, self._asks_at = self._successor_comes(), now + ASK_SECONDS
        if not self._comes:
            return False
        last = self._platform.claims.last(key.topic, key.consumer, key.partition)
        return last is not None and last.owner == self._owner

    def succeed(
        self, run_id: str, topic: str, consumer: str, partition: int, *, is_over: Callable[[], bool]
    ) -> Claim | str:
        """Claim from a run that still drains the partition, as soon as there is something to claim.

        `is_over` tells whether that run has ended. A sentence where nothing could be claimed for `PATIENCE` seconds, or
        nothing came any more.
        """
        self._predecessor = owner_of_run(run_id)
        key = ConsumerPartition(topic, consumer, partition)
        over, now = False, time.monotonic()
        ends, asks = now + PATIENCE, now + ASK_SECONDS
        while True:
            found = self._claim_if_due(key, most=self._limits.max_events)
            if isinstance(found, Claim):
                return found
            now = time.monotonic()
            if now >= ends:
                return found.reason
            if not over and now >= asks:
                over, asks = is_over(), now + ASK_SECONDS
                if over:
                    ends = min(ends, now + self._limits.drain_idle)
            time.sleep(POLL)

    def _claim_if_due(self, key: ConsumerPartition, *, most: int) -> Claim | NoClaim:
        """Claim what a sensor would: as many events as it waits for, or what has waited long enough."""
        found = self._platform.claims.claim(
            key.topic, key.consumer, key.partition,
            owner=self._owner,
            min_events=self._limits.min_events,
            max_events=most,
            max_wait=self._limits.max_wait,
            lease=self._limits.lease,
        )  # fmt: skip
        return self._mine(found) if isinstance(found, Claim) else found


class ForeignClaimError(dg.Failure):
    """A run was given the claim of another consumer, and has not touched it."""

    def __init__(self, claim: Claim, consumer: Consumer) -> None:
        super().__init__(
            f"{claim} is none of consumer {consumer.name!r} of topic {consumer.topic!r}: launch the run without a "
            "claim, and it claims what waits",
            allow_retries=False,
        )
