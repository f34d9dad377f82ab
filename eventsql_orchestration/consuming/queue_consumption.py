"""A topic consumed as a queue in a process: one thread fetches events, workers handle them, another settles them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, Self

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.commit_retry import is_unrelated
from eventsql_orchestration.consuming.deliveries import Deliveries, LostHandOutError, WorkerLostError
from eventsql_orchestration.consuming.delivery import Delivery
from eventsql_orchestration.consuming.leases import owner_name
from eventsql_orchestration.consuming.queue_backlog import Ahead, Backlog
from eventsql_orchestration.consuming.queue_handler import HandlerOfOne, Outcome, QueueHandler
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.consuming.worker_pool import FAULT_DELAY, IDLE_POLLING, Look, log_fault
from eventsql_orchestration.database.notifications import LOG, Listener
from eventsql_orchestration.errors import ClaimLostError, DatabaseBusyError, DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.retry import pause_while_away
from eventsql_orchestration.threads import Wake, join_all, log_recovery, others_alive, start_thread

logger = logger_of_errors(__name__)

QUEUE_WORKERS: Final = 16
"""Default number of worker threads. A handler that takes the connection keeps one of the pool, which has up to 30."""

MOST_UNACKNOWLEDGED: Final = 10_000
"""Default bound of a partition's events that are handed out and not acknowledged. Each is a row."""

HEARTBEATS: Final = 3
"""How often a lease is renewed before it would end."""

SETTLE_RETRY: Final = 0.5
"""Seconds between two attempts to settle events that others lock."""


@checked
class QueueConsumption(Running):
    """A consumer whose events are acknowledged one by one, on one database."""

    def __init__(
        self, deliveries: Deliveries, handler: QueueHandler,
        *, name: str, where: str, topic: str, partitions: Sequence[int],
        look: Look, workers: int, lease: float, polling_delay: float, listener: Listener,
    ) -> None:  # fmt: skip
        """`name` and `where`, the database, are for the log."""
        self._deliveries = deliveries
        self._name = name
        self._where = where
        self._look = look
        self._lease = lease
        self._polling_delay = polling_delay
        self._listener = listener
        self._stop = Wake()
        self._cancellation = Cancellation(self._stop)
        self._handler = HandlerOfOne(handler, deliveries, self._cancellation, name=name)
        self._lock = threading.Lock()
        self._fetching = threading.Condition(self._lock)
        self._working = threading.Condition(self._lock)
        self._settling = threading.Condition(self._lock)
        self._exchange = threading.Lock()
        """Held while events are handed out to this process, and while it gives events back: otherwise a later event of
        a key could come while an earlier event is given back."""
        self._backlog = Backlog()
        self._uncertain: set[int] = set()
        """Partitions that may have handed events to this process without its knowledge: a commit got no answer."""
        self._outcomes: deque[Outcome] = deque()
        self._due: dict[int, float] = dict.fromkeys(partitions, 0.0)
        self._woken = False
        self._ahead = Ahead(workers)
        self._working_threads = workers
        self._worked_off = Wake()
        """Set when no worker has an event any more, or when `stop` no longer waits for the workers."""
        self._failing: set[str | int] = set()
        """What met an error, until it succeeds again: looks at the log, partitions, settling, the lease."""
        self._fault: str | None = None
        """The last of these errors that was logged."""
        began = time.monotonic()
        self._worker = deliveries.register(owner_name())
        self._lease_until = began + lease
        self._unsubscribe = listener.subscribe(LOG, topic, self._wake)
        self._threads: list[threading.Thread] = []
        self._services: list[threading.Thread] = []

    def start(self) -> Self:
        """Start the threads."""
        try:
            for each in (self._settle, self._fetch, self._beat):
                self._services.append(start_thread(f"{self._name}-{each.__name__.strip('_')}", each))
            for number in range(self._working_threads):
                self._threads.append(start_thread(f"{self._name}-{number}", self._work))
        except BaseException:
            # The caller gets nothing to stop the others by.
            self._working_threads = len(self._threads)
            self.stop(0.0)
            raise
        return self

    # Stopping

    def stop_soon(self) -> None:
        with self._lock:
            self._stop.set()
            for condition in (self._fetching, self._working, self._settling):
                condition.notify_all()
        self._unsubscribe()

    def threads(self) -> Collection[threading.Thread]:
        return self._threads

    def _end(self, deadline: float) -> bool:
        join_all(self._threads, deadline)
        ended = not others_alive(self._threads)
        if not ended:
            logger.warning("%s does not end in time: its running handlers cannot acknowledge any more", self._name)
            self._cancellation.cancel()
        self._worked_off.set()
        with self._lock:
            self._settling.notify_all()
        # Events that were handled in time are acknowledged before the others are given up.
        join_all(self._services, max(deadline, time.monotonic() + SETTLE_RETRY))
        return ended

    # Fetching

    def _wake(self) -> None:
        with self._fetching:
            self._woken = True
            self._fetching.notify()

    def _fetch(self) -> None:
        while (partitions := self._await_due()) is not None:
            fetched: int | None = None
            try:
                found = self._look(dict.fromkeys(partitions, 1))
                with self._fetching:
                    self._ahead.adapt(waiting=len(self._backlog.ready))
                wanted = self._to_fetch(partitions, found)
                self._succeeded("look", *set(partitions).difference(wanted))
                for fetched in wanted:
                    self._fetch_partition(fetched, found[fetched] or 0.0)
                    self._succeeded(fetched)
            except BaseException as error:  # noqa: BLE001 - reported; the consumer would stop silently
                self._report("look" if fetched is None else fetched, error)
                failed = dict.fromkeys(partitions if fetched is None else [fetched], time.monotonic() + FAULT_DELAY)
                with self._fetching:
                    # The others do not wait for a partition that fails.
                    self._due.update(dict.fromkeys(partitions, 0.0) | failed)
                self._stop.wait(min(FAULT_DELAY, self._polling_delay))

    def _await_due(self) -> list[int] | None:
        """Wait until the process may take events and partitions are due. None to stop."""
        with self._fetching:
            while not self._stop.is_set():
                now = time.monotonic()
                if len(self._backlog.ready) <= self._ahead.most // 2 and not self._backlog.full:
                    woken, self._woken = self._woken, False
                    due = [partition for partition, at in self._due.items() if woken or at <= now]
                    if due:
                        return due
                    self._fetching.wait(max(0.0, min(self._due.values()) - now))
                else:
                    self._fetching.wait()
        return None

    def _to_fetch(self, asked: Sequence[int], found: dict[int, float | None]) -> list[int]:
        """The partitions with events, in the order of `_due`; new ones follow. After an error, one waits to be due."""
        with self._fetching:
            now = time.monotonic()
            for partition in asked:
                if found.get(partition) is None:
                    delay = self._polling_delay if partition in found else self._idle_delay()
                    self._due[partition] = now + delay
            ready = [partition for partition in self._due if found.get(partition) is not None]
            known = [partition for partition in ready if partition in asked or partition not in self._failing]
            return known + [partition for partition in found if partition not in self._due]

    def _idle_delay(self) -> float:
        return max(self._polling_delay, IDLE_POLLING) if self._listener.listening else self._polling_delay

    def _fetch_partition(self, partition: int, ready_in: float) -> None:
        with self._fetching:
            room = 0 if self._backlog.full else self._ahead.most - len(self._backlog.ready)
            worker = self._worker
        if room <= 0 or self._stop.is_set():
            return
        with self._exchange:
            began = time.monotonic()
            with self._working:
                # A handler may still have an event of a former lease, which is not handed out to this one.
                known = [each for each in self._backlog.unsettled(partition) if each.worker == worker]
            try:
                if partition in self._uncertain:
                    self._uncertain.remove(partition)
                    self._deliveries.give_back_others(worker, partition, known)
                handed = self._deliveries.hand_out(worker, partition, room, known)
            except WorkerLostError:
                self._lost(worker)
                return
            except LostHandOutError:
                if not self._stop.is_set():
                    self._start_over(worker)
                return
            except BaseException:
                # The server may have committed it.
                self._uncertain.add(partition)
                raise
            if handed.own > len(known) and not self._stop.is_set():
                self._start_over(worker)
                return
            with self._working:
                self._lease_until = max(self._lease_until, began + self._lease)
                self._backlog.add(handed.deliveries)
                # Also for earlier events, which may have waited for the lease.
                self._working.notify(len(self._backlog.ready))
                # A partition that was handed out goes behind the others.
                self._due.pop(partition, None)
                delay = 0.0 if handed.more else min(self._idle_delay(), ready_in or IDLE_POLLING)
                if handed.others or not handed.taken:
                    delay = min(delay, self._polling_delay)
                elif handed.held and self._backlog.idle(partition):
                    # The last event was settled meanwhile: the offset can move.
                    delay = 0.0
                if handed.due_in is not None:
                    delay = min(delay, handed.due_in)
                self._due[partition] = time.monotonic() + delay

    def _start_over(self, worker: int) -> None:
        """Give all events back under a new lease, because the database has lost commits. Call with `_exchange`.

        Otherwise an event would be handled again after a later event of its key, which this process has now, or the end
        of a handler would acknowledge another event, which has the id of a lost one. A handler without a transaction
        acknowledges nothing afterwards; a transaction keeps its event if nobody has taken it.
        """
        with self._working:
            self._backlog.clear()
        if not self._handler.in_transaction:
            for partition in list(self._due):
                self._deliveries.give_back_others(worker, partition, ())
        self._deliveries.leave(worker)
        self._lost(worker, "the database has lost acknowledgements, as after a restore or a failover")

    # Working

    def _work(self) -> None:
        while (delivery := self._next()) is not None:
            outcome = self._handler.handle(delivery)
            with self._working:
                if outcome is None:
                    self._finish(delivery)
                else:
                    self._outcomes.append(outcome)
                    self._settling.notify()
        with self._settling:
            self._working_threads -= 1
            if not self._working_threads:
                self._worked_off.set()
                self._settling.notify()

    def _next(self) -> Delivery | None:
        """Wait for an event of a lease that holds. None to stop."""
        with self._working:
            while not self._stop.is_set():
                if self._backlog.ready and time.monotonic() < self._lease_until:
                    delivery = self._backlog.ready.popleft()
                    if len(self._backlog.ready) <= self._ahead.most // 2:
                        self._fetching.notify()
                    return delivery
                self._working.wait()
        return None

    def _finish(self, delivery: Delivery) -> None:
        """Let the next event of the key go. Call with the lock."""
        full = self._backlog.full
        self._backlog.settled(delivery)
        self._working.notify()
        if self._backlog.idle(delivery.partition):
            # The offset can move, and a layout may end there.
            self._due[delivery.partition] = 0.0
            self._fetching.notify()
        elif full:
            self._fetching.notify()

    def _give_up_key(self, delivery: Delivery) -> None:
        """Forget the events behind `delivery`, which this process has lost: their order is unknown.

        The next call for the partition gives back the events that the process still has. Call with `_exchange` and the
        lock.
        """
        self._backlog.drop_behind(delivery)
        self._uncertain.add(delivery.partition)
        self._due[delivery.partition] = 0.0
        self._fetching.notify()

    # Settling

    def _settle(self) -> None:
        failures = 0
        while (outcomes := self._await_outcomes()) is not None:
            again, away = self._settle_while_reachable(outcomes)
            failures = failures + 1 if away else 0
            if not again:
                self._succeeded("settle")
            elif not self._worked_off.wait(pause_while_away(failures) if away else SETTLE_RETRY):
                # Behind the others: a session that the server has not missed yet may hold one of them.
                with self._settling:
                    self._outcomes.extend(again)
        self._leave()

    def _settle_while_reachable(self, outcomes: list[Outcome]) -> tuple[list[Outcome], bool]:
        """Settle outcomes; gives those to be tried again, and whether the database is away or takes no writes.

        Each failure takes a call. If one fails for that reason, the others would fail, too.
        """
        done = [each for each in outcomes if each.error is None]
        calls = deque([*([done] if done else []), *([each] for each in outcomes if each.error is not None)])
        failed: list[Outcome] = []
        away = False
        while calls and not away:
            settled = calls.popleft()
            if (fault := self._try_to_settle(settled)) is not None:
                failed += settled
                away = isinstance(fault, DatabaseUnavailableError) or is_unrelated(fault)
        return [*chain.from_iterable(calls), *failed], away

    def _await_outcomes(self) -> list[Outcome] | None:
        with self._settling:
            while not self._outcomes:
                if self._worked_off.is_set():
                    return None
                self._settling.wait()
            outcomes = list(self._outcomes)
            self._outcomes.clear()
            return outcomes

    def _try_to_settle(self, outcomes: list[Outcome]) -> BaseException | None:
        """Acknowledge events, or give a failed one back; gives the error if that fails: they stay with this process."""
        try:
            if outcomes[0].error is None:
                self._acknowledge([each.delivery for each in outcomes])
            else:
                self._give_back(outcomes[0])
        except BaseException as error:  # noqa: BLE001 - reported; nothing would be acknowledged any more
            self._report("settle", error)
            return error
        return None

    def _acknowledge(self, done: list[Delivery]) -> None:
        kept = self._deliveries.acknowledge(done)
        lost = [each for each in done if each not in kept]
        with self._working:
            for each in done:
                if each in kept:
                    self._finish(each)
        for each in lost:
            logger.warning(
                "%s handled event %d, which is another process's now: its lease ended, or the consumer was moved",
                self._name, each.event.id,
            )  # fmt: skip
            with self._exchange, self._working:
                self._give_up_key(each)
                self._finish(each)

    def _give_back(self, outcome: Outcome) -> None:
        delivery = outcome.delivery
        assert outcome.error is not None
        with self._exchange:
            with self._working:
                behind = self._backlog.behind(delivery)
            delay, lost = 0.0, False
            try:
                delay = self._deliveries.fail(delivery, outcome.error, counts=outcome.counts, behind=behind)
            except ClaimLostError as error:
                lost = True
                logger.warning("%s", error)
            with self._working:
                if lost:
                    self._give_up_key(delivery)
                if delay:
                    self._backlog.drop_behind(delivery)
                self._finish(delivery)
                if delay:
                    at = time.monotonic() + delay
                    self._due[delivery.partition] = min(self._due[delivery.partition], at)
                    self._fetching.notify()

    # The lease

    def _beat(self) -> None:
        every = self._lease / HEARTBEATS
        while not self._worked_off.wait(every):
            try:
                self._renew()
                self._succeeded("beat")
            except BaseException as error:  # noqa: BLE001 - reported; the lease would end
                self._report("beat", error)

    def _renew(self) -> None:
        with self._working:
            worker = self._worker
        began = time.monotonic()
        if not self._deliveries.renew(worker):
            with self._exchange:
                self._lost(worker)
            return
        with self._working:
            self._lease_until = max(self._lease_until, began + self._lease)
            self._working.notify_all()

    def _lost(self, worker: int, reason: str = "this process has lost its lease") -> None:
        """Forget the events of a lease that has ended, and begin a new lease. Call with `_exchange`."""
        with self._working:
            if self._worker != worker or self._stop.is_set():
                return
            self._backlog.clear()
        logger.warning("%s: %s; its events are handed out again", self._name, reason)
        worker = self._deliveries.register(owner_name())
        with self._working:
            self._worker = worker
            self._due = dict.fromkeys(self._due, 0.0)
            self._fetching.notify()

    def _leave(self) -> None:
        """Give back the remaining events, and note how far the consumer came."""
        try:
            for partition in list(self._due):
                with suppress(DatabaseBusyError):
                    self._deliveries.move_offset(self._worker, partition)
        except EventSQLError as error:
            self._report("settle", error)
        with self._working:
            self._backlog.clear()
            running = self._working_threads > 0 and not self._handler.in_transaction
        try:
            if not running:
                self._deliveries.leave(self._worker)
                return
            # The events of running handlers stay leased: nobody else may handle them before the lease ends.
            for partition in list(self._due):
                known = self._backlog.unsettled(partition)
                self._deliveries.give_back_others(self._worker, partition, known)
        except EventSQLError as error:
            self._report("settle", error)

    def _succeeded(self, *what: str | int) -> None:
        if self._failing.intersection(what):
            self._failing.difference_update(what)
            if not self._failing:
                self._fault = None
                log_recovery(logger, "%s goes on with %s", self._name, self._where)

    def _report(self, what: str | int, error: BaseException) -> None:
        self._failing.add(what)
        if isinstance(error, EventSQLError):
            self._fault = log_fault(logger, self._name, error, again="trying again", logged=self._fault)
        else:
            logger.error("%s met an unexpected error; trying again", self._name, exc_info=error)
            self._fault = None
