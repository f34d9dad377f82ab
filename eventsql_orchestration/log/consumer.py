"""Consumers inside a process: threads that hand the events of consumer partitions to a function."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, TypeAlias

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.notifications import LOG, Listener
from eventsql_orchestration.errors import (
    ClaimLostError,
    DatabaseUnavailableError,
    EventSQLError,
    PartitionOutOfRangeError,
    ValidationError,
)
from eventsql_orchestration.log import consumption
from eventsql_orchestration.log.claims import Claims
from eventsql_orchestration.log.consumption import (
    BatchFailedError,
    BatchHandler,
    CommitRefusedError,
    ConsumerPartition,
    EventHandler,
    Failure,
    Progress,
)
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.handlers import check_handler
from eventsql_orchestration.log.layouts import Layouts
from eventsql_orchestration.log.leased import LeasedHandler, LeasedPasses
from eventsql_orchestration.log.pacing import Pace, Paces
from eventsql_orchestration.log.passes import Hold, Pass
from eventsql_orchestration.log.reader import fetch
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.rules import Duration, check_seconds, check_whole

logger = logging.getLogger(__name__)

SINGLE_BATCH: Final = 100
"""How many events a consumer of single events reads at a time; each has a savepoint of its own."""

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

MOST_REFUSED: Final = 20
"""Commits of a partition's events that are refused one after the other for what may pass, as a conflict does, before
the event is looked for that is to blame: after more than a minute, it comes from what is written."""

_LONGEST_WAIT: Final = 3600.0
"""Seconds; the delays that a caller may ask for are longer than a lock can wait."""


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


Look: TypeAlias = Callable[[dict[int, int]], dict[int, float | None]]
"""Asks, for partitions with the number of events that each needs, which have them and may be consumed in how many
seconds, None for one that is paused. What it gives may hold others of the consumer's partitions that have an event."""

LAYOUT_SECONDS: Final = 1.0
"""How soon a partition looks again whether the others have come to the end of their topic's layout."""


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


class _Plan:
    """How a consumption reads: its handler, the size of its batches and its delays in seconds."""

    def __init__(
        self,
        handler: BatchHandler,
        *,
        each: bool,
        min_events: int,
        max_events: int,
        polling_delay: Duration,
        max_polling_delay: Duration,
    ) -> None:
        _check(min_events, max_events)
        self.handler = handler
        self.each = each
        self.min_events = min_events
        self.max_events = max_events
        self.polling_delay = check_seconds("polling_delay", polling_delay, zero=False)
        self.max_polling_delay = check_seconds("max_polling_delay", max_polling_delay, zero=True)


def _check(min_events: int, max_events: int) -> None:
    if not 1 <= min_events <= max_events:
        raise ValidationError(f"1 <= min_events <= max_events is needed, not {min_events} and {max_events}")


def _noting(handler: BatchHandler, handed: list[Event]) -> BatchHandler:
    """The handler, which leaves in `handed` what it was handed last."""

    def handle(events: Sequence[Event], connection: Connection) -> None:
        handed[:] = events
        handler(events, connection)

    return handle


def _came_to(progress: Progress, plan: _Plan, *, full: bool) -> Pass:
    match progress.failure:
        case None:
            return Pass(progress, more=full)
        case Failure(outcome=Failure.DEAD_LETTER):
            return Pass(progress, more=True)
        case Failure(outcome=Failure.BLOCKED):
            return Pass(progress, due_in=plan.polling_delay, deaf=True)
    # A look finds out when it is due again.
    return Pass(progress, due_in=0.0)


class Consumers:
    """Starts consumers in this process. Any number of processes may run the same one; they share its partitions.

    With a `listener`, they wake up when new events are notified of, and poll seldom in between.
    """

    def __init__(
        self,
        database: Database,
        registry: Registry,
        dead_letters: DeadLetters,
        *,
        listener: Listener | None = None,
    ) -> None:
        self._database = database
        self._registry = registry
        self._dead_letters = dead_letters
        self._listener = listener
        self._claims = Claims(database, dead_letters)
        self._layouts = Layouts(database)
        self._queries = Queries("log", database.schema)
        self._own_queries = Queries("consumers", database.schema)
        self.paces = Paces()
        """Those of several databases share theirs."""
        # Their threads keep those that run.
        self._running: weakref.WeakSet[Consumption] = weakref.WeakSet()
        self._running_lock = threading.Lock()
        self._refused: dict[ConsumerPartition, int] = {}
        """How many commits in a row were refused for what may pass."""

    def start(
        self,
        topic: str,
        consumer: str,
        handler: EventHandler,
        *,
        polling_delay: Duration = 1.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        """Hand each event to `handler(event, connection)`, in order within each consumer partition.

        What the handler writes through `connection` commits together with the offset: exactly once. Anything else it
        does happens at least once. When it raises, its writes for that event are undone and the event is tried again,
        with backoff, up to the consumer's `max_attempts`. The transaction is not the handler's to end: a partition
        whose handler ends it all the same, as with `COMMIT`, stays where it is.

        `polling_delay` is in seconds, after a look that found nothing. A consumer that is notified of new events looks
        at once then, and otherwise every 10 seconds.

        `workers` (at least 1) is how many partitions are consumed side by side at most, each by a thread with a
        connection.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `ValidationError`.
        """
        check_handler(handler, "event", "connection")
        plan = _Plan(
            consumption.one_by_one(handler), each=True, min_events=1, max_events=SINGLE_BATCH,
            polling_delay=polling_delay, max_polling_delay=0.0,
        )  # fmt: skip
        return self._start_plan(topic, consumer, plan, workers)

    def start_batch(
        self,
        topic: str,
        consumer: str,
        handler: BatchHandler,
        *,
        min_events: int = 1,
        max_events: int = 1_000,
        polling_delay: Duration = 1.0,
        max_polling_delay: Duration = 10.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        """Hand events to `handler(events, connection)`, `min_events` to `max_events` at a time.

        Fewer than `min_events` wait for more, but none longer than `max_polling_delay` seconds. A batch that fails is
        handed over again event by event, so that only the one that fails is held up. Otherwise as `start`.
        """
        check_handler(handler, "events", "connection")
        plan = _Plan(
            handler, each=False, min_events=min_events, max_events=max_events,
            polling_delay=polling_delay, max_polling_delay=max_polling_delay,
        )  # fmt: skip
        return self._start_plan(topic, consumer, plan, workers)

    def start_leased(
        self,
        topic: str,
        consumer: str,
        handler: LeasedHandler,
        *,
        lease: Duration = 60.0,
        min_events: int = 1,
        max_events: int = 1_000,
        polling_delay: Duration = 1.0,
        max_polling_delay: Duration = 10.0,
        workers: int = MAX_WORKERS,
    ) -> Consumption:
        """Hand events to `handler(events, lease)` outside of any transaction: for work that is longer than seconds.

        The partition is leased for `lease` seconds, and the lease renewed while the handler runs; when this process
        dies, another takes the events over after that time. What the handler writes in `lease.transaction()` commits
        together with the offset: exactly once, whatever happens. Without that, the offset is committed when it returns:
        at least once. `lease.lost` is set when the partition was taken over; nothing can be committed any more.

        A handler that raises `ConsumptionError(event)` names the event that failed, and those before it are done.
        Events that fail otherwise are handed over again, one at a time. The event that fails then is tried again with
        backoff, up to the consumer's `max_attempts`. Otherwise as `start_batch`.
        """
        check_handler(handler, "events", "lease")
        _check(min_events, max_events)
        polling = check_seconds("polling_delay", polling_delay, zero=False)
        passes = LeasedPasses(
            self._database, self._claims, handler, lease=check_seconds("lease", lease, zero=False),
            min_events=min_events, max_events=max_events, polling_delay=polling,
            max_polling_delay=check_seconds("max_polling_delay", max_polling_delay, zero=True),
        )  # fmt: skip
        return self._start(topic, consumer, passes.consume, polling, workers)

    def _start_plan(self, topic: str, consumer: str, plan: _Plan, workers: int) -> Consumption:
        return self._start(
            topic, consumer, lambda key, hold: self._consume(key, plan, hold), plan.polling_delay, workers
        )

    def _start(
        self,
        topic: str,
        consumer: str,
        consume: Callable[[ConsumerPartition, Hold], Pass],
        polling_delay: float,
        workers: int,
    ) -> Consumption:
        check_whole("workers", workers, least=1)
        keys = self._keys(topic, consumer)
        partitioned = keys[0].partition != NOT_PARTITIONED
        started = Consumption(
            keys,
            look=lambda asked: self._ready(topic, consumer, asked, partitioned=partitioned),
            consume=consume,
            polling_delay=polling_delay,
            workers=workers,
            listener=self._listener,
            pace=self.paces.of(topic, consumer),
        )
        with self._running_lock:
            self._running.add(started)
        return started

    def _keys(self, topic: str, consumer: str) -> list[ConsumerPartition]:
        return [
            ConsumerPartition(topic, consumer, state.partition) for state in self._registry.consumer(topic, consumer)
        ]

    def _ready(self, topic: str, consumer: str, asked: dict[int, int], *, partitioned: bool) -> dict[int, float | None]:
        """Which partitions have as many events as asked for, and in how many seconds each may be consumed."""
        statement = "ready" if partitioned else "ready_topic"
        parameters = {
            "topic": topic,
            "consumer": consumer,
            "partitions": list(asked),
            "least": list(asked.values()),
        }
        with self._database.connection() as connection:
            rows = connection.execute(self._own_queries(statement, topic=topic), parameters, prepare=True).fetchall()
        found = {partition: ready_in for partition, ready_in, waiting in rows if waiting}
        if len(found) < len(rows):
            settled = self._layouts.settle(topic, consumer).entered
            found |= {
                partition: 0.0 if settled else LAYOUT_SECONDS
                for partition, _, waiting in rows
                if not waiting and partition in asked
            }
        return found

    def consume_once(
        self, topic: str, consumer: str, handler: BatchHandler, *, partition: int | None = None, max_events: int = 1_000
    ) -> int:
        """One pass in the caller's thread over one partition, or over all; gives the number of events consumed.

        Partitions that another consumption holds are left to it. Raises `PartitionOutOfRangeError` for a partition that
        the consumer does not have.
        """
        check_handler(handler, "events", "connection")
        plan = _Plan(handler, each=False, min_events=1, max_events=max_events, polling_delay=1.0, max_polling_delay=0.0)
        keys = [key for key in self._keys(topic, consumer) if partition is None or key.partition == partition]
        if not keys:
            raise PartitionOutOfRangeError(f"consumer {consumer!r} of topic {topic!r} has no partition {partition}")
        consumed, last = self._consume_each(keys, plan)
        while last and not consumed and self._layouts.settle(topic, consumer).entered:
            keys = [key for key in self._keys(topic, consumer) if partition is None or key.partition == partition]
            consumed, last = self._consume_each(keys, plan)
        return consumed

    def _consume_each(self, keys: Sequence[ConsumerPartition], plan: _Plan) -> tuple[int, bool]:
        """A pass over each; gives the number of events, and whether one has consumed all that its layout holds."""
        consumed, last = 0, False
        for key in keys:
            came_to = self._consume(key, plan, Hold())
            # None of these was the consumer's: what it is asked for comes after them.
            while (progress := came_to.progress) and progress.passed and not progress.consumed and not progress.failure:
                came_to = self._consume(key, plan, Hold())
            consumed += progress.consumed if progress else 0
            last = last or came_to.last
        return consumed, last

    def _consume(self, key: ConsumerPartition, plan: _Plan, hold: Hold) -> Pass:
        """One pass over one partition; without progress when nothing could or need be consumed."""
        handler, each, check, alone = plan.handler, plan.each, False, False
        handed: list[Event] = []
        while True:
            try:
                came_to = self._attempt(key, plan, hold, handler, each=each, check=check, alone=alone)
            except BatchFailedError as failed:
                # A savepoint for each batch, in case, would be two more messages to the server. Handled again outside
                # of this block: what failed, and the frames with its events, would be kept meanwhile.
                handler, each = failed.handler(plan.handler), True
            except CommitRefusedError as refused:
                if not check and refused.passing and self._may_pass(key):
                    raise refused.error from None
                if alone:
                    return self._refuse(key, plan, hold, handed[-1], refused.error)
                # One by one, and where that finds none to blame, the first alone.
                handler, each, check, alone = _noting(plan.handler, handed), True, True, check
            else:
                if came_to.progress is not None:
                    self._refused.pop(key, None)
                return came_to

    def _may_pass(self, key: ConsumerPartition) -> bool:
        """Whether a commit that was refused, as for a conflict, is to be tried again with the same events."""
        refused = self._refused.pop(key, 0) + 1
        if refused < MOST_REFUSED:
            self._refused[key] = refused
        return refused < MOST_REFUSED

    def _refuse(self, key: ConsumerPartition, plan: _Plan, hold: Hold, event: Event, error: Exception) -> Pass:
        """Note that an event failed, which cannot be committed though it is alone."""
        with self._database.transaction() as connection, hold.connection(connection):
            locked = consumption.lock(connection, self._queries, key, wait=False)
            if locked is None or locked.leased:
                return Pass(due_in=plan.polling_delay, deaf=True)
            events = fetch(
                connection, self._queries, key.topic,
                partition=key.partition, after=locked.offset, upto=locked.upto, limit=1,
            )  # fmt: skip
            if [each.id for each in events] != [event.id]:
                # Somebody else has had it since.
                return Pass(due_in=0.0)
            progress = consumption.refuse(
                connection, self._queries, self._dead_letters, locked, event=event, error=error
            )
        return _came_to(progress, plan, full=True)

    def _attempt(
        self,
        key: ConsumerPartition,
        plan: _Plan,
        hold: Hold,
        handler: BatchHandler,
        *,
        each: bool,
        check: bool,
        alone: bool,
    ) -> Pass:
        """A pass in one transaction, with `alone` over one event.

        Raises `BatchFailedError` where it must be made with `each`, `CommitRefusedError` where with `check` as well.
        """
        limit = 1 if alone else plan.max_events
        refused = Pass(due_in=plan.polling_delay, deaf=True)
        with consumption.transaction(self._database) as connection, hold.connection(connection):
            locked = consumption.lock(connection, self._queries, key, wait=False)
            if locked is None or locked.state.paused or locked.leased or locked.retry_in:
                return refused
            if self._dead_letters.blocking(locked.state, connection) is not None:
                return refused
            events = fetch(
                connection, self._queries, key.topic,
                partition=key.partition, after=locked.offset, upto=locked.upto, limit=limit,
            )  # fmt: skip
            if not events:
                # A look finds out whether the others have come as far.
                return Pass() if locked.state.until is None else Pass(due_in=0.0, last=True)
            waited = (locked.now - events[0].created_at).total_seconds()
            # Up to the end of a layout there will be no more.
            enough = alone or len(events) >= plan.min_events or locked.state.until is not None
            if not enough and waited < plan.max_polling_delay:
                return Pass(due_in=plan.max_polling_delay - waited, least=plan.min_events)
            progress = consumption.consume(
                connection, self._queries, self._dead_letters, locked,
                events=events, handler=handler, each=each, savepoint=False, check=check,
            )  # fmt: skip
        # At the end of a layout the pass after this one asks for the next.
        return _came_to(progress, plan, full=len(events) == limit or locked.state.until is not None)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop every consumption that was started here, as `Consumption.stop`, all within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._running_lock:
            stopping = list(self._running)
            self._running.clear()
        for running in stopping:
            running.stop_soon()
        ended = [running.await_end(deadline) for running in stopping]
        return all(ended)
