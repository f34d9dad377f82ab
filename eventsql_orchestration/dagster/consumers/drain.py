"""A consuming run: takes its claim over, consumes it, and continues with further ranges within its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import Consumer, Shard
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.dagster.consumers.batch import BatchConsumer, ReplayError
from eventsql_orchestration.dagster.consumers.claim_runs import is_another_claim
from eventsql_orchestration.dagster.consumers.options import RunLimits
from eventsql_orchestration.dagster.consumers.owners import owner_of_run
from eventsql_orchestration.errors import ClaimLostError

POLL: Final = 0.05
"""Seconds between two looks for further events, well below the transfer's own delay."""

PATIENCE: Final = 30.0
"""Seconds that a successor waits for its predecessor, which may be busy with a long range."""

ASK_SECONDS: Final = 1.0
"""Seconds between two checks if another run has ended or is about to start."""

OVERTIME: Final = 30.0
"""Maximum time in seconds that a run continues after its window for a successor that is about to start. On a busy
machine, a run may take longer to start than the window lasts after its request."""

Consume: TypeAlias = Callable[[Claim], BatchResult]
"""Consumes the rest of a claim. Raises `ClaimLostError`."""


@dataclass(slots=True)
class Drained:
    """The claims of a run so far, in order, with the result of each.

    If the run lost a claim, `lost` says how, and the run fails. `note` tells people why the run did nothing, or did not
    consume everything.
    """

    claims: list[tuple[Claim, BatchResult]] = field(default_factory=list)
    lost: str | None = None
    note: str | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def events(self) -> int:
        return sum(result.consumed for _, result in self.claims)

    @property
    def failure(self) -> tuple[Claim, Failure] | None:
        """The event that ended the run, and its claim. A dead letter does not end a run."""
        if not self.claims:
            return None
        claim, consumed = self.claims[-1]
        return None if consumed.failure is None else (claim, consumed.failure)

    @property
    def over(self) -> bool:
        """Whether the run has to end."""
        return self.failure is not None or self.lost is not None

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


class Draining:
    """Consumes a claim, then the events after it, until an event fails, a limit is reached or no more events come.

    It works on one shard. A run that continues on another shard uses the same `drained`. `successor_comes` returns
    whether a successor of this run was requested and will start soon.
    """

    def __init__(
        self,
        platform: Shard,
        consume: Consume,
        limits: RunLimits,
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
        """The name of its shard if there are several."""
        return self._platform.name

    def require_claim_of(self, consumer: Consumer, claim_id: int) -> None:
        """Raise `ForeignClaimError` if the claim belongs to another consumer."""
        try:
            claim, _ = self._platform.claims.get(claim_id)
        except ClaimLostError:
            # `take_over` reports it.
            return
        if (claim.range.topic, claim.consumer) != (consumer.topic, consumer.name):
            raise ForeignClaimError(claim, consumer)

    def take_over(self, claim_id: int) -> Claim | None:
        """Adopt the claim that the run was requested for. None if the claim is lost; then `note` has the reason."""
        try:
            return self._mine(self._platform.claims.adopt(claim_id, owner=self._owner, lease=self._limits.lease))
        except ClaimLostError as error:
            self.drained.note = str(error)
            return None

    def is_another_claim(self, claim_id: int, tags: Mapping[str, str]) -> bool:
        """Whether the run with these tags was requested for another claim with this id. Then `note` tells people."""
        if not is_another_claim(self._platform, claim_id, tags):
            return False
        self.drained.note = (
            f"claim {claim_id} was made at another time than the one that this run was requested for: the database was "
            "restored or made anew since"
        )
        return True

    @contextmanager
    def keeping(self, claim_id: int, tags: Mapping[str, str]) -> Iterator[None]:
        """Keep the run's claim leased while another step of the run goes first."""
        if is_another_claim(self._platform, claim_id, tags):
            yield
            return
        try:
            claim = self._platform.claims.adopt(claim_id, owner=self._owner, lease=self._limits.lease)
        except ClaimLostError:
            # The step of the claim has ended, or will find that the claim is lost.
            yield
            return
        with self._platform.claims.heartbeat(claim, lease=self._limits.lease):
            yield

    def first_of(self, run_id: str, consumer: Consumer, partition: int) -> int | None:
        """The id of the first claim of a partition that a run has committed; None if none is left."""
        return self._platform.claims.first_of(owner_of_run(run_id), consumer.topic, consumer.name, partition)

    def committed(self, claim_id: int) -> Claim | None:
        """The claim if it was committed, else None. Raises `ClaimLostError` for an unknown id."""
        claim, state = self._platform.claims.get(claim_id)
        return self._mine(claim) if state == "committed" else None

    def is_committed(self, claim_id: int) -> bool:
        """Whether a claim is known to have been committed."""
        with suppress(ClaimLostError):
            return self.committed(claim_id) is not None
        return False

    def replay(self, claim: Claim) -> None:
        """Hand the range of a committed claim to the function again, without a lease and without moving the offset.

        Raises `ReplayError` if the function commits claims itself, or if events of the range are gone.
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
        """Claim all waiting events, even a single one. Returns the reason if nothing can be claimed."""
        found = self._platform.claims.claim(
            topic, consumer, partition,
            owner=self._owner, max_events=self._limits.max_events, lease=self._limits.lease,
        )  # fmt: skip
        return self._mine(found) if isinstance(found, Claim) else found.reason

    def _mine(self, claim: Claim) -> Claim:
        return replace(claim, shard=self.shard)

    def run(self, claim: Claim) -> None:
        """Consume `claim` and the events after it."""
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
            # A successor has begun, and gets the next events. The predecessor of this run ends when it notices.
            succeeded = found.leased_by not in (None, self._predecessor)
            if time.monotonic() >= idle_until or succeeded:
                return None
            time.sleep(POLL)
        return None

    def _goes_on(self, key: ConsumerPartition) -> bool:
        """Whether the window lasts, or is extended until a successor that is about to start has claimed."""
        now = time.monotonic()
        if now < self._deadline:
            return True
        # A run without a window has no successor.
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
        """Take over from a run that still drains the partition: claim as soon as events wait.

        `is_over` returns whether that run has ended. Returns the reason if nothing could be claimed for `PATIENCE`
        seconds, or if no more events came.
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
        """Claim as a sensor does: if enough events wait, or if events have waited long enough."""
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
    """A run was launched with the claim of another consumer, and has not touched the claim."""

    def __init__(self, claim: Claim, consumer: Consumer) -> None:
        super().__init__(
            f"{claim} is none of consumer {consumer.name!r} of topic {consumer.topic!r}: launch the run without a "
            "claim, and it claims what waits",
            allow_retries=False,
        )
