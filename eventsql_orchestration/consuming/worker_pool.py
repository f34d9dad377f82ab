"""A consumer that runs in this process: a thread that finds out where events wait, and threads that hand them over."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, TypeAlias

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database.notifications import LOG, Listener
from eventsql_orchestration.errors import ClaimLostError, DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.log.consumption import ConsumerPartition
from eventsql_orchestration.log.pacing import Pace
from eventsql_orchestration.log.passes import Hold, Pass

logger = logging.getLogger(__name__)

MAX_WORKERS: Final = 4
"""Threads per consumption that hand events over, and so its connections, unless it asks for another number; partitions
take turns where there are more."""

IDLE_POLLING: Final = 10.0
"""Seconds between two looks of an idle consumption that is notified of new events. A look is two messages to the
server, with the pool's own whether the connection is alive: 0.2 a second for all partitions together."""

UNANNOUNCED_SECONDS: Final = 60.0
"""How long polling goes on at its full pace after it found events that nobody had notified of, as another library's
transfer does not."""

FAULT_DELAY: Final = 5.0

Look: TypeAlias = Callable[[dict[int, int]], dict[int, float | None]]
"""Asks, for partitions with the number of events that each needs, which have them and may be consumed in how many
seconds, None for one that is paused. What it gives may hold others of the consumer's partitions that have an event."""


class _Turn:
    """A partition of a consumption, and when it is looked at again."""

    def __init__(self, key: ConsumerPartition) -> None:
        self.key = key
        self.due = 0.0
        self.enough_at = 0.0
        """When one event is enough for a pass; until then, `least` are."""
        self.least = 1
        self.deaf = False
        """Whether a notification does not hurry it."""
        self.empty = False
        """Whether nothing waited when it was looked at last."""
        self.wakes = 0
        """How many notifications there had been when its pass began."""

    def needed(self, now: float) -> int:
        return 1 if now >= self.enough_at else self.least


@checked
class Consumption:
    """A running consumer of this process. Ends with `stop`, or with the block that it is the context of.

    One thread, the scout, finds out which partitions have events, with one statement for all that are idle; workers
    make the passes. A partition is idle, in the queue of the workers, or with one of them.
    """

    def __init__(
        self,
        keys: Sequence[ConsumerPartition],
        *,
        look: Look,
        consume: Callable[[ConsumerPartition, Hold], Pass],
        polling_delay: float,
        workers: int = MAX_WORKERS,
        listener: Listener | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._keys = keys
        self._pace = pace or Pace()
        self._look = look
        self._pass = consume
        self._polling_delay = polling_delay
        self._listener = listener
        self._name = f"consumer {keys[0].consumer!r} of topic {keys[0].topic!r}"
        self._workers = workers
        self._stop = threading.Event()
        self._hold = Hold(self._stop)
        lock = threading.Lock()
        self._scouting = threading.Condition(lock)
        self._queued = threading.Condition(lock)
        self._idle = {key.partition: _Turn(key) for key in keys}
        self._known = set(self._idle)
        self._pace.join(len(self._known))
        self._looked_at = time.monotonic()
        self._queue: deque[_Turn] = deque()
        self._wakes = 0
        self._woken = False
        self._unannounced_at: float | None = None
        self._unsubscribe = listener.subscribe(LOG, keys[0].topic, self._wake) if listener is not None else None
        self._threads: list[threading.Thread] = []
        with lock:
            self._employ()
            self._begin("scout", self._scout)

    def _employ(self) -> None:
        """Have a worker for each partition, as far as they go. In the block of the lock."""
        # One of the threads is the scout, once it runs.
        for worker in range(max(0, len(self._threads) - 1), min(len(self._known), self._workers)):
            self._begin(str(worker), self._work)

    def _begin(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"eventsql-{self._keys[0].consumer}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # Stopping

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the batches under way and end.

        False when some are still running after `timeout` seconds: they are rolled back then and their partitions given
        up, so that others may consume them, and whatever their handlers write afterwards fails.

        A handler that calls it is not waited for, nor does it wait: its batch is finished, and no other is begun. It is
        told whether the others are done already.
        """
        self.stop_soon()
        return self.await_end(time.monotonic() + timeout)

    def stop_soon(self) -> None:
        """Begin no further batch; returns at once."""
        with self._scouting:
            if not self._stop.is_set():
                self._pace.join(-len(self._known))
            self._stop.set()
            self._scouting.notify_all()
            self._queued.notify_all()
        if self._unsubscribe is not None:
            self._unsubscribe()

    def await_end(self, deadline: float) -> bool:
        """The rest of `stop`, until a time of `time.monotonic`."""
        if threading.current_thread() in self._threads:
            # Two handlers that stop their consumption would wait for each other, and have each other rolled back.
            return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            return True
        logger.warning("%s does not end in time: what it is doing is rolled back", self._name)
        self._hold.cut()
        return False

    def __enter__(self) -> Consumption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # Waking up

    def _wake(self) -> None:
        """There may be new events, in any partition."""
        with self._scouting:
            self._wakes += 1
            self._woken = True
            self._unannounced_at = None
            self._scouting.notify()

    def _notified(self) -> bool:
        """Whether new events are notified of, as far as is known."""
        if self._listener is None or not self._listener.listening:
            return False
        return self._unannounced_at is None or time.monotonic() - self._unannounced_at > UNANNOUNCED_SECONDS

    def _idle_delay(self) -> float:
        return max(self._polling_delay, IDLE_POLLING) if self._notified() else self._polling_delay

    # The scout

    def _scout(self) -> None:
        while (due := self._due()) is not None:
            turns, woken = due
            now = self._looked_at = time.monotonic()
            asked = {turn.key.partition: turn.needed(now) for turn in turns}
            try:
                found = self._look(asked)
            except BaseException as error:  # noqa: BLE001 - reported
                # A thread that dies would stop its partitions silently.
                self._report(self._name, error)
                with self._scouting:
                    for turn in turns:
                        turn.due, turn.deaf = time.monotonic() + FAULT_DELAY, True
            else:
                self._take_in(turns, asked, found, woken=woken)

    def _due(self) -> tuple[list[_Turn], bool] | None:
        """The partitions to look at, when some are due, and whether a notification is why; None when it is to stop."""
        with self._scouting:
            while not self._stop.is_set():
                now = time.monotonic()
                woken, self._woken = self._woken, False
                idle = self._idle.values()
                if now - self._looked_at >= max(IDLE_POLLING, self._polling_delay):
                    # Though all that is known may be busy: there may be partitions that are new.
                    return [turn for turn in idle if not turn.deaf], woken
                if any(turn.due <= now or (woken and not turn.deaf) for turn in idle):
                    # What is not due yet costs nothing beside what is.
                    return [turn for turn in idle if turn.due <= now or not turn.deaf], woken
                wait = min((turn.due for turn in idle), default=now + IDLE_POLLING) - now
                self._scouting.wait(min(wait, max(IDLE_POLLING, self._polling_delay)))
        return None

    def _take_in(
        self, turns: list[_Turn], asked: dict[int, int], found: dict[int, float | None], *, woken: bool
    ) -> None:
        with self._scouting:
            now = time.monotonic()
            self._take_up(found)
            for turn in turns:
                partition = turn.key.partition
                turn.deaf = False
                if partition not in found:
                    turn.due = now + self._idle_delay()
                    turn.empty = asked[partition] == 1
                    if turn.empty:
                        turn.least = 1
                    else:
                        turn.due = min(turn.due, turn.enough_at)
                    continue
                if turn.empty and not woken and self._notified():
                    # Taken back by its notification, if that comes yet.
                    self._unannounced_at = now
                turn.empty = False
                ready_in = found[partition]
                if ready_in == 0:
                    del self._idle[partition]
                    self._queue.append(turn)
                    self._queued.notify()
                else:
                    # Not later than otherwise: a consumer may be resumed, a lease given back.
                    turn.due = now + min(self._polling_delay, ready_in or self._polling_delay)

    def _take_up(self, found: dict[int, float | None]) -> None:
        """Have a turn for each partition that the consumer got since; it is due at once."""
        for partition in found.keys() - self._known:
            self._known.add(partition)
            self._pace.join(1)
            self._idle[partition] = _Turn(replace(self._keys[0], partition=partition))
        if not self._stop.is_set():
            self._employ()

    # The workers

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            self._settle(turn, self._consume(turn.key))

    def _next(self) -> _Turn | None:
        """The partition that has been in the queue for longest; None when the consumption stops."""
        with self._queued:
            while not self._stop.is_set():
                if self._queue:
                    turn = self._queue.popleft()
                    turn.wakes = self._wakes
                    return turn
                self._queued.wait()
        return None

    def _consume(self, key: ConsumerPartition) -> Pass:
        try:
            return self._pass(key, self._hold)
        except ClaimLostError as error:
            logger.info("%s", error)
            return Pass(due_in=0.0)
        except BaseException as error:  # noqa: BLE001 - reported
            # A thread that dies, as of a handler's sys.exit(), would stop its partitions silently.
            self._report(str(key), error)
            return Pass(due_in=FAULT_DELAY, deaf=True)

    def _report(self, what: str, error: BaseException) -> None:
        if self._hold.is_cut:
            logger.info("%s was stopped in the middle of a batch, which is rolled back: %s", what, error)
        elif isinstance(error, DatabaseUnavailableError):
            logger.warning("%s waits for the database: %s", what, error)
        elif isinstance(error, EventSQLError):
            logger.error("%s could not be consumed; trying again in %.0f s", what, FAULT_DELAY, exc_info=error)
        else:
            logger.error("%s met an unexpected error; trying again in %.0f s", what, FAULT_DELAY, exc_info=error)

    def _settle(self, turn: _Turn, came_to: Pass) -> None:
        """Put a partition back into the queue, or leave it idle until it is due."""
        now = time.monotonic()
        done = came_to.progress
        rest = None if done is None else self._pace.rest(done.consumed + done.passed, now)
        with self._scouting:
            if came_to.more:
                turn.least, turn.deaf = 1, False
                self._queue.append(turn)
                self._queued.notify()
                return
            due_in = self._idle_delay() if came_to.due_in is None else came_to.due_in
            turn.least, turn.deaf, turn.empty = came_to.least, came_to.deaf, False
            turn.enough_at = now + due_in if came_to.least > 1 else 0.0
            if came_to.due_in is None and rest is not None:
                due_in, turn.deaf = rest - now, True
            elif not turn.deaf and turn.wakes != self._wakes:
                # What it was that came during the pass, the pass may not have seen.
                due_in = 0.0
            elif done is not None and came_to.due_in is None and not self._notified():
                due_in = 0.0
            elif came_to.least > 1:
                due_in = min(due_in, self._idle_delay())
            turn.due = now + due_in
            self._idle[turn.key.partition] = turn
            self._scouting.notify()
