"""What every way of consuming shares: a locked consumer partition, a batch handled in its transaction, its offset.

The offset and the handler's effects are one transaction, and the offset only moves from where the batch was read. So a
consumption that lost its partition rolls its effects back, whatever took the partition over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import ClaimLostError, ConsumptionError
from eventsql_orchestration.log.dead_letters import DeadLetters, describe
from eventsql_orchestration.model import ConsumerState, Event

logger = logging.getLogger(__name__)

BatchHandler: TypeAlias = Callable[[Sequence[Event], Connection], object]
"""Takes events in order and the connection whose transaction their offset commits with."""

EventHandler: TypeAlias = Callable[[Event, Connection], object]
"""Takes one event and the connection whose transaction its offset commits with."""


def one_by_one(handler: EventHandler) -> BatchHandler:
    """A handler of single events in the form of one of batches, for `each=True`."""

    def handle_events(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            handler(event, connection)

    return handle_events


FIRST_BACKOFF: Final = 1.0
MAX_BACKOFF: Final = 60.0


@dataclass(frozen=True, slots=True)
class ConsumerPartition:
    """The identity of a consumer partition, as the statements take it."""

    topic: str
    consumer: str
    partition: int

    def parameters(self) -> dict[str, object]:
        return {"topic": self.topic, "consumer": self.consumer, "partition": self.partition}

    def __str__(self) -> str:
        partition = "" if self.partition < 0 else f" partition {self.partition}"
        return f"consumer {self.consumer!r} of topic {self.topic!r}{partition}"


@dataclass(frozen=True, slots=True)
class LockedPartition:
    """A consumer partition as this transaction has locked it; `now` is the database's clock."""

    key: ConsumerPartition
    state: ConsumerState
    now: datetime

    @property
    def offset(self) -> int:
        return self.state.last_event_id

    @property
    def leased(self) -> bool:
        expires = self.state.lease_expires_at
        return self.state.lease_owner is not None and expires is not None and expires > self.now

    @property
    def retry_in(self) -> float:
        """Seconds until the failed event is due again; 0 when none is, or it is due."""
        if not self.state.failing or self.state.retry_at is None:
            return 0.0
        return max(0.0, (self.state.retry_at - self.now).total_seconds())


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that could not be processed. `outcome` says what became of it."""

    event: Event
    error: str
    attempts: int
    outcome: str

    RETRY = "retry"
    DEAD_LETTER = "dead letter"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a batch came to: events consumed, the offset reached, and the event that stopped it, if one did."""

    consumed: int
    offset: int
    failure: Failure | None = None


def lock(connection: Connection, queries: Queries, key: ConsumerPartition, *, wait: bool) -> LockedPartition | None:
    """Lock a consumer partition in the caller's transaction.

    None when there is no such consumer or, with `wait=False`, when another transaction has it.
    """
    query = queries("await_consumer" if wait else "lock_consumer")
    # The connection may be a caller's, with a row factory of its own.
    row = connection.cursor(row_factory=tuple_row).execute(query, key.parameters()).fetchone()
    return None if row is None else LockedPartition(key, ConsumerState(*row[:-1]), row[-1])


class EventFailedError(Exception):
    """Internal: `event` failed with `error`, after the `done` events before it succeeded."""

    def __init__(self, event: Event, done: int, error: BaseException) -> None:
        super().__init__(event.id)
        self.event = event
        self.done = done
        self.error = error


def handle(connection: Connection, events: Sequence[Event], handler: BatchHandler, *, each: bool) -> None:
    """Run `handler` over `events` in the caller's transaction, all at once or, with `each`, one by one.

    When it fails for all at once, its effects are undone and the events are handed to it one by one, so that the event
    that fails is known and those before it are done. Raises `EventFailedError`.
    """
    if not each and len(events) > 1:
        try:
            _savepoint(connection, events, handler)
            return
        except Exception as error:
            if _transaction_lost(connection):
                raise
            logger.info("a batch of %d events failed (%s); handling them one by one", len(events), describe(error))
    for done, event in enumerate(events):
        try:
            _savepoint(connection, [event], handler)
        except Exception as error:
            if _transaction_lost(connection):
                raise
            raise EventFailedError(event, done, _cause(error)) from error


def _savepoint(connection: Connection, events: Sequence[Event], handler: BatchHandler) -> None:
    with connection.transaction():
        try:
            handler(events, connection)
        except psycopg.Rollback as error:
            # psycopg would take it for success, and the events would pass without their effects.
            raise psycopg.ProgrammingError("the handler rolled its effects back") from error
        if _transaction_lost(connection):
            raise psycopg.ProgrammingError("the handler ended or broke the transaction that it was given")


def _cause(error: Exception) -> BaseException:
    if isinstance(error, ConsumptionError) and error.__cause__ is not None:
        return error.__cause__
    return error


def _transaction_lost(connection: Connection) -> bool:
    """Whether the transaction with the partition's lock is gone: nothing may be done in its place."""
    return connection.info.transaction_status is not TransactionStatus.INTRANS


def consume(
    connection: Connection,
    queries: Queries,
    dead_letters: DeadLetters,
    locked: LockedPartition,
    *,
    events: Sequence[Event],
    handler: BatchHandler,
    each: bool = False,
    upto: int | None = None,
) -> Progress:
    """Handle `events`, and move the offset, in the caller's transaction that holds the lock.

    With `each`, and where the first event has failed before, the handler gets the events one by one.

    `upto` is the offset to reach when all succeed (the last event's by default). A failing event is noted on the
    consumer row, or buried once its attempts are spent; what went before it is done all the same. Raises
    `ClaimLostError` when the offset is not where the batch began, and what the handler raised when the transaction is
    lost with it.
    """
    if not events:
        if upto is not None and upto > locked.offset:
            advance(connection, queries, locked.key, after=locked.offset, upto=upto, first=None, consumed=0)
            return Progress(0, upto)
        return Progress(0, locked.offset)
    try:
        handle(connection, events, handler, each=each or locked.state.failed_event_id == events[0].id)
    except EventFailedError as failed:
        done = events[: failed.done]
        after = locked.offset
        if done:
            after = done[-1].id
            advance(
                connection, queries, locked.key,
                after=locked.offset, upto=after, first=done[0].id, consumed=len(done),
            )  # fmt: skip
        failure = _record(connection, queries, dead_letters, locked, failed, after=after)
        buried = failure.outcome == Failure.DEAD_LETTER
        return Progress(len(done) + buried, failure.event.id if buried else after, failure)
    offset = events[-1].id if upto is None else upto
    advance(connection, queries, locked.key, after=locked.offset, upto=offset, first=events[0].id, consumed=len(events))
    return Progress(len(events), offset)


def advance(
    connection: Connection,
    queries: Queries,
    key: ConsumerPartition,
    *,
    after: int,
    upto: int,
    first: int | None,
    consumed: int,
) -> None:
    """Move an offset from `after` to `upto`. Raises `ClaimLostError` when it is not at `after` any more."""
    cursor = connection.execute(
        queries("advance"), {**key.parameters(), "after": after, "upto": upto, "first": first, "consumed": consumed}
    )
    if cursor.rowcount != 1:
        raise ClaimLostError(f"{key} is not at offset {after} any more: another consumption moved it")


def _record(
    connection: Connection,
    queries: Queries,
    dead_letters: DeadLetters,
    locked: LockedPartition,
    failed: EventFailedError,
    *,
    after: int,
) -> Failure:
    """Note a failed event for a retry, or bury it when its attempts are spent and there is a topic to take it."""
    event, key, state = failed.event, locked.key, locked.state
    attempts = _attempts(locked, event)
    dead_letter_topic = None if attempts < state.max_attempts else dead_letters.topic_of(key.topic, connection)
    if dead_letter_topic is None:
        return record_failure(connection, queries, locked, event, failed.error)
    description = describe(failed.error)
    dead_letters.bury(
        connection, dead_letter_topic, event, consumer=key.consumer, failure=description, attempts=attempts
    )
    advance(connection, queries, key, after=after, upto=event.id, first=event.id, consumed=1)
    logger.error("%s gave event %d up after %d attempts, as a dead letter: %s", key, event.id, attempts, description)
    return Failure(event, description, attempts, Failure.DEAD_LETTER)


def _attempts(locked: LockedPartition, event: Event) -> int:
    return (locked.state.attempts if locked.state.failed_event_id == event.id else 0) + 1


def record_failure(
    connection: Connection, queries: Queries, locked: LockedPartition, event: Event, error: BaseException
) -> Failure:
    """Note in the caller's transaction that `event` failed: it is due again after a backoff, or blocks its partition.

    It blocks the partition when its attempts are spent, until there is a dead letter topic or the consumer is resumed.
    """
    key, state = locked.key, locked.state
    description, attempts = describe(error), _attempts(locked, event)
    backoff = min(FIRST_BACKOFF * 2 ** min(attempts - 1, 30), MAX_BACKOFF)
    connection.execute(
        queries("record_failure"),
        {
            **key.parameters(),
            "event": event.id,
            "attempts": attempts,
            "failure": description,
            "backoff": backoff,
        },
    )
    if attempts >= state.max_attempts:
        logger.error(
            "%s is blocked by event %d, which failed %d times (%s); mend the handler and resume the consumer, "
            "or create topic %s_dlt to take such events",
            key, event.id, attempts, description, key.topic,
        )  # fmt: skip
        return Failure(event, description, attempts, Failure.BLOCKED)
    logger.warning(
        "%s will try event %d again in %.0f s (attempt %d of %d failed: %s)",
        key, event.id, backoff, attempts, state.max_attempts, description,
    )  # fmt: skip
    return Failure(event, description, attempts, Failure.RETRY)
