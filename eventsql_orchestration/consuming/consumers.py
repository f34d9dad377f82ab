"""Consumers inside a process: threads that hand the events of consumer partitions to a function."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.errors import DatabaseError, PartitionOutOfRangeError, ValidationError
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
from eventsql_orchestration.log.load import too_much
from eventsql_orchestration.log.pacing import Paces
from eventsql_orchestration.log.passes import Hold, Pass
from eventsql_orchestration.log.reader import fetch
from eventsql_orchestration.log.refusals import Refusals
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.running import MAX_WORKERS, Consumption
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.rules import Duration, check_seconds

logger = logging.getLogger(__name__)

SINGLE_BATCH: Final = 100
"""How many events a consumer of single events reads at a time; each has a savepoint of its own."""

LAYOUT_SECONDS: Final = 1.0
"""How soon a partition looks again whether the others have come to the end of their topic's layout."""


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
    if min_events > max_events:
        raise ValidationError(f"1 <= min_events <= max_events is needed, not {min_events} and {max_events}")


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


@checked
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
        self._refusals: dict[ConsumerPartition, Refusals] = {}

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
        handler, each, check = plan.handler, plan.each, False
        refusals = self._refusals.get(key)
        while True:
            limit = plan.max_events if refusals is None else refusals.limit(plan.max_events)
            try:
                came_to = self._attempt(key, plan, hold, handler, limit=limit, each=each, check=check)
            except BatchFailedError as failed:
                # A savepoint for each batch, in case, would be two more messages to the server. Handled again outside
                # of this block: what failed, and the frames with its events, would be kept meanwhile.
                handler, each = failed.handler(plan.handler), True
            except CommitRefusedError as refused:
                refusals = self._refusals.setdefault(key, Refusals())
                alone = refused.events[0] if limit == 1 and refused.events else None
                if not refused.events or (refused.passing and refusals.may_pass(None if alone is None else alone.id)):
                    raise refused.error from None
                if alone is not None:
                    return self._refuse(key, plan, hold, alone, refused.error)
                if check or refused.passing:
                    # One by one found none to blame.
                    refusals.isolate()
                handler, each, check = plan.handler, True, True
            except (DatabaseError, MemoryError) as error:
                # A handler's own failures do not come here: its events could not be read.
                if limit == 1 or hold.stopping.is_set() or not too_much(error):
                    raise
                refusals = self._refusals.setdefault(key, Refusals())
                refusals.halve(limit)
                logger.info("%s reads %d events at once next: %s", key, refusals.limit(limit), error)
            else:
                if refusals is not None and came_to.progress is not None and refusals.committed(plan.max_events):
                    self._refusals.pop(key, None)
                return came_to

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
        limit: int,
        each: bool,
        check: bool,
    ) -> Pass:
        """A pass in one transaction, over at most `limit` events.

        Raises `BatchFailedError` where it must be made with `each`, `CommitRefusedError` where with `check` as well.
        """
        refused = Pass(due_in=plan.polling_delay, deaf=True)
        events: list[Event] = []
        with consumption.transaction(self._database, events) as connection, hold.connection(connection):
            locked = consumption.lock(connection, self._queries, key, wait=False)
            if locked is None or locked.state.paused or locked.leased or locked.retry_in:
                return refused
            if self._dead_letters.blocking(locked.state, connection) is not None:
                return refused
            events += fetch(
                connection, self._queries, key.topic,
                partition=key.partition, after=locked.offset, upto=locked.upto, limit=limit,
            )  # fmt: skip
            if not events:
                # A look finds out whether the others have come as far.
                return Pass() if locked.state.until is None else Pass(due_in=0.0, last=True)
            waited = (locked.now - events[0].created_at).total_seconds()
            # Up to the end of a layout there will be no more.
            enough = limit < plan.max_events or len(events) >= plan.min_events or locked.state.until is not None
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
