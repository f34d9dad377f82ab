"""Hands a claim's events to a consumer's function: batch by batch, or the range as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from eventsql_orchestration import NOT_PARTITIONED, Event, Shard
from eventsql_orchestration.consuming.batch import BatchResult, matching
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.consuming.handlers import BatchHandler, call_handler, errors_of_handler
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.errors import ClaimLostError, DatabaseError
from eventsql_orchestration.orchestration.errors import (
    FinalRunError,
    FunctionExitedError,
    NotCommittedError,
    RangeFailedError,
    ReplayError,
)
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.validation import advised

STALLED_AFTER: Final = 300.0
"""Seconds after which the server ends the batch of a process that stands still or is cut off. Its transaction locks the
partition, and TCP takes two hours by default to notice. After an `executemany` of psycopg, PostgreSQL does not end the
batch: the last message, a Flush, disarms its timer."""


@contextmanager
def counting_exits() -> Iterator[None]:
    """Raise a `sys.exit()` of a user's function as an error.

    Otherwise it would end the process of the run without an attempt that counts, and the next run would meet it again.
    """
    try:
        yield
    except SystemExit as error:
        raise FunctionExitedError(f"the function called sys.exit({error.code!r}): raise an error, or return") from error


@dataclass
class BatchConsumer:
    """Consumes a claim by handing its events to a function, in transactions that also move the offset.

    Each call gets at most `batch` events. The rest of a claim is released after `max_dead_letters` dead letters; None
    for no limit.
    """

    shard: Shard
    function: BatchHandler
    batch: int
    lease: float
    tracebacks: Tracebacks
    max_dead_letters: int | None = None

    def __call__(self, claim: Claim) -> BatchResult:
        """Process the rest of `claim`. Raises `ClaimLostError`."""
        return self.shard.claims.process(
            claim, self._call, batch=self.batch, lease=self.lease, max_dead_letters=self.max_dead_letters
        )

    def replay(self, claim: Claim) -> BatchResult:
        """Hand the events of a range to the function, in transactions that move no offset and take no lease.

        Events that do not match the consumer's filter are skipped. If a batch fails, the function's error is raised,
        and the batches before it stay. Raises `ReplayError` if retention has taken events of the range.
        """
        offsets, reader = claim.range, self.shard.reader
        partition = None if offsets.partition == NOT_PARTITIONED else offsets.partition
        left = reader.count(offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition)
        if left != claim.events:
            raise ReplayError(
                f"{claim} cannot be replayed: retention deleted {claim.events - left} of its {claim.events} events. "
                "`eventsql backfill` replays the events that are left"
            )

        conditions = self.shard.registry.consumer(offsets.topic, claim.consumer)[0].filter
        replayed = BatchResult(0, offsets.after, metadata={"replayed": True})
        for events in reader.stream(
            offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition, batch=self.batch
        ):
            chosen = matching(conditions, events)
            if chosen:
                with self.shard.database.transaction() as connection:
                    call_handler(connection, chosen, self._call)
            replayed += BatchResult(len(chosen), events[-1].id, len(events) - len(chosen))
        return replayed

    def _call(self, events: Sequence[Event], connection: Connection) -> None:
        """Call the function in a transaction that the server ends if this process stands still."""
        connection.execute(
            "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', %s, true)",
            (str(round(max(self.lease, STALLED_AFTER) * 1000)),),
        )
        try:
            with counting_exits():
                returned = self.function(events, connection)
        except errors_of_handler() as error:
            self.tracebacks.show(error)
            raise
        self.tracebacks.show_unused(
            returned, "a function of batches returns None, and a function of whole claims may return metadata"
        )


@dataclass(frozen=True)
class RangeConsumer:
    """Consumes a claim by one call of a function, which commits the claim itself and returns metadata or None.

    A range that fails is released, and tried again after a pause. If the function raises after its commit, nothing is
    left to release.
    """

    shard: Shard
    function: Callable[[Claim], object]
    log: logging.Logger

    def __call__(self, claim: Claim) -> BatchResult:
        """Consume the rest of `claim`.

        Raises `NotCommittedError`, and `RangeFailedError` from the function's error. Raises the error itself if the
        range is committed, or is not at fault.
        """
        try:
            with counting_exits():
                returned = self.function(claim)
            self._require_commit(claim)
        except errors_of_handler() as error:
            of_database = isinstance(error, DatabaseError) and not ended_for_time(error)
            # If the range is not at fault, the next tick claims it again once the database is back.
            if of_database or isinstance(error, ClaimLostError) or self._is_committed(claim):
                raise
            self._release(claim, error)
            if isinstance(error, FinalRunError):
                raise
            # A retry by the orchestrator would find its claim lost.
            raise RangeFailedError(f"{claim} failed and was released: {describe(error)}") from error
        return BatchResult(claim.events, claim.range.upto, metadata=self._metadata(returned))

    def _metadata(self, returned: object) -> dict[str, Any]:
        if isinstance(returned, Mapping):
            return dict(returned)
        if returned is not None:
            # The range is committed, and belongs to the history of its run.
            self.log.warning("the function returned no metadata: a mapping or None, not %s", type(returned).__name__)
        return {}

    def _require_commit(self, claim: Claim) -> None:
        if not self._is_committed(claim):
            raise NotCommittedError(
                f"{claim} was not committed: publish with publish_dataframe(…, claim=claim), or commit it with "
                "claims.commit in the transaction of the effects"
            )

    def _is_committed(self, claim: Claim) -> bool:
        return self.shard.claims.get(claim.id)[1] == "committed"

    def _release(self, claim: Claim, error: BaseException) -> None:
        failure = self.shard.claims.fail(claim, error)
        if failure is None:
            return
        topic = claim.range.topic
        # If dead letters are accepted, the partition does not wait for a person to resume it.
        blocked = failure.outcome == Failure.BLOCKED and not self.shard.dead_letters.accepts(topic)
        then = f"run `{advised('consumer resume', topic, claim.consumer)}` to unblock its partition"
        self.log.error(
            "%s failed, attempt %d: %s", claim, failure.attempts, then if blocked else "it is retried after a pause"
        )
