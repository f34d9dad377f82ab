"""Failed events: recorded on the consumer's row for a retry, or made dead letters once their attempts are spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from eventsql_orchestration.consuming.dead_letter_values import MAX_MESSAGE_LENGTH, NEVER, DeadLetterCause, describe
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.partition import ConsumerPartition, LockedPartition, advance, transaction_lost
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.model import Event, how_often
from eventsql_orchestration.retry import doubled
from eventsql_orchestration.storage.erasing import FAILURE, erased_meanwhile
from eventsql_orchestration.validation import counted

logger = logger_of_errors(__name__)

FIRST_BACKOFF: Final = 1.0
MAX_BACKOFF: Final = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An event that could not be processed. `outcome` is `RETRY`, `DEAD_LETTER` or `BLOCKED`."""

    event_id: int
    partition: int
    error: str
    attempts: int
    outcome: str

    RETRY = "retry"
    DEAD_LETTER = "dead letter"
    BLOCKED = "blocked"


def backoff_after(attempts: int) -> float:
    """Seconds until an event that has failed this number of times is tried again."""
    return doubled(FIRST_BACKOFF, max(0, attempts - 1), MAX_BACKOFF)


def without_letter(failure: str, problem: BaseException) -> str:
    """A failure of an event, why no dead letter could be made of it, and what to do, as one storable line."""
    noted = f"{failure[: MAX_MESSAGE_LENGTH // 2]} (its dead letter could not be made: {describe(problem)}"
    advice = "; correct the cause, or pass over the event with `eventsql seek`)"
    return noted[: MAX_MESSAGE_LENGTH - len(advice)] + advice


def record_failure(
    connection: Connection, queries: Queries, locked: LockedPartition, event: Event, error: BaseException,
    *, dead_letters: DeadLetters | None = None,
) -> Failure:  # fmt: skip
    """Record in the caller's transaction that the next event of a locked partition failed.

    It is tried again after a backoff. Once its attempts are spent, it becomes a dead letter, if `dead_letters` accepts
    it, and the offset moves past it. Otherwise it blocks the partition, until the consumer is resumed or a dead letter
    topic is created. The log has the traceback of the first attempt, and of the last one.
    """
    key, state = locked.key, locked.state
    attempts = (state.attempts if state.failed_event_id == event.id else 0) + 1
    backoff = backoff_after(attempts)
    # The text may quote the event.
    erased = erased_meanwhile(connection, queries.schema, event)
    shown = error if erased is None else None
    described = FAILURE if shown is None else describe(shown)
    failure = Failure(event.id, event.partition, described, attempts, Failure.RETRY)

    if attempts < state.max_attempts:
        logger.warning(
            "%s will try event %d again in %.0f s (attempt %d of %d failed: %s)",
            key, event.id, backoff, attempts, state.max_attempts, failure.error,
            exc_info=shown if attempts == 1 else None,
        )  # fmt: skip
    elif dead_letters is not None and dead_letters.accepts(key.topic, connection):
        cause = DeadLetterCause.of(key.consumer, error, attempts)
        failure = _bury(connection, dead_letters, key, event, cause=cause, failure=failure, erased=erased)
        if failure.outcome == Failure.DEAD_LETTER:
            advance(connection, queries, key, after=locked.offset, upto=event.id, first=event.id, consumed=1)
            connection.execute(queries("count_given_up"), key.parameters())
            return failure
        backoff = NEVER if failure.outcome == Failure.BLOCKED else backoff
    else:
        failure = replace(failure, outcome=Failure.BLOCKED)
        create = f", or create topic {key.topic}_dlt to take such events" if dead_letters is not None else ""
        logger.error(
            "%s is blocked by event %d, which failed %s (%s); correct the handler and resume the consumer%s",
            key, event.id, how_often(attempts), failure.error, create, exc_info=shown,
        )  # fmt: skip

    values = {"event": event.id, "attempts": attempts, "failure": failure.error, "backoff": backoff}
    connection.execute(queries("record_failure"), {**key.parameters(), **values})
    return failure


def _bury(
    connection: Connection, dead_letters: DeadLetters, key: ConsumerPartition, event: Event,
    *, cause: DeadLetterCause, failure: Failure, erased: Event | None,
) -> Failure:  # fmt: skip
    """Publish the dead letter of an event, and log its traceback. Returns the failure with its outcome.

    `erased` is the event if it was erased meanwhile.
    """
    times, shown = how_often(cause.attempts), cause.error if erased is None else None
    try:
        # If the factory or the publisher fails, its effects are undone, but the failure is still recorded.
        with connection.transaction():
            buried = dead_letters.bury(connection, event, cause, erased=erased)
    except Exception as problem:
        if transaction_lost(connection):
            raise
        logger.exception(
            "%s is held up by event %d, which failed %s: its dead letter could not be made", key, event.id, times
        )
        return replace(failure, error=without_letter(failure.error, problem))

    if not buried:
        logger.error(
            "%s is blocked by event %d, which failed %s (%s) and was not made a dead letter; correct the handler or "
            "the dead letter factory and resume the consumer",
            key, event.id, times, failure.error, exc_info=shown,
        )  # fmt: skip
        return replace(failure, outcome=Failure.BLOCKED)

    logger.error(
        "%s gave event %d up after %s, as a dead letter: %s",
        key, event.id, counted(cause.attempts, "attempt"), failure.error, exc_info=shown,
    )  # fmt: skip
    return replace(failure, outcome=Failure.DEAD_LETTER)
