"""Hands a claim's events to a consumer's function, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Event, Shard
from eventsql_orchestration.consuming.batch import BatchResult, check_returned, matching
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.database import Connection

STALLED_AFTER: Final = 300.0
"""Seconds after which the server ends the batch of a process that stands still or is cut off. Its transaction locks the
partition, and TCP takes two hours by default to notice. After an `executemany` of psycopg, PostgreSQL does not end the
batch: the last message, a Flush, disarms its timer."""


class ReplayError(dg.Failure):
    """A range cannot be replayed, and none of its events was."""

    def __init__(self, description: str) -> None:
        super().__init__(description, allow_retries=False)


BatchFunction: TypeAlias = Callable[[Sequence[Event], Connection], object]


class BatchConsumer:
    """Consumes a claim by handing its events to a function, in transactions that also move the offset.

    The rest of a claim is released after `max_dead_letters` dead letters; None for no limit.
    """

    def __init__(self, platform: Shard, function: BatchFunction, *, batch: int, lease: float) -> None:
        self._platform = platform
        self._function = function
        self._batch = batch
        self._lease = lease
        self.max_dead_letters: int | None = None

    def __call__(self, claim: Claim) -> BatchResult:
        """Process the rest of `claim`. Raises `ClaimLostError`."""
        return self._platform.claims.process(
            claim, self._call, batch=self._batch, lease=self._lease, max_dead_letters=self.max_dead_letters
        )

    def replay(self, claim: Claim) -> BatchResult:
        """Hand the events of a range to the function, in transactions that move no offset and take no lease.

        Events that do not match the consumer's filter are skipped. If a batch fails, the function's error is raised,
        and the batches before it stay. Raises `ReplayError` if retention has taken events of the range.
        """
        offsets = claim.range
        partition = None if offsets.partition == NOT_PARTITIONED else offsets.partition
        left = self._platform.reader.count(offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition)
        if left != claim.events:
            raise ReplayError(
                f"{claim} cannot be replayed: {left} of its {claim.events} events are left, retention took the others"
            )

        conditions = self._platform.registry.consumer(offsets.topic, claim.consumer)[0].filter
        replayed = BatchResult(0, offsets.after, metadata={"replayed": True})
        for events in self._platform.reader.stream(
            offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition, batch=self._batch
        ):
            chosen = matching(conditions, events)
            if chosen:
                with self._platform.database.transaction() as connection:
                    check_returned(self._call(chosen, connection))
            replayed += BatchResult(len(chosen), events[-1].id, len(events) - len(chosen))
        return replayed

    def _call(self, events: Sequence[Event], connection: Connection) -> object:
        """Call the function in a transaction that the server ends if this process stands still."""
        connection.execute(
            "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', %s, true)",
            (str(round(max(self._lease, STALLED_AFTER) * 1000)),),
        )
        return self._function(events, connection)
