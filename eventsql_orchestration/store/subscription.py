"""Subscriptions: a handler gets each change of the store once, in order, and its effects commit with its place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

import psycopg

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.consuming.failures import backoff_after
from eventsql_orchestration.consuming.handlers import call_handler, check_handler, ends_program, errors_of_handler
from eventsql_orchestration.consuming.lost_connections import LostConnections, lost
from eventsql_orchestration.consuming.partition import TRANSACTION_ENDED
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.held_by_handlers import holding
from eventsql_orchestration.database.load import raise_if_disk_is_full
from eventsql_orchestration.database.notifications import STORE, Listener
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.errors import ClosedError, EventSQLError, SubscriptionNotFoundError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.store.change import RecordedChange, StoreCheckpoint
from eventsql_orchestration.store.dead_letters import StoreDeadLetter, change_of, letters
from eventsql_orchestration.store.order import Filters, GlobalOrder
from eventsql_orchestration.threads import Wake, log_recovery, start_thread
from eventsql_orchestration.validation import Duration, check_name, check_seconds, check_whole, counted, in_seconds

logger = logger_of_errors(__name__)

ChangeHandler: TypeAlias = Callable[[RecordedChange, Connection], object]
"""Takes one change, and the connection whose transaction moves the subscription past it."""

FAULT_DELAY: Final = 5.0
"""Seconds until a subscription goes on after an error that is not a failure of a change."""

_REFUSED: Final = (psycopg.IntegrityError, psycopg.errors.RaiseException, psycopg.DataError)
"""Errors of a commit that the server refuses because of written rows, for example by a deferred constraint."""


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """How a subscription reads and retries: changes per transaction, attempts per change, seconds between two looks."""

    batch: int = 100
    max_attempts: int = 5
    polling_delay: Duration = 0.5

    def __post_init__(self) -> None:
        check_whole("batch", self.batch, least=1, most=100_000)
        check_whole("max_attempts", self.max_attempts, least=1, most=1_000)
        check_seconds("polling_delay", self.polling_delay, zero=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """The result of one transaction of a subscription.

    `handled` changes took effect. With `more`, further changes wait. `due_in` is the time in seconds until a failed
    change is tried again. `active` is False if another process has the subscription.
    """

    handled: int = 0
    more: bool = False
    due_in: float | None = None
    active: bool = True


class _Locked(NamedTuple):
    """A locked subscription: its place, its failed attempts, the seconds until the next one, and the transaction."""

    after: StoreCheckpoint
    attempts: int
    due_in: float
    by: str


class _FailedError(Exception):
    """A change could not be handled. With `one_by_one`, so many changes of its batch are to be handled alone first."""

    def __init__(self, change: RecordedChange, cause: BaseException, *, one_by_one: int = 0) -> None:
        super().__init__()
        self.change = change
        self.cause = cause
        self.one_by_one = one_by_one

    @classmethod
    def of_all(cls, changes: list[RecordedChange], cause: BaseException) -> _FailedError:
        """The transaction of these changes could not be committed, or lost its connection: one of them is to blame."""
        return cls(changes[0], cause, one_by_one=len(changes) if len(changes) > 1 else 0)


@checked
class Subscription:
    """Hands the changes of the store to one handler, each once, in the global order.

    The effects that a handler has through its connection are committed together with the subscription's place. Any
    number of processes may run the subscription: one at a time has it. A change that fails is tried again after 1 s,
    2 s, up to 60 s; later changes wait for it. After its last attempt it becomes a dead letter, and the subscription
    goes on.

    `Store.subscribe` makes and starts a subscription.
    """

    def __init__(
        self, database: Database, name: str, handler: ChangeHandler,
        *, only: Filters, options: SubscriptionOptions, listener: Listener | None,
    ) -> None:  # fmt: skip
        check_handler(handler, "change", "connection")
        self.name = check_name("name of a subscription", name)
        self._database = database
        self._handler = handler
        self._only = only
        self._options = options
        self._listener = listener
        self._order = GlobalOrder(database)
        self._queries = Queries("subscriptions", database.schema)
        self._one_by_one = 0
        self._lost = LostConnections()
        self._unrecorded: tuple[RecordedChange, BaseException] | None = None
        """A failure that could not be recorded, because the database was away after the connection was lost."""
        self._began_at: StoreCheckpoint | None = None
        self._after_fork()
        after_fork(self, Subscription._after_fork)

    def _after_fork(self) -> None:
        self._starting = threading.Lock()
        self._stop = Wake()
        self._wake = Wake()
        self._thread: threading.Thread | None = None

    # One transaction at a time

    def run_once(self) -> Progress:
        """Handle the next changes, in one transaction. Raises database errors; a handler's errors are recorded.

        Raises `SubscriptionNotFoundError` if the subscription was deleted.
        """
        if self._unrecorded is not None:
            return self._record(*self._unrecorded)
        limit = 1 if self._one_by_one else self._options.batch
        try:
            progress = self._handle(limit)
        except _FailedError as failed:
            if not failed.one_by_one:
                return self._record(failed.change, failed.cause)
            self._one_by_one = failed.one_by_one
            return Progress(more=True)
        self._one_by_one = max(0, self._one_by_one - progress.handled)
        return progress

    def _handle(self, limit: int) -> Progress:
        connection: Connection | None = None
        changes: list[RecordedChange] = []
        handled = False
        try:
            with self._database.transaction() as connection:
                locked = self._lock(connection)
                if locked is None:
                    return Progress(active=False)
                if locked.due_in:
                    return Progress(due_in=locked.due_in)
                after = self._began_at = locked.after

                # Ask before the changes are read, so that the place does not pass changes that commit in between.
                newest = self._order.newest(connection)
                changes = self._order.read(connection, after, self._only, limit)
                with self._held(connection):
                    for number, change in enumerate(changes):
                        self._call(change, number, connection)

                places = [each.checkpoint for each in changes[-1:] if each.checkpoint is not None]
                reached = max([after, *places, *([newest] if len(changes) < limit else [])])
                if reached > after:
                    self._advance(connection, locked, reached, changes)
                handled = True
        except _FailedError:
            raise
        except errors_of_handler() as error:
            if not changes or connection is None:
                raise
            if lost(connection, error):
                at, what = changes[0].checkpoint, f"subscription {self.name} at {changes[0].reference}"
                failed = not ends_program(error) and self._lost.counts(at, what, connection, error)
            else:
                failed = handled and isinstance(error, _REFUSED)
            if not failed:
                raise
            raise _FailedError.of_all(changes, error) from error
        return Progress(len(changes), more=len(changes) == limit)

    def _held(self, connection: Connection) -> AbstractContextManager[None]:
        """A block for handlers whose transaction has locked the subscription, or a dead letter of it."""
        what = f"subscription {self.name!r}"
        return holding(connection, self._database.schema, what, "subscription", self.name)

    def _call(self, change: RecordedChange, number: int, connection: Connection) -> None:
        try:
            call_handler(connection, change, self._handler)
        except errors_of_handler() as error:
            if connection.closed or ends_program(error):
                raise
            raise_if_disk_is_full(error)
            # The changes before it succeed again, and then it is the first of its batch.
            raise _FailedError(change, error, one_by_one=number) from error

    def _lock(self, connection: Connection) -> _Locked | None:
        """Lock the subscription's row; None if another process has it."""
        start = self._order.home.place(connection, None)
        row = fetch_first(connection, self._queries("lock"), {"name": self.name}, prepare=False)
        if row is None:
            if fetch_first(connection, self._queries("exists"), {"name": self.name}, prepare=False) is None:
                raise SubscriptionNotFoundError(f"subscription {self.name!r} does not exist: subscribe again")
            return None
        transaction, position, attempts, due_in, locked_by = row
        return _Locked(StoreCheckpoint(start.era, int(transaction), position), attempts, due_in, locked_by)

    def _advance(
        self, connection: Connection, locked: _Locked, to: StoreCheckpoint, handled: list[RecordedChange]
    ) -> None:
        """Move the subscription. Raises if a handler has ended the transaction that locked it, and begun another."""
        values = {"name": self.name, **to.parameters(), "handled": len(handled), "locked_by": locked.by}
        if connection.execute(self._queries("advance"), values).rowcount != 1:
            raise _FailedError.of_all(handled, psycopg.ProgrammingError(TRANSACTION_ENDED))

    def _record(self, change: RecordedChange, error: BaseException) -> Progress:
        """Note that the next change failed, or give it up after its last attempt."""
        self._unrecorded = change, error
        progress = self._note_failure(change, error)
        self._unrecorded = None
        return progress

    def _note_failure(self, change: RecordedChange, error: BaseException) -> Progress:
        with self._database.transaction() as connection:
            locked = self._lock(connection)
            place = change.checkpoint
            assert place is not None, "a change that was read in the global order has a place"
            if locked is None:
                return Progress(active=False)
            if locked.after != self._began_at:
                # Another process has handled it meanwhile, or the subscription was moved.
                return Progress(more=True)

            attempts = locked.attempts + 1
            failure = describe(error)
            values = {"name": self.name, "attempts": attempts, "failure": failure}
            if attempts < self._options.max_attempts:
                backoff = backoff_after(attempts)
                connection.execute(self._queries("record_failure"), {**values, "backoff": backoff})
                logger.warning(
                    "subscription %s will try %s again in %.0f s (attempt %d of %d failed: %s)",
                    self.name, change.reference, backoff, attempts, self._options.max_attempts, failure,
                    exc_info=error if attempts == 1 else None,
                )  # fmt: skip
                return Progress(due_in=backoff)

            of = {"type": change.aggregate_type, "id": change.aggregate_id, "version": change.version}
            connection.execute(self._queries("bury"), {**values, **of})
            self._advance(connection, locked, place, [])
        logger.error(
            "subscription %s gave %s up after %s: %s",
            self.name, change.reference, counted(attempts, "attempt"), failure, exc_info=error,
        )  # fmt: skip
        return Progress(more=True)

    # In the background

    def start(self) -> Self:
        """Run in a thread until `stop`."""
        with self._starting:
            # A thread that was stopped may still be in its last transaction.
            if self._stop.is_set() or not self.running:
                self._stop = Wake()
                self._thread = start_thread(f"subscription-{self.name}", self.run, self._stop)
        return self

    def stop(self, timeout: Duration = 10.0) -> bool:
        """Let the thread finish its transaction and end; False if it has not ended after `timeout` seconds."""
        self._stop.set()
        self._wake.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(in_seconds(timeout))
        return not self.running

    @property
    def running(self) -> bool:
        """Whether the thread that `start` made runs."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, stop: threading.Event) -> None:
        """Handle changes until `stop` is set: at once on a notification, and every `polling_delay` seconds."""
        polling_delay = in_seconds(self._options.polling_delay)
        unsubscribe = None if self._listener is None else self._listener.subscribe(STORE, None, self._wake.set)
        fault: str | None = None
        try:
            while not stop.is_set():
                self._wake.clear()
                delay = polling_delay
                try:
                    progress = self.run_once()
                except SubscriptionNotFoundError as error:
                    logger.error("%s", error)
                    return
                except ClosedError as error:
                    logger.warning("subscription %s ends: %s", self.name, error)
                    return
                except (psycopg.Error, EventSQLError) as error:
                    # An error that lasts is one line.
                    level = logging.DEBUG if str(error) == fault else logging.WARNING
                    logger.log(level, "subscription %s tries again every %.0f s: %s", self.name, FAULT_DELAY, error)
                    delay, fault = FAULT_DELAY, str(error)
                except BaseException as error:
                    # A handler may wrap the error of a lost connection in its own error, or raise an error that would
                    # end a thread silently. Only the program ends its main thread.
                    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                        raise
                    logger.exception("subscription %s goes on in %.0f s", self.name, FAULT_DELAY)
                    delay, fault = FAULT_DELAY, ""
                else:
                    if fault is not None:
                        log_recovery(logger, "subscription %s goes on with %s", self.name, self._database)
                        fault = None
                    if progress.more:
                        continue
                    delay = min(delay, progress.due_in or delay)
                # `stop()` wakes the subscription; another event that stops it is looked at after the delay.
                if not stop.is_set():
                    self._wake.wait(delay)
        finally:
            if unsubscribe is not None:
                unsubscribe()

    # Dead letters

    def redrive(self) -> int:
        """Hand the changes that were given up to the handler again, each in its own transaction.

        Gives the number of letters that were handled, and are gone. The others note their new failure.
        """
        done = 0
        for letter in letters(self._database, self.name):
            error: BaseException
            try:
                done += self._redrive(letter)
                continue
            except _FailedError as failed:
                error = failed.cause
            except _REFUSED as refused:
                error = refused
            with self._database.connection() as connection:
                connection.execute(self._queries("fail_letter"), {"letter": letter.id, "failure": describe(error)})
        return done

    def _redrive(self, letter: StoreDeadLetter) -> bool:
        """Whether the change of a letter was handled now; False if another process has the letter."""
        values = {"letter": letter.id}
        with self._database.transaction() as connection:
            locked = fetch_first(connection, self._queries("lock_letter"), values, prepare=False)
            if locked is None:
                return False
            change = change_of(letter, connection, self._database.schema)
            with self._held(connection):
                self._call(change, 0, connection)
            if connection.execute(self._queries("delete_letter"), values | {"locked_by": locked[0]}).rowcount != 1:
                raise _FailedError(change, psycopg.ProgrammingError(TRANSACTION_ENDED))
        return True
