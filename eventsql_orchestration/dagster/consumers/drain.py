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
from eventsql_orchestration.dagster.consumers.batch import BatchConsumer, ReplayError
from eventsql_orchestration.dagster.consumers.claim_runs import is_another_claim
from eventsql_orchestration.dagster.consumers.options import RunLimits
from eventsql_orchestration.dagster.tags import owner_of_run
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


@dataclass
class Draining:
    """Consumes a claim, then the events after it, until an event fails, a limit is reached or no more events come.

    It works on one shard. A run that continues on another shard uses the same `drained`. `successor_comes` returns
    whether a successor of this run was requested and will start soon.
    """

    shard: Shard
    consumer: Consumer
    consume: Consume
    limits: RunLimits
    owner: str
    drained: Drained = field(default_factory=Drained)
    successor_comes: Callable[[], bool] = lambda: False
    _predecessor: str | None = field(default=None, init=False)
    _comes: bool = field(default=False, init=False)
    _deadline: float = field(init=False)
    _asks_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._asks_at = self._deadline = self.drained.started + self.limits.drain_seconds

    def require_own_claim(self, claim_id: int) -> None:
        """Raise `ForeignClaimError` if the claim belongs to another consumer."""
        # `take_over` reports a claim that is lost.
        with suppress(ClaimLostError):
            claim, _ = self.shard.claims.get(claim_id)
            if (claim.range.topic, claim.consumer) != (self.consumer.topic, self.consumer.name):
                raise ForeignClaimError(claim, self.consumer)

    def take_over(self, claim_id: int) -> Claim | None:
        """Adopt the claim that the run was requested for. None if the claim is lost; then `note` has the reason."""
        try:
            return self._adopt(claim_id)
        except ClaimLostError as error:
            self.drained.note = str(error)
            return None

    def _adopt(self, claim_id: int) -> Claim:
        return self._mine(self.shard.claims.adopt(claim_id, owner=self.owner, lease=self.limits.lease))

    def _mine(self, claim: Claim) -> Claim:
        return replace(claim, shard=self.shard.name)

    def is_another_claim(self, claim_id: int, tags: Mapping[str, str]) -> bool:
        """Whether the run with these tags was requested for another claim with this id. Then `note` tells people."""
        if not is_another_claim(self.shard, claim_id, tags):
            return False
        self.drained.note = (
            f"claim {claim_id} is not the claim that this run was requested for, but a claim with the same number: the "
            "database was restored or created again since"
        )
        return True

    @contextmanager
    def keeping(self, claim_id: int, tags: Mapping[str, str]) -> Iterator[None]:
        """Keep the run's claim leased while another step of the run goes first."""
        try:
            claim = None if is_another_claim(self.shard, claim_id, tags) else self._adopt(claim_id)
        except ClaimLostError:
            # The step of the claim has ended, or will find that the claim is lost.
            claim = None
        if claim is None:
            yield
        else:
            with self.shard.claims.heartbeat(claim, lease=self.limits.lease):
                yield

    def first_of(self, run_id: str, partition: int) -> int | None:
        """The id of the first claim of a partition that a run has committed; None if none is left."""
        return self.shard.claims.first_of(owner_of_run(run_id), self.consumer.topic, self.consumer.name, partition)

    def committed(self, claim_id: int) -> Claim | None:
        """The claim if it was committed, else None. Raises `ClaimLostError` for an unknown id."""
        claim, state = self.shard.claims.get(claim_id)
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
        if not isinstance(self.consume, BatchConsumer):
            raise ReplayError(
                f"{claim} cannot be replayed: it is committed, and the consumer's function commits its claims itself. "
                "Consume the range with another consumer, or move the offset back with `eventsql seek`"
            )
        self.drained.claims.append((claim, self.consume.replay(claim)))

    def partitions(self) -> list[int]:
        """The partitions that the consumer has now. Raises `ConsumerNotFoundError`."""
        return [state.partition for state in self.shard.registry.consumer(self.consumer.topic, self.consumer.name)]

    def claim(self, partition: int) -> Claim | NoClaim:
        """Claim all waiting events, even a single one."""
        return self._claim(partition, most=self.limits.max_events, min_events=1)

    def _claim_if_due(self, partition: int, *, most: int) -> Claim | NoClaim:
        """Claim as a sensor does: if enough events wait, or if events have waited long enough."""
        return self._claim(partition, most=most, min_events=self.limits.min_events)

    def _claim(self, partition: int, *, most: int, min_events: int) -> Claim | NoClaim:
        found = self.shard.claims.claim(
            self.consumer.topic, self.consumer.name, partition,
            owner=self.owner, min_events=min_events, max_events=most, max_wait=self.limits.max_wait,
            lease=self.limits.lease,
        )  # fmt: skip
        return self._mine(found) if isinstance(found, Claim) else found

    def run(self, claim: Claim) -> None:
        """Consume `claim` and the events after it."""
        current: Claim | None = claim
        while current is not None:
            try:
                with self.shard.claims.heartbeat(current, lease=self.limits.lease):
                    consumed = self.consume(current)
            except ClaimLostError as error:
                self.drained.lost = str(error)
                return
            self.drained.claims.append((current, consumed))
            if consumed.failure is not None:
                return
            current = self._next(current.range.partition)

    def _next(self, partition: int) -> Claim | None:
        limits = self.limits
        left = limits.drain_events - self.drained.events
        if left < limits.min_events:
            return None
        idle_until = time.monotonic() + limits.drain_idle
        while self._goes_on(partition):
            found = self._claim_if_due(partition, most=min(limits.max_events, left))
            if isinstance(found, Claim):
                return found
            # A successor has begun, and gets the next events. The predecessor of this run ends when it notices.
            succeeded = found.leased_by not in (None, self._predecessor)
            if time.monotonic() >= idle_until or succeeded:
                return None
            time.sleep(POLL)
        return None

    def _goes_on(self, partition: int) -> bool:
        """Whether the window lasts, or is extended until a successor that is about to start has claimed."""
        now = time.monotonic()
        if now < self._deadline:
            return True
        # A run without a window has no successor.
        if not self.limits.drain_seconds or now >= self._deadline + OVERTIME:
            return False
        if now >= self._asks_at:
            self._comes, self._asks_at = self.successor_comes(), now + ASK_SECONDS
        if not self._comes:
            return False
        last = self.shard.claims.last(self.consumer.topic, self.consumer.name, partition)
        return last is not None and last.owner == self.owner

    def succeed(self, run_id: str, partition: int, *, is_over: Callable[[], bool]) -> Claim | NoClaim:
        """Take over from a run that still drains the partition: claim as soon as events wait.

        `is_over` returns whether that run has ended. Gives up if nothing could be claimed for `PATIENCE` seconds, or if
        no more events came.
        """
        self._predecessor = owner_of_run(run_id)
        over, now = False, time.monotonic()
        ends, asks = now + PATIENCE, now + ASK_SECONDS
        while True:
            found = self._claim_if_due(partition, most=self.limits.max_events)
            now = time.monotonic()
            if isinstance(found, Claim) or now >= ends:
                return found
            if not over and now >= asks:
                over, asks = is_over(), now + ASK_SECONDS
                if over:
                    ends = min(ends, now + self.limits.drain_idle)
            time.sleep(POLL)


class ForeignClaimError(dg.Failure):
    """A run was launched with the claim of another consumer, and has not touched the claim."""

    def __init__(self, claim: Claim, consumer: Consumer) -> None:
        super().__init__(
            f"{claim} does not belong to consumer {consumer.name!r} of topic {consumer.topic!r}: launch the run "
            "without a claim, and it claims the waiting events itself",
            allow_retries=False,
        )
