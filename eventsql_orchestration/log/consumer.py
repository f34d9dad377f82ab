"""Consumers inside a process: threads that poll consumer partitions and hand their events to a function."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from types import TracebackType
from typing import Final

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import (
    ClaimLostError,
    DatabaseUnavailableError,
    EventSQLError,
    PartitionOutOfRangeError,
    ValidationError,
)
from eventsql_orchestration.log import consumption
from eventsql_orchestration.log.consumption import BatchHandler, ConsumerPartition, EventHandler, Progress
from eventsql_orchestration.log.dead_letters import DeadLetters
from eventsql_orchestration.log.reader import fetch
from eventsql_orchestration.log.registry import Registry

logger = logging.getLogger(__name__)

SINGLE_BATCH: Final = 100
"""How many events a consumer of single events reads at a time; each has a savepoint of its own."""

MAX_WORKERS: Final = 4
"""Threads per consumption at most, and so its connections; partitions take turns where there are more."""

FAULT_DELAY: Final = 5.0


class Consumption:
    """A running consumer of this process. Ends with `stop`, or with the block that it is the context of."""

    def __init__(self, consumers: Consumers, keys: list[ConsumerPartition], plan: _Plan) -> None:
        self._consumers = consumers
        self._plan = plan
        self._stop = threading.Event()
        self._due: list[tuple[float, int, ConsumerPartition]] = [(0.0, i, key) for i, key in enumerate(keys)]
        self._turn = len(keys)
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"eventsql-{keys[0].consumer}-{worker}", daemon=True)
            for worker in range(min(len(keys), MAX_WORKERS))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the batches under way and end; False when some are still running after `timeout` seconds."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Consumption:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _work(self) -> None:
        while (key := self._next()) is not None:
            delay = self._consume(key)
            with self._changed:
                self._turn += 1
                heapq.heappush(self._due, (time.monotonic() + delay, self._turn, key))
                self._changed.notify()

    def _next(self) -> ConsumerPartition | None:
        """The partition that has been due longest, when it is due; None when the consumption stops."""
        with self._changed:
            while not self._stop.is_set():
                wait = None
                if self._due:
                    wait = self._due[0][0] - time.monotonic()
                    if wait <= 0:
                        return heapq.heappop(self._due)[2]
                self._changed.wait(wait)
        return None

    def _consume(self, key: ConsumerPartition) -> float:
        """One pass over a partition; gives the seconds until the next."""
        try:
            progress = self._consumers.consume_partition(key, self._plan)
        except ClaimLostError as error:
            logger.info("%s", error)
            return 0.0
        except DatabaseUnavailableError as error:
            logger.warning("%s waits for the database: %s", key, error)
            return FAULT_DELAY
        except EventSQLError:
            logger.exception("%s could not be consumed; trying again in %.0f s", key, FAULT_DELAY)
            return FAULT_DELAY
        except Exception:
            # A thread that dies would stop its partitions silently.
            logger.exception("%s met an unexpected error; trying again in %.0f s", key, FAULT_DELAY)
            return FAULT_DELAY
        return 0.0 if progress is not None and progress.consumed else self._plan.polling_delay


class _Plan:
    """How a consumption reads: its handler, the size of its batches and its delays in seconds."""

    def __init__(
        self,
        handler: BatchHandler,
        *,
        each: bool,
        min_events: int,
        max_events: int,
        polling_delay: float,
        max_polling_delay: float,
    ) -> None:
        if not 1 <= min_events <= max_events:
            raise ValidationError(f"1 <= min_events <= max_events is needed, not {min_events} and {max_events}")
        if polling_delay <= 0 or max_polling_delay < 0:
            raise ValidationError("delays are positive numbers of seconds")
        self.handler = handler
        self.each = each
        self.min_events = min_events
        self.max_events = max_events
        self.polling_delay = polling_delay
        self.max_polling_delay = max_polling_delay


class Consumers:
    """Starts consumers in this process. Any number of processes may run the same one; they share its partitions."""

    def __init__(self, database: Database, registry: Registry, dead_letters: DeadLetters) -> None:
        self._database = database
        self._registry = registry
        self._dead_letters = dead_letters
        self._queries = Queries("log", database.schema)
        self._running: list[Consumption] = []

    def start(self, topic: str, consumer: str, handler: EventHandler, *, polling_delay: float = 1.0) -> Consumption:
        """Hand each event to `handler(event, connection)`, in order within each consumer partition.

        What the handler writes through `connection` commits together with the offset: exactly once. Anything else it
        does happens at least once. When it raises, its writes for that event are undone and the event is tried again,
        with backoff, up to the consumer's `max_attempts`. The transaction is not the handler's to end: a partition
        whose handler does so stays where it is. `polling_delay` is in seconds, after a pass that found nothing.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `ValidationError`.
        """
        plan = _Plan(
            consumption.one_by_one(handler), each=True, min_events=1, max_events=SINGLE_BATCH,
            polling_delay=polling_delay, max_polling_delay=0.0,
        )  # fmt: skip
        return self._start(topic, consumer, plan)

    def start_batch(
        self,
        topic: str,
        consumer: str,
        handler: BatchHandler,
        *,
        min_events: int = 1,
        max_events: int = 1_000,
        polling_delay: float = 1.0,
        max_polling_delay: float = 10.0,
    ) -> Consumption:
        """Hand events to `handler(events, connection)`, `min_events` to `max_events` at a time.

        Fewer than `min_events` wait for more, but none longer than `max_polling_delay` seconds. A batch that fails is
        handed over again event by event, so that only the one that fails is held up. Otherwise as `start`.
        """
        plan = _Plan(
            handler, each=False, min_events=min_events, max_events=max_events,
            polling_delay=polling_delay, max_polling_delay=max_polling_delay,
        )  # fmt: skip
        return self._start(topic, consumer, plan)

    def _start(self, topic: str, consumer: str, plan: _Plan) -> Consumption:
        started = Consumption(self, self._keys(topic, consumer), plan)
        self._running.append(started)
        return started

    def _keys(self, topic: str, consumer: str) -> list[ConsumerPartition]:
        return [
            ConsumerPartition(topic, consumer, state.partition) for state in self._registry.consumer(topic, consumer)
        ]

    def consume_once(
        self, topic: str, consumer: str, handler: BatchHandler, *, partition: int | None = None, max_events: int = 1_000
    ) -> int:
        """One pass in the caller's thread over one partition, or over all; gives the number of events consumed.

        Partitions that another consumption holds are left to it. Raises `PartitionOutOfRangeError` for a partition that
        the consumer does not have.
        """
        plan = _Plan(handler, each=False, min_events=1, max_events=max_events, polling_delay=1.0, max_polling_delay=0.0)
        keys = [key for key in self._keys(topic, consumer) if partition is None or key.partition == partition]
        if not keys:
            raise PartitionOutOfRangeError(f"consumer {consumer!r} of topic {topic!r} has no partition {partition}")
        consumed = 0
        for key in keys:
            progress = self.consume_partition(key, plan)
            consumed += progress.consumed if progress else 0
        return consumed

    def consume_partition(self, key: ConsumerPartition, plan: _Plan) -> Progress | None:
        """One pass over one partition, in one transaction; None when it could not or need not be consumed."""
        with self._database.transaction() as connection:
            locked = consumption.lock(connection, self._queries, key, wait=False)
            if locked is None or locked.state.paused or locked.leased or locked.retry_in:
                return None
            if locked.state.spent and self._dead_letters.topic_of(key.topic, connection) is None:
                return None
            events = fetch(
                connection, self._queries, key.topic,
                partition=key.partition, after=locked.offset, limit=plan.max_events,
            )  # fmt: skip
            if not events:
                return None
            waited = (locked.now - events[0].created_at).total_seconds()
            if len(events) < plan.min_events and waited < plan.max_polling_delay:
                return None
            return consumption.consume(
                connection, self._queries, self._dead_letters, locked,
                events=events, handler=plan.handler, each=plan.each,
            )  # fmt: skip

    def close(self, timeout: float = 10.0) -> None:
        """Stop every consumption that was started here."""
        for running in self._running:
            running.stop(timeout)
        self._running.clear()
