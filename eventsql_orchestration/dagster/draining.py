"""What a consuming run does: takes over its claim, consumes it, and goes on with further ranges within its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Event, EventSQL
from eventsql_orchestration.dagster.claim_times import is_another_claim
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ClaimLostError
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.consumption import Failure
from eventsql_orchestration.log.dead_letters import describe

POLL: Final = 0.05
"""Seconds between two looks for further events of a run that drains: well below the transfer's own delay."""

STALLED_AFTER: Final = 300.0
"""Seconds after which the server ends a batch whose process stands still or is cut off: its transaction holds the
partition, and TCP takes two hours by default to notice. PostgreSQL does not do so after an `executemany` of psycopg,
whose last message, a Flush, disarms its timer."""

OWNER_PREFIX: Final = "run "


def owner_of_run(run_id: str) -> str:
    """The owner of a claim that a run has taken over."""
    return OWNER_PREFIX + run_id


def run_of_owner(owner: str) -> str | None:
    """The run that owns a claim, or None where none has taken it over yet."""
    return owner.removeprefix(OWNER_PREFIX) if owner.startswith(OWNER_PREFIX) else None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that was given up in this run, and why."""

    event_id: int
    partition: int
    error: str


@dataclass(frozen=True, slots=True)
class Consumed:
    """What consuming one claim came to."""

    events: int
    failure: Failure | None = None
    dead_letters: tuple[DeadLetter, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


Consume: TypeAlias = Callable[[Claim], Consumed]
"""Consumes the rest of a claim. Raises `ClaimLostError`."""


@dataclass(slots=True)
class Drained:
    """What a run came to so far: its claims in order with what became of each, and the claim that it lost, if any."""

    claims: list[tuple[Claim, Consumed]] = field(default_factory=list)
    lost: str | None = None

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
    def dead_letters(self) -> list[DeadLetter]:
        return [letter for _, consumed in self.claims for letter in consumed.dead_letters]

    @property
    def said(self) -> list[dict[str, Any]]:
        """The metadata of each claim."""
        return [consumed.metadata for _, consumed in self.claims]

    def ranges(self) -> list[dict[str, int]]:
        """The ranges of offsets for a run's metadata: `after` exclusive, `upto` inclusive."""
        return [
            {
                "claim": claim.id,
                "partition": claim.range.partition,
                "after": claim.position,
                "upto": claim.range.upto,
                "events": consumed.events,
            }
            for claim, consumed in self.claims
        ]


class Draining:
    """Consumes a claim, then what comes after it, until an event fails, a limit is reached or nothing more comes."""

    def __init__(self, platform: EventSQL, consume: Consume, limits: Limits, *, owner: str) -> None:
        self._platform = platform
        self._consume = consume
        self._limits = limits
        self._owner = owner
        self._deadline = time.monotonic() + limits.drain_seconds
        self.drained = Drained()

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
            return self._platform.claims.adopt(claim_id, owner=self._owner, lease=self._limits.lease)
        except ClaimLostError as error:
            self.drained.lost = str(error)
            return None

    def is_another_claim(self, claim_id: int, tags: Mapping[str, str]) -> bool:
        """Whether the run of these tags was requested for another claim of that id, with a note where it was."""
        if not is_another_claim(self._platform, claim_id, tags):
            return False
        self.drained.lost = (
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

    def committed(self, claim_id: int) -> Claim | None:
        """The claim, where it was committed; None in any other state. Raises `ClaimLostError` for an unknown one."""
        claim, state = self._platform.claims.get(claim_id)
        return claim if state == "committed" else None

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
        return found if isinstance(found, Claim) else found.reason

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
        limits, key = self._limits, previous.key
        left = limits.drain_events - self.drained.events
        if left < limits.min_events:
            return None
        idle_until = min(self._deadline, time.monotonic() + limits.drain_idle)
        while time.monotonic() < self._deadline:
            found = self._platform.claims.claim(
                key.topic, key.consumer, key.partition,
                owner=self._owner,
                min_events=limits.min_events,
                max_events=min(limits.max_events, left),
                max_wait=limits.max_wait,
                lease=limits.lease,
            )  # fmt: skip
            if isinstance(found, Claim):
                return found
            if time.monotonic() >= idle_until:
                return None
            time.sleep(POLL)
        return None


class ForeignClaimError(dg.Failure):
    """A run was given the claim of another consumer, and has not touched it."""

    def __init__(self, claim: Claim, consumer: Consumer) -> None:
        super().__init__(
            f"{claim} is none of consumer {consumer.name!r} of topic {consumer.topic!r}: launch the run without a "
            "claim, and it claims what waits",
            allow_retries=False,
        )


class ReplayError(dg.Failure):
    """A range cannot be consumed once more, and nothing of it was."""

    def __init__(self, description: str) -> None:
        super().__init__(description, allow_retries=False)


BatchFunction: TypeAlias = Callable[[Sequence[Event], Connection], object]


class BatchConsumer:
    """Consumes a claim by handing its events to a function, in transactions that also move the offset."""

    def __init__(self, platform: EventSQL, function: BatchFunction, limits: Limits) -> None:
        self._platform = platform
        self._function = function
        self._limits = limits
        self._failed: dict[int, str] = {}

    def __call__(self, claim: Claim) -> Consumed:
        """Process the rest of `claim`. Raises `ClaimLostError`."""
        self._failed.clear()
        processed = self._platform.claims.process(
            claim, self._watch, batch=self._limits.batch, lease=self._limits.lease
        )
        failure = processed.failure
        if failure is not None and failure.outcome == Failure.DEAD_LETTER:
            failure = None
        if failure is not None:
            self._failed.pop(failure.event.id, None)
        return Consumed(processed.consumed, failure, tuple(self._dead_letters(claim)))

    def replay(self, claim: Claim) -> Consumed:
        """Hand the events of a range to the function, in transactions that move no offset and take no lease.

        What the consumer's filter passes over is passed over here too. A batch that fails ends it with what its
        function raised; the batches before it stay. Raises `ReplayError` where retention has taken events.
        """
        offsets = claim.range
        partition = None if offsets.partition == NOT_PARTITIONED else offsets.partition
        left = self._platform.reader.count(offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition)
        if left != claim.events:
            raise ReplayError(
                f"{claim} cannot be replayed: {left} of its {claim.events} events are left, retention took the others"
            )
        conditions = self._platform.registry.consumer(offsets.topic, claim.consumer)[0].filter
        handed = 0
        for events in self._platform.reader.stream(
            offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition, batch=self._limits.batch
        ):
            chosen = events if conditions is None else [event for event in events if conditions.matches(event)]
            if chosen:
                with self._platform.database.transaction() as connection:
                    self._bound(connection)
                    self._function(chosen, connection)
                handed += len(chosen)
        return Consumed(handed, metadata={"replayed": True})

    def _bound(self, connection: Connection) -> None:
        connection.execute(
            "SELECT set_config('idle_in_transaction_session_timeout', %s, true)",
            (str(round(max(self._limits.lease, STALLED_AFTER) * 1000)),),
        )

    def _watch(self, events: Sequence[Event], connection: Connection) -> None:
        try:
            self._bound(connection)
            self._function(events, connection)
        except Exception as error:
            if len(events) == 1:
                self._failed[events[0].id] = describe(error.__cause__ or error)
            raise

    def _dead_letters(self, claim: Claim) -> Iterator[DeadLetter]:
        # An event that failed alone and was passed all the same is a dead letter: the claim went on after it.
        for event_id, error in self._failed.items():
            yield DeadLetter(event_id, claim.range.partition, error)
