"""What every way of consuming shares: a locked consumer partition, a batch handled in its transaction, its offset.

The offset and the handler's effects are one transaction, and the offset only moves from where the batch was read. So a
consumption that lost its partition rolls its effects back, whatever took the partition over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import ClaimLostError, ConsumptionError, DatabaseBusyError
from eventsql_orchestration.log.dead_letters import MAX_MESSAGE_LENGTH, NEVER, DeadLetterCause, DeadLetters, describe
from eventsql_orchestration.log.handlers import check_returned
from eventsql_orchestration.log.reader import MAX_OFFSET
from eventsql_orchestration.model import ConsumerState, Event, EventFilter, how_often

logger = logging.getLogger(__name__)

BatchHandler: TypeAlias = Callable[[Sequence[Event], Connection], object]
"""Takes events in order and the connection whose transaction their offset commits with."""

EventHandler: TypeAlias = Callable[[Event, Connection], object]
"""Takes one event and the connection whose transaction its offset commits with."""


def one_by_one(handler: EventHandler) -> BatchHandler:
    """A handler of single events in the form of one of batches, for `each=True`."""

    def handle_events(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            check_returned(handler(event, connection))

    return handle_events


_ENDED: Final = "the handler ended or broke the transaction that it was given"

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
    transaction: str

    @property
    def offset(self) -> int:
        return self.state.last_event_id

    @property
    def upto(self) -> int:
        """The last offset that may be consumed for now."""
        return MAX_OFFSET if self.state.until is None else self.state.until

    @property
    def leased(self) -> bool:
        return self.state.leased(self.now)

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
    """What a batch came to: events consumed, the offset reached, and the event that stopped it, if one did.

    `passed` counts the events that were passed over because they do not match the consumer's filter: a batch of such
    events alone has moved the offset too.
    """

    consumed: int
    offset: int
    failure: Failure | None = None
    passed: int = 0


def lock(connection: Connection, queries: Queries, key: ConsumerPartition, *, wait: bool) -> LockedPartition | None:
    """Lock a consumer partition in the caller's transaction.

    None when there is no such consumer or, with `wait=False`, when another transaction has it.
    """
    query = queries("await_consumer" if wait else "lock_consumer")
    # The connection may be a caller's, with a row factory of its own.
    # It may have a format of times of its own, too.
    row = connection.cursor(row_factory=tuple_row, binary=True).execute(query, key.parameters()).fetchone()
    if row is None:
        return None
    *columns, conditions, until, now, transaction = row
    state = [*columns, EventFilter.from_json(conditions), until]
    return LockedPartition(key, ConsumerState(*state), now, transaction)


class EventFailedError(Exception):
    """Internal: `event` failed with `error`, after the `done` events before it succeeded."""

    def __init__(self, event: Event, done: int, error: BaseException) -> None:
        super().__init__(event.id)
        self.event = event
        self.done = done
        self.error = error


class BatchFailedError(Exception):
    """Internal: a batch failed and its transaction must be rolled back; then its events may be handled one by one."""

    def __init__(self, events: Sequence[Event], error: Exception) -> None:
        super().__init__(str(error))
        self._events = events
        self._error = error

    def handler(self, handler: BatchHandler) -> BatchHandler:
        """The handler for the events one by one; of a batch of one event it is known how that ends."""
        if len(self._events) > 1:
            return handler
        failed = self._events[0].id
        # Given away when it is raised: the error keeps the frame below, and would be kept by it, with all the events.
        known = [self._error]

        def handle_again(events: Sequence[Event], connection: Connection) -> None:
            if events[0].id == failed:
                raise known.pop()
            handler(events, connection)

        return handle_again


class CommitRefusedError(Exception):
    """Internal: the server refused a commit for what the handler had written.

    It checks deferred constraints then. `error` is what it said; `events`, which the transaction was for, may be
    handled one by one, with `check`. With `passing`, as of a conflict, it may go well when it is tried again.
    """

    def __init__(self, error: Exception, events: Sequence[Event], *, passing: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.events = events
        self.passing = passing


_ELSEWHERE: Final = ("08", "25", "53", "54000", "57P", "58")
"""SQLSTATEs, and classes of them, that say nothing of what was written: connections, a server that takes no writes,
resources, its queue of notifications, the operator, files. No event is to blame, and it is tried again for as long as
it takes."""

_PASSING: Final = ("40", "55", "57")
"""Conflicts, locks, statements that took too long."""

_LASTING: Final = frozenset({"40002", "55000"})
"""Of these classes, what no repetition mends: a constraint that does not hold, a state that is not there."""


@contextmanager
def transaction(database: Database, events: Sequence[Event]) -> Iterator[Connection]:
    """As `Database.transaction`; `CommitRefusedError` where the server refuses the commit for what was written.

    `events` has, at the end of the block, those that it was for.
    """
    committing = False
    try:
        with database.transaction() as connection:
            yield connection
            committing = True
    except (psycopg.Error, DatabaseBusyError) as error:
        state: str | None = getattr(error if isinstance(error, psycopg.Error) else error.__cause__, "sqlstate", None)
        if not committing or state is None or state.startswith(_ELSEWHERE):
            raise
        raise CommitRefusedError(error, events, passing=state.startswith(_PASSING) and state not in _LASTING) from error


def refuse(
    connection: Connection,
    queries: Queries,
    dead_letters: DeadLetters,
    locked: LockedPartition,
    *,
    event: Event,
    error: Exception,
) -> Progress:
    """Note in the caller's transaction that the next event failed, whose effects could not be committed."""

    def fail(_events: Sequence[Event], _connection: Connection) -> None:
        raise error

    return consume(connection, queries, dead_letters, locked, events=[event], handler=fail, each=True)


def handle(
    connection: Connection,
    events: Sequence[Event],
    handler: BatchHandler,
    *,
    each: bool,
    savepoint: bool,
    check: bool = False,
) -> None:
    """Run `handler` over `events` in the caller's transaction, all at once or, with `each`, one by one.

    When it fails for all at once, its effects are undone and the events are handed to it one by one, so that the event
    that fails is known and those before it are done. Raises `EventFailedError`. Without `savepoint` the caller undoes
    the effects, and hands the events over again with `each`: raises `BatchFailedError`. With `check`, what an event's
    effects leave to the commit is checked after it.
    """
    if not each and (len(events) > 1 or not savepoint):
        try:
            if savepoint:
                _savepoint(connection, events, handler)
            else:
                _run(connection, events, handler)
            return
        except Exception as error:
            if _transaction_lost(connection) and not _transaction_failed(connection):
                raise
            if len(events) > 1:
                logger.info("a batch of %d events failed (%s); handling them one by one", len(events), describe(error))
            if not savepoint:
                raise BatchFailedError(events, error) from error
    for done, event in enumerate(events):
        try:
            _savepoint(connection, [event], handler, check=check)
        except Exception as error:
            if _transaction_lost(connection):
                raise
            raise EventFailedError(event, done, _cause(error)) from error


def _savepoint(connection: Connection, events: Sequence[Event], handler: BatchHandler, *, check: bool = False) -> None:
    with connection.transaction():
        _run(connection, events, handler)
        if check:
            # Undone, so that what comes next may leave as much to the commit.
            with connection.transaction(force_rollback=True):
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")


def _run(connection: Connection, events: Sequence[Event], handler: BatchHandler) -> None:
    try:
        check_returned(handler(events, connection))
    except psycopg.Rollback as error:
        # psycopg would take it for success, and the events would pass without their effects.
        raise psycopg.ProgrammingError("the handler rolled its effects back") from error
    if _transaction_lost(connection):
        raise psycopg.ProgrammingError(_ENDED)


def _cause(error: Exception) -> BaseException:
    if isinstance(error, ConsumptionError) and error.__cause__ is not None:
        return error.__cause__
    return error


def _transaction_lost(connection: Connection) -> bool:
    """Whether the transaction with the partition's lock is gone: nothing may be done in its place."""
    return connection.info.transaction_status is not TransactionStatus.INTRANS


def _transaction_failed(connection: Connection) -> bool:
    """Whether all that is left of the transaction is to roll it back; without a savepoint, any error leaves that."""
    return connection.info.transaction_status is TransactionStatus.INERROR


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
    savepoint: bool = True,
    check: bool = False,
) -> Progress:
    """Handle `events`, and move the offset, in the caller's transaction that holds the lock.

    Of `events`, which are all that the partition has from the offset on, the handler gets those that match the
    consumer's filter; the offset moves past the others. With `each`, and where the first of them has failed before, the
    handler gets them one by one.

    `upto` is the offset to reach when all succeed (the last event's by default). A failing event is noted on the
    consumer row, or buried once its attempts are spent; what went before it is done all the same. Raises
    `ClaimLostError` when the offset is not where the batch began, and what the handler raised when the transaction is
    lost with it. `savepoint` and `check` as in `handle`.
    """
    if upto is None:
        upto = events[-1].id if events else locked.offset
    chosen = _chosen(locked.state.filter, events)
    try:
        if chosen:
            each = each or locked.state.failed_event_id == chosen[0].id
            handle(connection, chosen, handler, each=each, savepoint=savepoint, check=check)
    except EventFailedError as failed:
        done = chosen[: failed.done]
        before = [event for event in events if event.id < failed.event.id]
        after = locked.offset
        if before:
            after = before[-1].id
            _move(connection, queries, locked, upto=after, done=done)
        failure = _record(connection, queries, dead_letters, locked, failed, after=after)
        buried = failure.outcome == Failure.DEAD_LETTER
        offset = failure.event.id if buried else after
        return Progress(len(done) + buried, offset, failure, len(before) - len(done))
    if upto > locked.offset:
        _move(connection, queries, locked, upto=upto, done=chosen)
    return Progress(len(chosen), upto, passed=len(events) - len(chosen))


def _chosen(conditions: EventFilter | None, events: Sequence[Event]) -> Sequence[Event]:
    return events if conditions is None else [event for event in events if conditions.matches(event)]


def _move(
    connection: Connection, queries: Queries, locked: LockedPartition, *, upto: int, done: Sequence[Event]
) -> None:
    first = done[0].id if done else None
    advance(
        connection, queries, locked.key,
        after=locked.offset, upto=upto, first=first, consumed=len(done), transaction=locked.transaction,
    )  # fmt: skip


def advance(
    connection: Connection,
    queries: Queries,
    key: ConsumerPartition,
    *,
    after: int,
    upto: int,
    first: int | None,
    consumed: int,
    transaction: str | None = None,
) -> None:
    """Move an offset from `after` to `upto`.

    Raises `ClaimLostError` when it is not at `after` any more, and `psycopg.ProgrammingError` where this is not the
    `transaction` that locked the partition.
    """
    values = {"after": after, "upto": upto, "first": first, "consumed": consumed, "transaction": transaction}
    cursor = connection.execute(queries("advance"), {**key.parameters(), **values})
    if cursor.rowcount != 1:
        # A handler may have set a row factory of its own.
        current = (
            connection.cursor(row_factory=tuple_row)
            .execute("SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text")
            .fetchone()
        )
        if transaction is not None and current != (transaction,):
            raise psycopg.ProgrammingError(_ENDED)
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
    """Note a failed event for a retry, or bury it when its attempts are spent and something may take it."""
    event, key, state = failed.event, locked.key, locked.state
    attempts = _attempts(locked, event)
    if attempts < state.max_attempts or not dead_letters.accepts(key.topic, connection):
        return record_failure(connection, queries, locked, event, failed.error)
    description = describe(failed.error)
    buried = False
    try:
        # What a factory publishes and what then fails is undone; the failure is noted all the same.
        with connection.transaction():
            buried = dead_letters.bury(connection, event, DeadLetterCause.of(key.consumer, failed.error, attempts))
    except Exception as error:
        if _transaction_lost(connection):
            raise
        problem = f"its dead letter could not be made: {describe(error)}"
        logger.exception("%s is held up by event %d, which failed %s: %s", key, event.id, how_often(attempts), problem)
        noted = f"{description[: MAX_MESSAGE_LENGTH // 2]} ({problem}"[: MAX_MESSAGE_LENGTH - 1] + ")"
        _note(connection, queries, key, event, attempts=attempts, failure=noted, backoff=_backoff(attempts))
        return Failure(event, noted, attempts, Failure.RETRY)
    if not buried:
        _note(connection, queries, key, event, attempts=attempts, failure=description, backoff=NEVER)
        logger.error(
            "%s is blocked by event %d, which failed %s (%s) and was not made a dead letter; mend the handler or "
            "the dead letter factory and resume the consumer",
            key, event.id, how_often(attempts), description,
        )  # fmt: skip
        return Failure(event, description, attempts, Failure.BLOCKED)
    advance(connection, queries, key, after=after, upto=event.id, first=event.id, consumed=1)
    connection.execute(queries("count_given_up"), key.parameters())
    logger.error("%s gave event %d up after %d attempts, as a dead letter: %s", key, event.id, attempts, description)
    return Failure(event, description, attempts, Failure.DEAD_LETTER)


def _attempts(locked: LockedPartition, event: Event) -> int:
    return (locked.state.attempts if locked.state.failed_event_id == event.id else 0) + 1


def _backoff(attempts: int) -> float:
    """Seconds until an event is tried again that has failed so often."""
    return min(FIRST_BACKOFF * 2.0 ** min(attempts - 1, 30), MAX_BACKOFF)


def _note(
    connection: Connection,
    queries: Queries,
    key: ConsumerPartition,
    event: Event,
    *,
    attempts: int,
    failure: str,
    backoff: float,
) -> None:
    connection.execute(
        queries("record_failure"),
        {**key.parameters(), "event": event.id, "attempts": attempts, "failure": failure, "backoff": backoff},
    )


def record_failure(
    connection: Connection, queries: Queries, locked: LockedPartition, event: Event, error: BaseException
) -> Failure:
    """Note in the caller's transaction that `event` failed: it is due again after a backoff, or blocks its partition.

    It blocks the partition when its attempts are spent, until there is a dead letter topic or the consumer is resumed.
    """
    key, state = locked.key, locked.state
    description, attempts = describe(error), _attempts(locked, event)
    backoff = _backoff(attempts)
    _note(connection, queries, key, event, attempts=attempts, failure=description, backoff=backoff)
    if attempts >= state.max_attempts:
        logger.error(
            "%s is blocked by event %d, which failed %s (%s); mend the handler and resume the consumer, "
            "or create topic %s_dlt to take such events",
            key, event.id, how_often(attempts), description, key.topic,
        )  # fmt: skip
        return Failure(event, description, attempts, Failure.BLOCKED)
    logger.warning(
        "%s will try event %d again in %.0f s (attempt %d of %d failed: %s)",
        key, event.id, backoff, attempts, state.max_attempts, description,
    )  # fmt: skip
    return Failure(event, description, attempts, Failure.RETRY)
