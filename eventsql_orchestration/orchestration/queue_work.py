"""A run that handles the messages of a queue, batch after batch: effects and acknowledgement are one transaction."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from eventsql_orchestration.consuming.handlers import call_handler, errors_of_handler
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.load import disk_is_full
from eventsql_orchestration.database.translation import ended_for_time
from eventsql_orchestration.errors import (
    DatabaseFullError,
    DatabaseUnavailableError,
    EventSQLError,
    MessageNotFoundError,
    PermissionDeniedError,
    SchemaOutdatedError,
)
from eventsql_orchestration.orchestration.limits import WorkLimits
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.queue import Message, Queue
from eventsql_orchestration.queue.held_messages import HeldMessages
from eventsql_orchestration.queue.worker import Backoff, after_failure, pause_after, reason_of

SHOWN_FAILURES: Final = 20
"""The most failed messages whose reasons a run keeps."""

WHOLE_BATCH: Final = 10
"""A run ends if each message of a batch of at least this size fails. The cause is then hardly the messages, and going
on would spend the receives of all others."""

_OUTSIDE: Final = (DatabaseUnavailableError, DatabaseFullError, PermissionDeniedError, SchemaOutdatedError)
"""Errors that no message is to blame for. They end the run."""

MessagesHandler: TypeAlias = Callable[[Sequence[Message], Connection], Mapping[str, int]]
"""Takes messages, and the connection whose transaction acknowledges them. Gives the number of events that it published
to each topic in that transaction."""


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """A message whose handler failed at its receive number `receives`.

    It is received again in `pause` seconds, or was received for the last time and goes to the queue `dead_letters`.
    """

    id: int
    key: str | None
    shard: str | None
    receives: int
    reason: str
    pause: float
    dead_letters: str | None


@dataclass(slots=True)
class WorkedOff:
    """Result of a run. `lost` messages went to another receiver. `failed` counts failures: a message may fail several
    times. `failures` are the first of them.
    """

    handled: int = 0
    failed: int = 0
    lost: int = 0
    batches: int = 0
    published: Counter[str] = field(default_factory=Counter)
    failures: list[FailedMessage] = field(default_factory=list)
    gave_up: bool = False
    """Whether the run ended because each message of a batch failed."""


@dataclass
class QueueRun:
    """Receives messages, hands them to `handler`, and acknowledges them in the handler's transaction.

    A batch that fails is rolled back, and its messages are handled one by one, so that a failing message delays no
    other. A message that fails alone is released for `backoff(receives)` seconds with its reason. Heartbeats extend
    the messages that the run holds. Unless it is killed, the run gives back the messages that it has not handled, and
    their receive does not count.
    """

    queue: Queue
    handler: MessagesHandler
    limits: WorkLimits
    backoff: Backoff
    log: logging.Logger
    done: WorkedOff
    _held: HeldMessages = field(init=False)
    _tracebacks: Tracebacks = field(init=False)

    def __post_init__(self) -> None:
        self._held = HeldMessages(self.queue)
        self._tracebacks = Tracebacks(self.log)

    def drain(self) -> None:
        """Work until no message comes for `drain_idle` seconds, or a limit is reached.

        Raises `DatabaseUnavailableError`, `DatabaseFullError`, `PermissionDeniedError` and `SchemaOutdatedError`.
        """
        limits, timeout = self.limits, self.queue.definition().visibility_timeout
        deadline = time.monotonic() + limits.drain_seconds
        taken = 0
        with self._held.heartbeat(timeout):
            while True:
                left = limits.drain_messages - taken
                messages = self.queue.receive(
                    max_messages=min(limits.batch, left), visibility_timeout=timeout, wait=limits.drain_idle
                )
                if not messages:
                    return
                taken += len(messages)
                self._work_off(messages)
                if self.done.gave_up or taken >= limits.drain_messages or time.monotonic() >= deadline:
                    return

    def _work_off(self, messages: Sequence[Message]) -> None:
        self._held.hold(messages)
        waiting = list(messages)
        try:
            # A transaction is on one shard.
            for shard in dict.fromkeys(message.shard for message in messages):
                self._handle_batch([message for message in messages if message.shard == shard], waiting)
        finally:
            for message in waiting:
                self._held.let_go(message)
            # The visibility timeout gives them back otherwise.
            with suppress(EventSQLError):
                self.queue.give_back(waiting)

    def _handle_batch(self, messages: Sequence[Message], waiting: list[Message]) -> None:
        """Handle messages of one shard, and take them off `waiting` as they are settled."""
        self.done.batches += 1
        failed = self.done.failed
        if len(messages) > 1:
            try:
                self._handle(messages)
            except errors_of_handler() as error:
                if _is_outside(error):
                    raise
                self.log.info(
                    "a batch of %d messages failed (%s): handling them one by one", len(messages), reason_of(error)
                )
            else:
                self.done.handled += len(messages)
                self._settle(messages, waiting)
                return
        for message in messages:
            if message in self._held:
                self._handle_alone(message)
            else:
                self.done.lost += 1
                self.log.warning("message %s went to another receiver before it was handled", message.id)
            self._settle([message], waiting)
        # Batches of other shards may still follow.
        self.done.gave_up |= len(messages) >= WHOLE_BATCH and self.done.failed - failed == len(messages)

    def _handle_alone(self, message: Message) -> None:
        try:
            self._handle([message])
        except MessageNotFoundError as lost:
            if message.id not in lost.ids:
                self._fail(message, lost)
                return
            self.done.lost += 1
            self.log.warning("the effects of a message were rolled back: %s", lost)
        except errors_of_handler() as error:
            if _is_outside(error):
                raise
            self._fail(message, error)
        else:
            self.done.handled += 1

    def _handle(self, messages: Sequence[Message]) -> None:
        with self.queue.transaction(messages[0]) as connection:
            published = call_handler(connection, messages, self.handler)
            self.queue.acknowledge_all(messages, connection=connection)
        self.done.published.update(published)

    def _settle(self, messages: Sequence[Message], waiting: list[Message]) -> None:
        for message in messages:
            waiting.remove(message)
            self._held.let_go(message)

    def _fail(self, message: Message, error: BaseException) -> None:
        reason, pause = reason_of(error), pause_after(message, self.backoff)
        dead_letters = None
        self.done.failed += 1
        self._tracebacks.show(error)
        try:
            dead_letters = self.queue.release_failed(message, delay=pause, reason=reason)
        except MessageNotFoundError as lost:
            # Another receiver has it, or the handler's transaction was committed after all.
            self.log.info("message %s was not released: %s", message.id, lost)
        finally:
            self.log.warning(
                "message %s failed at its receive %s, %s: %s",
                message.id, message.receives, after_failure(pause, dead_letters), reason,
            )  # fmt: skip
            if len(self.done.failures) < SHOWN_FAILURES:
                self.done.failures.append(
                    FailedMessage(message.id, message.key, message.shard, message.receives, reason, pause, dead_letters)
                )


def _is_outside(error: BaseException) -> bool:
    if disk_is_full(error):
        return True
    return isinstance(error, _OUTSIDE) and not ended_for_time(error)
