"""The batch runner: every consumption handles its batches with it.

Effects and offset are one transaction, and the offset only moves from where the batch was read. So a consumption that
lost its partition rolls its effects back, whichever program took the partition over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus

from eventsql_orchestration.consumer import EventFilter
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.commit_retry import CommitRetry, is_rejection, is_transient
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.failures import Failure, record_failure
from eventsql_orchestration.consuming.handlers import BatchHandler, call_handler, ends_program, errors_of_handler
from eventsql_orchestration.consuming.lost_connections import LostConnections, lost
from eventsql_orchestration.consuming.partition import ConsumerPartition, LockedPartition, advance, transaction_lost
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.load import raise_if_disk_is_full, too_much
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.errors import ConsumptionError, DatabaseError, DatabaseUnavailableError
from eventsql_orchestration.model import Event

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """All events of a locked partition from its offset to `upto`, the offset to reach if they succeed."""

    locked: LockedPartition
    events: Sequence[Event]
    upto: int

    def matching(self) -> Sequence[Event]:
        """The events that match the consumer's filter."""
        return matching(self.locked.state.filter, self.events)


def matching(conditions: EventFilter | None, events: Sequence[Event]) -> Sequence[Event]:
    """The events that match a consumer's filter; all of them without one."""
    return events if conditions is None else [event for event in events if conditions.matches(event)]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of one batch, or of several batches of one partition.

    `consumed` events were handled or became `dead_letters`, `skipped` events do not match the consumer's filter, and
    `offset` was committed. `failure` is the event that holds the partition up. `metadata` is for a report of the run
    that handled the batch.
    """

    consumed: int
    offset: int
    skipped: int = 0
    failure: Failure | None = None
    dead_letters: tuple[Failure, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)

    def __add__(self, later: BatchResult) -> BatchResult:
        return BatchResult(
            self.consumed + later.consumed, later.offset, self.skipped + later.skipped, later.failure,
            self.dead_letters + later.dead_letters, {**self.metadata, **later.metadata},
        )  # fmt: skip


class BatchSource(Protocol):
    """Reads the next batch of a consumer partition, and finishes it in the same transaction."""

    @property
    def key(self) -> ConsumerPartition: ...

    def open(self, connection: Connection, limit: int) -> Batch | None:
        """Lock the partition and read at most `limit` events; None if nothing is to be handled now."""

    def close(self, connection: Connection, result: BatchResult) -> None:
        """Write everything else that belongs to the batch. It may still be rolled back."""


class _FailedEvent:
    """An event that failed, by its index among the events of its batch.

    The error is taken out when it is recorded. The frames of its traceback refer to their callers, so if a caller still
    named the error, both would stay in memory, with the batch, until the next garbage collection.
    """

    __slots__ = ("_error", "event_id", "index")

    def __init__(self, index: int, event_id: int, error: BaseException) -> None:
        self.index = index
        self.event_id = event_id
        named = isinstance(error, ConsumptionError) and error.__cause__ is not None
        self._error: BaseException | None = error.__cause__ if named else error

    @property
    def recorded(self) -> bool:
        """Whether the error was taken out."""
        return self._error is None

    def take(self) -> BaseException:
        error, self._error = self._error, None
        assert error is not None, "a failure is recorded once"
        return error


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How to handle a batch: all at once or, with `each`, event by event, each event behind a savepoint.

    With `check`, deferred constraints are checked after each event. The handler is not called again for an event that
    `failed` before.
    """

    each: bool
    check: bool = False
    failed: _FailedEvent | None = None


class BatchRunner:
    """Handles batches: all events at once and, if that fails, event by event.

    There is no savepoint while batches succeed: a failed batch is rolled back as a whole and read again. Its events are
    then handled one by one. The events before the failing event are committed, and its failure is recorded on the
    consumer's row or, after the last attempt, makes it a dead letter in the transaction that moves the offset past it.
    A commit that the server rejects, for instance because of a deferred constraint, is a failure of its events too.

    A batch whose connection is lost is read again, and no attempt is counted: the server may have restarted. If the
    handler is to blame (see `LostConnections`), smaller batches follow until the failing event is alone.
    """

    def __init__(self, database: Database, dead_letters: DeadLetters) -> None:
        self._database = database
        self._dead_letters = dead_letters
        self._queries = Queries("log", database.schema)
        self._lost = LostConnections()
        self._unrecorded: dict[ConsumerPartition, _Attempt] = {}
        """Failures that could not be recorded, because the database was away after the connection was lost."""

    def run(
        self, source: BatchSource, handler: BatchHandler, *, limit: int, retry: CommitRetry, each: bool = False,
        cancellation: Cancellation | None = None,
    ) -> BatchResult | None:  # fmt: skip
        """Handle one batch of at most `limit` events; None if the source has none now.

        Raises `ClaimLostError` if the offset is not where the batch was read, errors of the database, rejections that
        `retry` wants tried again later, and the handler's error if the handler broke the transaction.
        """
        attempt = self._unrecorded.pop(source.key, None) or _Attempt(each=each)
        cancellation = cancellation or Cancellation()
        while True:
            size = retry.size(limit)
            try:
                outcome = self._try(attempt, source, handler, size=size, retry=retry, cancellation=cancellation)
            except DatabaseUnavailableError:
                if attempt.failed is not None and not attempt.failed.recorded:
                    self._unrecorded[source.key] = attempt
                raise
            if isinstance(outcome, _Attempt):
                attempt = outcome
                continue
            if outcome is not None:
                retry.committed(limit)
            return outcome

    def fail(self, connection: Connection, batch: Batch, error: BaseException) -> BatchResult | None:
        """Record in the caller's transaction that the event at the end of a batch failed. Those before it are skipped.

        None if the consumer does not get the event any more.
        """
        failed = [event for event in batch.matching() if event.id == batch.upto]
        return self._conclude(connection, batch, failed, _FailedEvent(0, failed[0].id, error)) if failed else None

    def _try(
        self, attempt: _Attempt, source: BatchSource, handler: BatchHandler,
        *, size: int, retry: CommitRetry, cancellation: Cancellation,
    ) -> BatchResult | _Attempt | None:  # fmt: skip
        """Handle a batch in one transaction. If it is rolled back, returns the attempt to make next."""
        outcome: BatchResult | _Attempt | None = None
        connection: Connection | None = None
        events: Sequence[Event] = ()
        committing = False
        try:
            with self._database.transaction() as connection, cancellation.connection(connection):
                if (batch := source.open(connection, size)) is not None:
                    events = batch.events
                    with source.key.held(connection, self._database.schema):
                        outcome = self._handle(connection, batch, handler, attempt)
                    if isinstance(outcome, _Attempt):
                        raise psycopg.Rollback
                    source.close(connection, outcome)
                committing = True
        except errors_of_handler() as error:
            after: _Attempt | None = None
            if connection is not None and events and attempt.failed is None and lost(connection, error):
                stops = cancellation.stopping.is_set() or ends_program(error)
                key, what = (source.key, events[0].id), f"{source.key} at event {events[0].id}"
                if not stops and self._lost.counts(key, what, connection, error):
                    after = self._after_loss(attempt, source.key, events, error, retry)
            elif isinstance(error, psycopg.Error | DatabaseError | MemoryError):
                if committing:
                    after = self._after_rejection(attempt, events, error, size, retry)
                elif not cancellation.stopping.is_set():
                    after = self._after_reading(attempt, source.key, error, size, retry)
            if after is None:
                raise
            return after
        return outcome

    def _after_loss(
        self, attempt: _Attempt, key: ConsumerPartition, events: Sequence[Event], error: BaseException,
        retry: CommitRetry,
    ) -> _Attempt:  # fmt: skip
        """The next attempt after the handler has lost the connection and is to blame."""
        if len(events) == 1:
            return _Attempt(each=True, failed=_FailedEvent(0, events[0].id, error))
        # If the transaction took too long, a smaller batch may still succeed: perhaps no single event takes too long.
        retry.halve(len(events) if ended_for_time(error) else 1)
        logger.warning("%s handles %d events at once next: %s", key, retry.size(len(events)), describe(error))
        return attempt

    def _after_reading(
        self, attempt: _Attempt, key: ConsumerPartition, error: BaseException, size: int, retry: CommitRetry
    ) -> _Attempt | None:
        """The next attempt if the batch was too large to be read or handled; None to raise the error.

        Other errors of the handler are caught before.
        """
        if isinstance(error, psycopg.Error) or size == 1 or not too_much(error):
            return None
        retry.halve(size)
        logger.info("%s reads %d events at once next: %s", key, retry.size(size), error)
        return attempt

    def _after_rejection(
        self, attempt: _Attempt, events: Sequence[Event], error: BaseException, size: int, retry: CommitRetry
    ) -> _Attempt | None:
        """The next attempt after a commit has failed; None to raise the error."""
        if not events or attempt.failed is not None or not is_rejection(error):
            return None
        single = events[0].id if size == 1 else None
        transient = is_transient(error)
        if transient and retry.try_again(single):
            return None
        if single is not None:
            return _Attempt(each=True, failed=_FailedEvent(0, single, error))
        if attempt.check or transient:
            # No event failed when the events were handled one by one.
            retry.isolate()
        return _Attempt(each=True, check=True)

    def _handle(
        self, connection: Connection, batch: Batch, handler: BatchHandler, attempt: _Attempt
    ) -> BatchResult | _Attempt:
        events = batch.matching()
        failed: _FailedEvent | None = None
        if events:
            first = events[0].id
            if attempt.failed is not None and attempt.failed.event_id == first:
                failed = attempt.failed
            elif attempt.each or batch.locked.state.failed_event_id == first:
                failed = _each(connection, events, handler, check=attempt.check)
            elif (failed := _all(connection, events, handler)) is not None:
                if len(events) == 1:
                    return _Attempt(each=True, failed=failed)
                description = describe(failed.take())
                logger.info("a batch of %d events failed (%s); handling them one by one", len(events), description)
                return _Attempt(each=True)
        return self._conclude(connection, batch, events, failed)

    def _conclude(
        self, connection: Connection, batch: Batch, events: Sequence[Event], failed: _FailedEvent | None
    ) -> BatchResult:
        """Move the offset past the handled events, and record the failure of the event after them."""
        locked = batch.locked
        if failed is None:
            self._advance(connection, locked, batch.upto, events)
            return BatchResult(len(events), batch.upto, len(batch.events) - len(events))

        done = failed.index
        event, offset = events[done], locked.offset
        before = [each for each in batch.events if each.id < event.id]
        if before:
            offset = before[-1].id
            self._advance(connection, locked, offset, events[:done])
        failure = record_failure(
            connection, self._queries, locked.at(offset), event, failed.take(), dead_letters=self._dead_letters
        )
        skipped = len(before) - done
        if failure.outcome == Failure.DEAD_LETTER:
            return BatchResult(done + 1, event.id, skipped, dead_letters=(failure,))
        return BatchResult(done, offset, skipped, failure)

    def _advance(self, connection: Connection, locked: LockedPartition, upto: int, done: Sequence[Event]) -> None:
        advance(
            connection, self._queries, locked.key,
            after=locked.offset, upto=upto, first=done[0].id if done else None, consumed=len(done),
            transaction=locked.transaction,
        )  # fmt: skip


def _all(connection: Connection, events: Sequence[Event], handler: BatchHandler) -> _FailedEvent | None:
    """Handle events at once. Returns the handler's error, or raises it if it ended the transaction or the program."""
    try:
        call_handler(connection, events, handler)
    except errors_of_handler() as error:
        if ends_program(error):
            raise
        raise_if_disk_is_full(error)
        # A statement that failed leaves the transaction open, and only a rollback can follow.
        if transaction_lost(connection) and connection.info.transaction_status is not TransactionStatus.INERROR:
            raise
        return _FailedEvent(0, events[0].id, error)
    return None


def _each(
    connection: Connection, events: Sequence[Event], handler: BatchHandler, *, check: bool
) -> _FailedEvent | None:
    """Handle events one by one up to the first that fails."""
    for index, event in enumerate(events):
        try:
            with connection.transaction():
                call_handler(connection, [event], handler)
                if check:
                    # Roll back, so that the constraints are still deferred for the next event.
                    with connection.transaction(force_rollback=True):
                        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except errors_of_handler() as error:
            if transaction_lost(connection) or ends_program(error):
                raise
            raise_if_disk_is_full(error)
            return _FailedEvent(index, event.id, error)
    return None
