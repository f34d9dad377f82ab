"""Draining in a Dagster run: hands its partition over to a successor, and knows the tags of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.dagster.consumers.claim_runs import is_another_claim
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.orchestration.batch import BatchConsumer
from eventsql_orchestration.orchestration.drain import POLL, Draining
from eventsql_orchestration.orchestration.errors import ForeignClaimError, ReplayError
from eventsql_orchestration.orchestration.owners import owner_of_run

PATIENCE: Final = 30.0
"""Seconds that a successor waits for its predecessor, which may be busy with a long range."""

ASK_SECONDS: Final = 1.0
"""Seconds between two checks whether another run has ended or is about to start."""

OVERTIME: Final = 30.0
"""Maximum seconds for which a run goes on after its window, while a successor that is about to start has not claimed.
On a busy machine, the successor may take longer to start than the rest of the window lasts."""


@dataclass
class RunDraining(Draining):
    """`Draining` in a run. `successor_comes` returns whether a successor of it was requested and will start soon."""

    successor_comes: Callable[[], bool] = lambda: False
    _predecessor: str | None = field(default=None, init=False)
    _comes: bool = field(default=False, init=False)
    _asks_at: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asks_at = self._deadline

    def is_another_claim(self, claim_id: int, tags: Mapping[str, str]) -> bool:
        """Whether the run with these tags was requested for another claim with this id. Then `note` tells people."""
        if not is_another_claim(self.shard, claim_id, tags):
            return False
        self.drained.note = (
            f"claim {claim_id} is not the claim that this run was requested for, but a claim with the same number: the "
            "database was restored or created again since"
        )
        return True

    def require_own_claim(self, claim_id: int) -> None:
        """Raise `ForeignClaimError` if the claim belongs to another consumer."""
        # `take_over` reports a claim that is lost.
        with suppress(ClaimLostError):
            claim, _ = self.shard.claims.get(claim_id)
            if (claim.range.topic, claim.consumer) != (self.consumer.topic, self.consumer.name):
                raise ForeignClaimError(
                    f"{claim} does not belong to consumer {self.consumer.name!r} of topic {self.consumer.topic!r}: "
                    "launch the run without a claim, and it claims the waiting events itself"
                )

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

    def committed(self, claim_id: int) -> Claim | None:
        """The claim if it was committed, else None. Raises `ClaimNotFoundError`."""
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

    def first_of(self, run_id: str, partition: int) -> int | None:
        """The id of the first claim of a partition that a run has committed; None if none is left."""
        return self.shard.claims.first_of(owner_of_run(run_id), self.consumer.topic, self.consumer.name, partition)

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

    def _is_succeeded(self, found: NoClaim) -> bool:
        # Another owner is this run's successor, and gets the next events. The predecessor of this run soon ends by
        # itself.
        return found.leased_by not in (None, self._predecessor)
