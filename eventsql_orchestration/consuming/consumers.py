"""Consumers in a process: threads that hand the events of consumer partitions to a handler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Unpack

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.batch import Batch, BatchResult, BatchRunner
from eventsql_orchestration.consuming.cancellation import Cancellation
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.consuming.commit_retry import CommitRetry, CommitRetryLimits
from eventsql_orchestration.consuming.dead_letters import DeadLetters
from eventsql_orchestration.consuming.deliveries import Deliveries
from eventsql_orchestration.consuming.failures import Failure
from eventsql_orchestration.consuming.handlers import BatchHandler, EventHandler, check_handler, one_by_one
from eventsql_orchestration.consuming.leases import LeasedHandler, LeasedPolls
from eventsql_orchestration.consuming.partition import ConsumerPartition, lock
from eventsql_orchestration.consuming.queue_consumption import MOST_UNACKNOWLEDGED, QUEUE_WORKERS, QueueConsumption
from eventsql_orchestration.consuming.queue_handler import QueueHandler, takes_connection
from eventsql_orchestration.consuming.running import AnyRunning, Running, stop_all
from eventsql_orchestration.consuming.throttle import Throttles
from eventsql_orchestration.consuming.worker_pool import (
    MAX_WORKERS,
    Batching,
    Consumption,
    Look,
    Poll,
    PollOptions,
    PollOutcome,
)
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.binary import BIGINT, SMALLINT, encode_array, encode_bigint, encode_smallint
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.errors import PartitionOutOfRangeError, ValidationError
from eventsql_orchestration.forks import ProcessSet
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.storage.log_queries import LogQueries
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.layouts import Layouts
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import Duration, check_whole, in_seconds

SINGLE_BATCH: Final = 100
"""Events that a consumer of single events reads at a time; each has its own savepoint."""

MOST_ROWS: Final = 1_000_000
"""Maximum number of a partition's events that are handed out and not acknowledged. Each is a row."""

LAYOUT_SECONDS: Final = 1.0
"""Seconds until a partition checks again whether the others have reached the end of their topic's layout."""


class _UnleasedSource:
    """The next batch of a partition whose row stays locked while the handler runs.

    `idle` is the outcome if there is none. `full` says that more events may wait after the batch.
    """

    def __init__(
        self, queries: Queries, log: LogReader, dead_letters: DeadLetters, key: ConsumerPartition, options: PollOptions
    ) -> None:
        self.key = key
        self.idle = PollOutcome()
        self.full = False
        self._queries = queries
        self._log = log
        self._dead_letters = dead_letters
        self._options = options

    def open(self, connection: Connection, limit: int) -> Batch | None:
        options = self._options
        self.idle = PollOutcome(due_in=options.polling_delay, deaf=True)
        locked = lock(connection, self._queries, self.key, wait=False)
        if locked is None or locked.state.paused or locked.leased or locked.retry_in:
            return None
        if self._dead_letters.blocking(locked.state, connection) is not None:
            return None

        events, more = self._log.read_batch(
            connection, self.key.topic,
            partition=self.key.partition, after=locked.offset, upto=locked.upto, limit=limit,
        )  # fmt: skip
        ending = locked.state.until is not None
        if not events:
            # A look finds out whether the other partitions have come as far.
            self.idle = PollOutcome(due_in=0.0, last=True) if ending else PollOutcome()
            return None

        waited = (locked.now - events[0].created_at).total_seconds()
        # Up to the end of a layout there will be no more events.
        enough = more or limit < options.max_events or len(events) >= options.min_events or ending
        # An event from before the server's clock went back may have a time that is far ahead.
        if not enough and abs(waited) < options.max_polling_delay:
            self.idle = PollOutcome(due_in=options.max_polling_delay - waited, least=options.min_events)
            return None

        # At the end of a layout, the next poll asks for the next layout.
        self.full = more or ending
        return Batch(locked, events, events[-1].id)

    def close(self, connection: Connection, result: BatchResult) -> None:
        """Nothing more belongs to the batch."""

    def outcome(self, result: BatchResult | None) -> PollOutcome:
        if result is None:
            return self.idle
        if result.failure is None:
            return PollOutcome(result, more=self.full or bool(result.dead_letters))
        if result.failure.outcome == Failure.BLOCKED:
            return PollOutcome(result, due_in=self._options.polling_delay, deaf=True)
        # A look finds out when the event is due again.
        return PollOutcome(result, due_in=0.0)


@checked
class Consumers:
    """Starts consumers in this process. Any number of processes may run the same consumer and share its partitions.

    Consumers wake up at the notifications of new events that `listener` receives, and poll seldom in between.
    """

    def __init__(
        self, database: Database, registry: Registry, dead_letters: DeadLetters, *, listener: Listener
    ) -> None:
        self._database = database
        self._registry = registry
        self._dead_letters = dead_letters
        self._listener = listener
        self._claims = Claims(database, dead_letters)
        self._runner = BatchRunner(database, dead_letters)
        self._layouts = Layouts(database)
        self._queries = Queries("log", database.schema)
        self._on_log = LogQueries("consumers", database.schema)
        self._log = LogReader(database.schema)
        self.throttles = Throttles()
        """Throttles of consumers. The databases of a cluster share them."""
        self.commit_retry = CommitRetryLimits()
        self.running: ProcessSet[Running] = ProcessSet()
        """All that was started here. A running consumption is kept by its threads."""
        self._retries: dict[ConsumerPartition, CommitRetry] = {}

    def start(
        self, topic: str, consumer: str, handler: EventHandler, *, workers: int = MAX_WORKERS,
        polling_delay: Duration = 1.0,
    ) -> Consumption:  # fmt: skip
        """Hand each event to `handler(event, connection)`. See `ClusterConsumers.start`."""
        check_handler(handler, "event", "connection")
        options = PollOptions.of(max_events=SINGLE_BATCH, polling_delay=polling_delay, max_polling_delay=0.0)
        each = one_by_one(handler)
        return self._start(
            topic, consumer, lambda key, stopping: self._poll(key, each, options, stopping, each=True), options, workers
        )

    def start_batch(
        self, topic: str, consumer: str, handler: BatchHandler, *, workers: int = MAX_WORKERS,
        **batching: Unpack[Batching],
    ) -> Consumption:  # fmt: skip
        """Hand batches to `handler(events, connection)`. See `ClusterConsumers.start_batch`."""
        check_handler(handler, "events", "connection")
        options = PollOptions.of(**batching)
        return self._start(
            topic, consumer, lambda key, stopping: self._poll(key, handler, options, stopping), options, workers
        )

    def start_leased(
        self, topic: str, consumer: str, handler: LeasedHandler, *, lease: Duration = 60.0, workers: int = MAX_WORKERS,
        **batching: Unpack[Batching],
    ) -> Consumption:  # fmt: skip
        """Hand batches to `handler(events, lease)`. See `ClusterConsumers.start_leased`."""
        check_handler(handler, "events", "lease")
        options = PollOptions.of(**batching)
        polls = LeasedPolls(self._database, self._claims, handler, options, in_seconds(lease))
        return self._start(topic, consumer, polls.poll, options, workers)

    def start_queue(
        self, topic: str, consumer: str, handler: QueueHandler, *, workers: int = QUEUE_WORKERS, by_key: bool = True,
        lease: Duration = 60.0, polling_delay: Duration = 1.0, max_unacknowledged: int = MOST_UNACKNOWLEDGED,
    ) -> QueueConsumption:  # fmt: skip
        """Hand each event to `handler(event)` or `handler(event, connection)`. See `ClusterConsumers.start_queue`."""
        if takes_connection(handler) and workers > (most := self._database.most_connections):
            raise ValidationError(
                f"the handler takes a connection, and {workers} workers would need as many: {self._database} gives "
                f"this process {most} at once; use at most {most} workers"
            )
        seconds = in_seconds(lease)
        keys = self._keys(topic, consumer)
        deliveries = Deliveries(
            self._database, self._dead_letters, topic, consumer, by_key=by_key, lease=seconds,
            most=check_whole("max_unacknowledged", max_unacknowledged, least=1, most=MOST_ROWS),
        )  # fmt: skip
        consumption = QueueConsumption(
            deliveries, handler, name=f"consumer {consumer!r} of topic {topic!r}", where=str(self._database),
            topic=topic, partitions=[key.partition for key in keys], look=self._look(keys), workers=workers,
            lease=seconds, polling_delay=in_seconds(polling_delay), listener=self._listener,
        )  # fmt: skip
        # First: after Ctrl-C in the middle of its start, `close` still ends it.
        return self.keep(consumption).start()

    def _start(self, topic: str, consumer: str, poll: Poll, options: PollOptions, workers: int) -> Consumption:
        keys = self._keys(topic, consumer)
        consumption = Consumption(
            keys, where=str(self._database), look=self._look(keys), poll=poll,
            polling_delay=options.polling_delay, workers=workers, listener=self._listener,
            throttle=self.throttles.of(topic, consumer),
        )  # fmt: skip
        # First: after Ctrl-C in the middle of its start, `close` still ends it.
        return self.keep(consumption).start()

    def _look(self, keys: Sequence[ConsumerPartition]) -> Look:
        key = keys[0]
        partitioned = key.partition != NOT_PARTITIONED
        return lambda asked: self._ready(key.topic, key.consumer, asked, partitioned=partitioned)

    def keep(self, running: AnyRunning) -> AnyRunning:
        """See `ClusterConsumers.keep`."""
        self.running.add(running)
        return running

    def _keys(self, topic: str, consumer: str, partition: int | None = None) -> list[ConsumerPartition]:
        """The consumer's partitions, or `partition` alone if the consumer has it."""
        return [
            ConsumerPartition(topic, consumer, state.partition)
            for state in self._registry.consumer(topic, consumer)
            if partition is None or state.partition == partition
        ]

    def _ready(self, topic: str, consumer: str, asked: dict[int, int], *, partitioned: bool) -> dict[int, float | None]:
        """The partitions that have the requested number of events, with the seconds until each may be consumed.

        The consumer may have been deleted, and registered in the other form: then these are the partitions of the new
        consumer.
        """
        constants: dict[str, str | None] = {"topic": topic, "consumer": consumer}
        asking: dict[str, bytes] = {}
        if any(least > 1 for least in asked.values()):
            asking["partitions"] = encode_array(map(encode_smallint, asked), of=SMALLINT)
            asking["least"] = encode_array(map(encode_bigint, asked.values()), of=BIGINT)
        else:
            # Without values, the server makes no plan for them. Measured: a look takes 0.25 ms instead of 0.75.
            constants |= {"partitions": None, "least": None}
        with self._database.connection() as connection:
            look = self._on_log.brief(connection, "ready" if partitioned else "ready_topic", topic, constants)
        rows = self._database.fetch_values(look, asking)
        if rows and all((partition != NOT_PARTITIONED) != partitioned for partition, _, _ in rows):
            return self._ready(topic, consumer, asked, partitioned=not partitioned)
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
        """Handle one batch of each partition, or of `partition`. See `ClusterConsumers.consume_once`."""
        check_handler(handler, "events", "connection")
        options = PollOptions.of(max_events=max_events, max_polling_delay=0.0)
        keys = self._keys(topic, consumer, partition)
        if not keys:
            raise PartitionOutOfRangeError(f"consumer {consumer!r} of topic {topic!r} has no partition {partition}")

        consumed, last = self._poll_each(keys, handler, options)
        while last and not consumed and self._layouts.settle(topic, consumer).entered:
            keys = self._keys(topic, consumer, partition)
            consumed, last = self._poll_each(keys, handler, options)
        return consumed

    def _poll_each(
        self, keys: Sequence[ConsumerPartition], handler: BatchHandler, options: PollOptions
    ) -> tuple[int, bool]:
        """Poll each partition once; returns the number of events, and whether a partition is at its layout's end."""
        consumed, last = 0, False
        for key in keys:
            while True:
                outcome = self._poll(key, handler, options, Cancellation())
                result = outcome.result
                # Go on after a batch in which no event matches the filter.
                if result is None or result.consumed or result.failure is not None:
                    break
            consumed += result.consumed if result is not None else 0
            last = last or outcome.last
        return consumed, last

    def _poll(
        self, key: ConsumerPartition, handler: BatchHandler, options: PollOptions, cancellation: Cancellation,
        *, each: bool = False,
    ) -> PollOutcome:  # fmt: skip
        """Handle the next batch of a partition, if there is one."""
        retry = self._retries.setdefault(key, CommitRetry(self.commit_retry))
        source = _UnleasedSource(self._queries, self._log, self._dead_letters, key, options)
        result = self._runner.run(
            source, handler, limit=options.max_events, retry=retry, each=each, cancellation=cancellation
        )
        return source.outcome(result)

    def close(self, timeout: Duration = 10.0) -> bool:
        """Stop all that was started here, as `Consumption.stop`, within `timeout` seconds in all."""
        return stop_all(self.running.all(forget=True), time.monotonic() + in_seconds(timeout))
