"""Handing a claim's events to a consumer's function, batch by batch, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Event, EventSQL
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.database import Connection
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.consumption import Failure
from eventsql_orchestration.log.dead_letters import describe
from eventsql_orchestration.log.handlers import check_returned

STALLED_AFTER: Final = 300.0
"""Seconds after which the server ends a batch whose process stands still or is cut off: its transaction holds the
partition, and TCP takes two hours by default to notice. PostgreSQL does not do so after an `executemany` of psycopg,
whose last message, a Flush, disarms its timer."""


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
        self.max_dead_letters: int | None = None
        """After how many dead letters the rest of a claim is given back."""

    def __call__(self, claim: Claim) -> Consumed:
        """Process the rest of `claim`. Raises `ClaimLostError`."""
        self._failed.clear()
        processed = self._platform.claims.process(
            claim, self._watch, batch=self._limits.batch, lease=self._limits.lease,
            max_dead_letters=self.max_dead_letters,
        )  # fmt: skip
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
                    check_returned(self._function(chosen, connection))
                handed += len(chosen)
        return Consumed(handed, metadata={"replayed": True})

    def _bound(self, connection: Connection) -> None:
        connection.execute(
            "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', %s, true)",
            (str(round(max(self._limits.lease, STALLED_AFTER) * 1000)),),
        )

    def _watch(self, events: Sequence[Event], connection: Connection) -> object:
        try:
            self._bound(connection)
            return self._function(events, connection)
        except Exception as error:
            if len(events) == 1:
                self._failed[events[0].id] = describe(error.__cause__ or error)
            raise

    def _dead_letters(self, claim: Claim) -> Iterator[DeadLetter]:
        # An event that failed alone and was passed all the same is a dead letter: the claim went on after it.
        for event_id, error in self._failed.items():
            yield DeadLetter(event_id, claim.range.partition, error)
