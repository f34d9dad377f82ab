"""Workers of a queue: threads that receive messages, call a handler and acknowledge, with heartbeats meanwhile."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Final, TypeAlias

from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.consuming.handlers import call_handler, errors_of_handler
from eventsql_orchestration.consuming.lost_connections import LostConnections
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.load import disk_is_full
from eventsql_orchestration.errors import (
    ClosedError,
    DatabaseBusyError,
    DatabaseUnavailableError,
    EventSQLError,
    MessageNotFoundError,
    QueueNotFoundError,
)
from eventsql_orchestration.queue.held_messages import HeldMessages
from eventsql_orchestration.queue.message_queue import MessageQueue
from eventsql_orchestration.queue.values import Message
from eventsql_orchestration.retry import LONGEST_AWAY, doubled, pause_while_away
from eventsql_orchestration.threads import Wake, join_all, log_recovery, start_thread
from eventsql_orchestration.validation import Duration, check_seconds, counted

logger = logger_of_errors(__name__)

Handler: TypeAlias = Callable[[Message, Connection], object]
"""Takes a message, and the connection whose transaction acknowledges it."""

Backoff: TypeAlias = Callable[[int], float]
"""Gives the seconds until a message is received again, from the number of its receives."""

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0
"""Seconds that a message waits after its first failure, and at most."""

_FULL_AGAIN: Final = 60.0
"""A full disk after more seconds than this without one is a new line in the log: other processes may have handled the
messages that have waited for room."""

_LONGEST_REASON: Final = 1_000
"""The most characters of an error in a message's history."""


def exponential(receives: int) -> float:
    """1, 2, 4 … seconds, 300 at most, each shortened at random by up to a half."""
    return doubled(FIRST_PAUSE, receives - 1, LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def pause_after(message: Message, backoff: Backoff) -> float:
    """Seconds until a message that failed is received again; those of `exponential` if `backoff` fails."""
    try:
        return check_seconds("backoff", float(backoff(message.receives)), zero=True)
    except errors_of_handler():
        logger.exception("the backoff of message %s failed", message.id)
        return exponential(message.receives)


def after_failure(pause: float, dead_letters: str | None) -> str:
    """What happens to a message that failed, for the log. `dead_letters`: its queue if it is a dead letter now."""
    if dead_letters is None:
        return f"again in {pause:.1f} s"
    return f"the last receive, and goes to the dead letters in queue {dead_letters!r}"


def _note_held(messages: Sequence[Message], failure: EventSQLError) -> None:
    # Their visibility timeout gives them back.
    logger.info(
        "could not release %s, the first of them %s: %s", counted(len(messages), "message"), messages[0].id, failure
    )


def give_back(queue: MessageQueue, messages: Sequence[Message]) -> None:
    """Give messages back that nobody handles. If that fails, the log says so, and their visibility timeout does it."""
    try:
        queue.give_back(messages)
    except EventSQLError as failure:
        _note_held(messages, failure)


def reason_of(error: BaseException) -> str:
    """An error as the reason in a message's history."""
    return describe(error)[:_LONGEST_REASON]


class QueueWorkers(Running):
    """Running workers of a queue; `Queue.work` starts them. A context manager that stops them at its end."""

    def __init__(
        self, queue: MessageQueue, handler: Handler,
        *, workers: int, max_messages: int, visibility_timeout: float | None, backoff: Backoff,
    ) -> None:  # fmt: skip
        self._queue = queue
        self._handler = handler
        self._max_messages = max_messages
        self._visibility_timeout = visibility_timeout
        self._backoff = backoff
        self._stop = Wake()
        self._wakes = [Wake() for _ in range(workers)]
        self._threads: list[threading.Thread] = []
        self._heart: threading.Thread | None = None
        self._lock = threading.Lock()
        self._held = HeldMessages(queue)
        self._lost = LostConnections()
        self._waiting: set[tuple[str | None, int]] = set()
        """Messages that have met a full disk, until one of them is handled."""
        self._full_at = 0.0
        self._subscriptions = ExitStack()
        self.handled = 0
        """The number of messages that were handled and acknowledged."""
        self.failed = 0
        """The number of calls of the handler that failed."""
        self.dead_letters: Counter[str] = Counter()
        """The number of messages that failed at their last receive, by the queue of their dead letters."""

    def start(self) -> QueueWorkers:
        """Start the threads. Raises the errors of the queue's first use."""
        defined = self._queue.definition()
        timeout = self._visibility_timeout or defined.visibility_timeout
        try:
            for wake in self._wakes:
                self._subscriptions.callback(self._queue.subscribe(wake.set))
            for wake in self._wakes:
                self._threads.append(start_thread(f"queue-{self._queue.name}", self._run, wake))
            self._heart = self._held.start_heartbeats(timeout, self._ended)
        except BaseException:
            # The caller gets nothing to stop the others by.
            self.stop(timeout=0.0)
            raise
        return self

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout: Duration = 30.0) -> bool:
        """Let each worker finish its message and give back the others. Gives False if a handler takes longer.

        A handler that goes on after `timeout` seconds keeps its message, with heartbeats, until it ends. If a handler
        calls this, the call returns at once, and says whether the other workers have ended.
        """
        return super().stop(timeout)

    def stop_soon(self) -> None:
        self._stop.set()
        with self._lock:
            self._subscriptions.close()
        for wake in self._wakes:
            wake.set()

    def threads(self) -> Collection[threading.Thread]:
        return self._threads

    def _end(self, deadline: float) -> bool:
        join_all(self._threads, deadline)
        if self.running:
            return False
        if self._heart is not None:
            self._heart.join(max(0.0, deadline - time.monotonic()))
        return True

    # The threads

    def _run(self, wake: threading.Event) -> None:
        failures = 0
        while not self._stop.is_set():
            wake.clear()
            try:
                messages = self._queue.receive(
                    max_messages=self._max_messages, visibility_timeout=self._visibility_timeout
                )
                pause = 0.0 if messages else self._queue.pause()
                if failures:
                    log_recovery(logger, "a worker of queue %r goes on", self._queue.name)
                failures = 0
            except (ClosedError, QueueNotFoundError) as error:
                logger.warning("a worker of queue %r ends: %s", self._queue.name, error)
                return
            except EventSQLError as error:
                messages = []
                failures += 1
                pause = pause_while_away(failures)
                if failures == 1:
                    logger.warning("a worker of queue %r receives nothing, trying again: %s", self._queue.name, error)
            if messages:
                self._work_off(messages)
            elif not self._stop.is_set():
                wake.wait(pause)

    def _work_off(self, messages: list[Message]) -> None:
        self._held.hold(messages)
        try:
            for place, message in enumerate(messages):
                if self._stop.is_set():
                    give_back(self._queue, messages[place:])
                    break
                if message in self._held:
                    self._handle(message)
                self._held.let_go(message)
        finally:
            # After an unexpected error, heartbeats must not hold the rest.
            for message in messages:
                self._held.let_go(message)

    def _handle(self, message: Message) -> None:
        connection: Connection | None = None
        try:
            with self._queue.transaction(message) as connection:
                call_handler(connection, message, self._handler)
                self._queue.acknowledge(message, connection=connection)
        except MessageNotFoundError as lost:
            if message.id not in lost.ids:
                self._fail(message, lost)
                return
            logger.warning("the effects of a message were rolled back: %s", lost)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything, and ends no thread
            if disk_is_full(error):
                # First, because another worker may handle the message as soon as it is back.
                self._note_full(message, error)
                give_back(self._queue, [message])
                self._stop.wait(LONGEST_AWAY)
            elif self._is_blameless(message, connection, error):
                self._give_back_once_possible(message)
            else:
                self._fail(message, error)
        else:
            with self._lock:
                self.handled += 1
                has_room = (message.shard, message.id) in self._waiting
                if has_room:
                    self._waiting.clear()
            if has_room:
                log_recovery(logger, "the workers of queue %r go on", self._queue.name)

    def _note_full(self, message: Message, error: BaseException) -> None:
        """Log that a message waits for room: once, whichever worker meets the full disk, while it lasts."""
        now = time.monotonic()
        with self._lock:
            if now - self._full_at > _FULL_AGAIN:
                self._waiting.clear()
            self._full_at = now
            level = logging.DEBUG if self._waiting else logging.WARNING
            self._waiting.add((message.shard, message.id))
        logger.log(level, "message %s of queue %r waits for room: %s", message.id, self._queue.name, error)

    def _is_blameless(self, message: Message, connection: Connection | None, error: BaseException) -> bool:
        """Whether the handler of a message was not called, or its connection was lost and the message is not to blame.

        The database that cannot be reached may be another one, which the handler uses: then `connection` is open.
        """
        what = f"message {message.id} of queue {self._queue.name!r}"
        if connection is None:
            logger.warning("%s waits for the database: %s", what, error)
            return True
        return connection.broken and not self._lost.counts((message.shard, message.id), what, connection, error)

    def _fail(self, message: Message, error: BaseException) -> None:
        with self._lock:
            self.failed += 1
        reason = reason_of(error)
        pause = pause_after(message, self._backoff)
        dead_letters = None
        try:
            dead_letters = self._queue.release_failed(message, delay=pause, reason=reason)
        except EventSQLError as failure:
            _note_held([message], failure)
        if dead_letters is not None:
            with self._lock:
                self.dead_letters[dead_letters] += 1
        logger.warning(
            "message %s of queue %r failed at its receive %s, %s: %s",
            message.id, self._queue.name, message.receives, after_failure(pause, dead_letters), reason,
            exc_info=error,
        )  # fmt: skip

    def _give_back_once_possible(self, message: Message) -> None:
        """Give a message back when its database can be reached again, or the workers stop.

        The pauses grow with each connection that the message has lost.
        """
        failures = max(1, self._lost.so_far((message.shard, message.id)))
        while not self._stop.wait(pause_while_away(failures)):
            try:
                self._queue.give_back([message])
            except (DatabaseUnavailableError, DatabaseBusyError):
                failures += 1
            except EventSQLError as failure:
                _note_held([message], failure)
                return
            else:
                return
        give_back(self._queue, [message])

    def _ended(self, seconds: float) -> bool:
        """Whether the workers have ended, or end within `seconds`. After `stop`, handlers may take long."""
        join_all(self._threads, time.monotonic() + seconds)
        return not self.running
