"""A consumer that runs in this process: a poller that finds events, and workers that hand them to the handler."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias, TypedDict

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.batch import BatchResult
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.partition import ConsumerPartition
from eventsql_orchestration.consuming.running import Running
from eventsql_orchestration.consuming.throttle import Throttle
from eventsql_orchestration.consuming.tracebacks import logger_of_errors
from eventsql_orchestration.database.notifications import LOG, Listener
from eventsql_orchestration.errors import ClaimLostError, DatabaseBusyError, DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.threads import Wake, join_all, log_recovery, others_alive, start_thread
from eventsql_orchestration.validation import Duration, check_batch, in_seconds

logger = logger_of_errors(__name__)

MAX_WORKERS: Final = 4
"""Default number of worker threads of a consumption, each with a connection. If there are more partitions, they take
turns."""

IDLE_POLLING: Final = 10.0
"""Seconds between two looks of an idle consumption that is notified of new events. A look is two messages to the
server, including the pool's check of the connection: 0.2 messages a second for all partitions together."""

UNANNOUNCED_SECONDS: Final = 60.0
"""Seconds for which polling continues at its full rate after it found events without a notification. Another
library's transfer sends no notifications."""

FAULT_DELAY: Final = 5.0
"""Seconds until a partition is polled again after an error that is not a failure of its event."""

Look: TypeAlias = Callable[[dict[int, int]], dict[int, float | None]]
"""Takes partitions with the number of events that each needs. Returns the partitions that have them, with the seconds
until each may be consumed, None if it is paused. May return other partitions of the consumer that have an event."""


class Batching(TypedDict, total=False):
    """The fields of `PollOptions` as keyword options."""

    min_events: int
    max_events: int
    polling_delay: Duration
    max_polling_delay: Duration


@dataclass(frozen=True, slots=True)
class PollOptions:
    """How partitions are polled: sizes of batches, and delays in seconds."""

    min_events: int
    max_events: int
    polling_delay: float
    max_polling_delay: float

    @classmethod
    def of(
        cls, *, min_events: int = 1, max_events: int = 1_000, polling_delay: Duration = 1.0,
        max_polling_delay: Duration = 10.0,
    ) -> PollOptions:  # fmt: skip
        """Raises `ValidationError`."""
        check_batch(min_events, max_events)
        return cls(min_events, max_events, in_seconds(polling_delay), in_seconds(max_polling_delay))


@dataclass(frozen=True, slots=True)
class PollOutcome:
    """The outcome of polling a partition, and when to poll it again.

    With `more`, further events may wait. `due_in` is the delay until the next look in seconds, None if nothing is known
    to wait. If `deaf`, notifications are ignored until the next look. Before it, polling is worthwhile only if `least`
    events wait. With `last`, the partition has consumed all events of its topic's layout.
    """

    result: BatchResult | None = None
    more: bool = False
    due_in: float | None = None
    deaf: bool = False
    least: int = 1
    last: bool = False


Poll: TypeAlias = Callable[[ConsumerPartition, Cancellation], PollOutcome]
"""Handles the next batch of a partition."""


class _Slot:
    """A partition of a consumption, and when it is looked at again."""

    def __init__(self, key: ConsumerPartition) -> None:
        self.key = key
        self.due = 0.0
        self.enough_at = 0.0
        """When one event is enough to poll the partition. Until then, `least` events are needed."""
        self.least = 1
        self.deaf = False
        """Whether notifications are ignored."""
        self.empty = False
        """Whether nothing waited at the last look."""
        self.wakes = 0
        """Number of notifications when a worker took the slot."""

    def needed(self, now: float) -> int:
        return 1 if now >= self.enough_at else self.least


@checked
class Consumption(Running):
    """A consumer that runs on one database.

    One thread, the poller, looks for events with one statement for all idle partitions. Worker threads hand the events
    over. A slot is idle, in the workers' queue, or with a worker.
    """

    def __init__(
        self, keys: Sequence[ConsumerPartition],
        *, where: str, look: Look, poll: Poll, polling_delay: float, workers: int, listener: Listener,
        throttle: Throttle,
    ) -> None:  # fmt: skip
        """`where` names the database, for the log."""
        self._keys = keys
        self._where = where
        self._throttle = throttle
        self._look = look
        self._poll = poll
        self._polling_delay = polling_delay
        self._listener = listener
        self._name = f"consumer {keys[0].consumer!r} of topic {keys[0].topic!r}"
        self._workers = workers
        self._stop = Wake()
        self._cancellation = Cancellation(self._stop)
        self._lock = threading.Lock()
        self._poller = threading.Condition(self._lock)
        self._queued = threading.Condition(self._lock)
        self._idle = {key.partition: _Slot(key) for key in keys}
        self._known = set(self._idle)
        self._throttle.join(len(self._known))
        self._looked_at = time.monotonic()
        self._queue: deque[_Slot] = deque()
        self._wakes = 0
        self._woken = False
        self._unannounced_at: float | None = None
        self._faults: dict[str, str] = {}
        """The last error of the consumer or of a partition, until the consumer or the partition is consumed again."""
        self._unsubscribe = listener.subscribe(LOG, keys[0].topic, self._wake)
        self._threads: list[threading.Thread] = []

    def start(self) -> Self:
        """Start the threads."""
        try:
            with self._lock:
                self._start_workers()
                self._begin("poller", self._run_poller)
        except BaseException:
            # The caller gets nothing to stop the others by.
            self.stop(0.0)
            raise
        return self

    def _start_workers(self) -> None:
        """Start a worker for each partition, up to the maximum. Call with the lock held."""
        # One of the threads is the poller, once it runs.
        for worker in range(max(0, len(self._threads) - 1), min(len(self._known), self._workers)):
            self._begin(str(worker), self._work)

    def _begin(self, name: str, target: Callable[[], None]) -> None:
        # A thread begins with the lock, which the caller holds.
        self._threads.append(start_thread(f"{self._keys[0].consumer}-{name}", target))

    # Stopping

    def stop_soon(self) -> None:
        with self._lock:
            if not self._stop.is_set():
                self._throttle.join(-len(self._known))
            self._stop.set()
            self._poller.notify_all()
            self._queued.notify_all()
        self._unsubscribe()

    def threads(self) -> Collection[threading.Thread]:
        return self._threads

    def _end(self, deadline: float) -> bool:
        join_all(self._threads, deadline)
        if not others_alive(self._threads):
            return True
        logger.warning("%s does not end in time: its running batches are rolled back", self._name)
        self._cancellation.cancel()
        return False

    # Waking up

    def _wake(self) -> None:
        """Any partition may have new events."""
        with self._poller:
            self._wakes += 1
            self._woken = True
            self._unannounced_at = None
            self._poller.notify()

    def _notified(self) -> bool:
        """Whether notifications of new events arrive, as far as is known."""
        if not self._listener.listening:
            return False
        return self._unannounced_at is None or time.monotonic() - self._unannounced_at > UNANNOUNCED_SECONDS

    def _idle_delay(self) -> float:
        return max(self._polling_delay, IDLE_POLLING) if self._notified() else self._polling_delay

    # The poller

    def _run_poller(self) -> None:
        failed = False
        while (due := self._due()) is not None:
            slots, woken = due
            now = self._looked_at = time.monotonic()
            asked = {slot.key.partition: slot.needed(now) for slot in slots}
            try:
                found = self._look(asked)
                # Before a worker's next error, which has this name if the consumer has one partition.
                ended = failed and self._faults.pop(self._name, None) is not None
                self._queue_ready(slots, asked, found, woken=woken)
                failed = False
                if ended:
                    log_recovery(logger, "%s goes on with %s", self._name, self._where)
            except BaseException as error:  # noqa: BLE001 - reported
                # If the thread died, its partitions would stop silently.
                failed = True
                self._report(self._name, error)
                with self._poller:
                    for slot in slots:
                        slot.due, slot.deaf = time.monotonic() + FAULT_DELAY, True

    def _due(self) -> tuple[list[_Slot], bool] | None:
        """Wait until slots are due. Returns them, and whether because of a notification; None to stop."""
        with self._poller:
            while not self._stop.is_set():
                now = time.monotonic()
                woken, self._woken = self._woken, False
                idle = self._idle.values()
                again_at = self._looked_at + max(IDLE_POLLING, self._polling_delay)
                if now >= again_at:
                    # Look even if all known partitions are busy: there may be new partitions.
                    return [slot for slot in idle if not slot.deaf], woken
                if any(slot.due <= now or (woken and not slot.deaf) for slot in idle):
                    # One statement looks at all of them, so the slots that are not due yet cost nothing.
                    return [slot for slot in idle if slot.due <= now or not slot.deaf], woken
                self._poller.wait(min([again_at, *(slot.due for slot in idle)]) - now)
        return None

    def _queue_ready(
        self, slots: list[_Slot], asked: dict[int, int], found: dict[int, float | None], *, woken: bool
    ) -> None:
        with self._poller:
            if self._stop.is_set():
                return
            now = time.monotonic()
            self._add_slots(found)
            for slot in slots:
                partition = slot.key.partition
                slot.deaf = False
                if partition not in found:
                    slot.due = now + self._idle_delay()
                    slot.empty = asked[partition] == 1
                    if not slot.empty:
                        slot.due = min(slot.due, slot.enough_at)
                    continue
                if slot.empty and not woken:
                    # `_wake` takes this back if the notification arrives later.
                    self._unannounced_at = now
                slot.empty = False
                ready_in = found[partition]
                if ready_in == 0:
                    del self._idle[partition]
                    self._queue.append(slot)
                    self._queued.notify()
                else:
                    # Look no later than usual: the consumer may be resumed, or the lease released.
                    slot.due = now + min(self._polling_delay, ready_in or self._polling_delay)
            # Last, because the present workers go on if no further thread can be started.
            self._start_workers()

    def _add_slots(self, found: dict[int, float | None]) -> None:
        """Add a slot, due at once, for each partition that is new to the consumer."""
        for partition in found.keys() - self._known:
            self._known.add(partition)
            self._throttle.join(1)
            self._idle[partition] = _Slot(replace(self._keys[0], partition=partition))

    # The workers

    def _work(self) -> None:
        while (slot := self._next()) is not None:
            self._give_back(slot, self._consume(slot.key))

    def _next(self) -> _Slot | None:
        """Wait for a slot in the queue; None to stop."""
        with self._queued:
            while not self._stop.is_set():
                if self._queue:
                    slot = self._queue.popleft()
                    slot.wakes = self._wakes
                    return slot
                self._queued.wait()
        return None

    def _consume(self, key: ConsumerPartition) -> PollOutcome:
        try:
            outcome = self._poll(key, self._cancellation)
            if self._faults and self._faults.pop(str(key), None) is not None:
                log_recovery(logger, "%s goes on with %s", key, self._where)
            return outcome
        except ClaimLostError as error:
            logger.info("%s", error)
            return PollOutcome(due_in=0.0)
        except BaseException as error:  # noqa: BLE001 - reported
            # If the thread died, for instance of a handler's sys.exit(), its partitions would stop silently.
            self._report(str(key), error)
            return PollOutcome(due_in=FAULT_DELAY, deaf=True)

    def _report(self, what: str, error: BaseException) -> None:
        if self._cancellation.cancelled:
            logger.info("%s was stopped in the middle of a batch, which is rolled back: %s", what, error)
        elif isinstance(error, EventSQLError):
            again = f"trying again every {FAULT_DELAY:.0f} s"
            self._faults[what] = log_fault(logger, what, error, again=again, logged=self._faults.get(what))
        else:
            logger.error("%s met an unexpected error; trying again in %.0f s", what, FAULT_DELAY, exc_info=error)
            self._faults[what] = ""

    def _give_back(self, slot: _Slot, outcome: PollOutcome) -> None:
        """Put a slot back into the queue, or leave it idle until it is due."""
        now = time.monotonic()
        result = outcome.result
        rest = None if result is None else self._throttle.rest(result.consumed + result.skipped, now)

        with self._poller:
            if outcome.more:
                self._queue.append(slot)
                self._queued.notify()
                return

            due_in = self._idle_delay() if outcome.due_in is None else outcome.due_in
            slot.least, slot.deaf = outcome.least, outcome.deaf
            slot.enough_at = now + due_in
            if outcome.due_in is None and rest is not None:
                due_in, slot.deaf = rest - now, True
            elif not slot.deaf and slot.wakes != self._wakes:
                # The batch may not have seen events that came meanwhile.
                due_in = 0.0
            elif result is not None and outcome.due_in is None and not self._notified():
                due_in = 0.0
            elif outcome.least > 1:
                due_in = min(due_in, self._idle_delay())
            slot.due = now + due_in
            self._idle[slot.key.partition] = slot
            self._poller.notify()


def log_fault(log: logging.Logger, what: str, error: EventSQLError, *, again: str, logged: str | None) -> str:
    """Log that an error keeps a consumer from its events, and return the error's text.

    The error says what to do, so a traceback adds nothing. If its text is the one `logged` last, the error lasts, and
    is logged at the level DEBUG.
    """
    level, effect = logging.ERROR, f"could not be consumed; {again}"
    if isinstance(error, DatabaseUnavailableError | DatabaseBusyError):
        level, effect = logging.WARNING, "waits for the database"
    log.log(logging.DEBUG if str(error) == logged else level, "%s %s: %s", what, effect, error)
    return str(error)
