"""Consuming and transfer: each shard separately; a shard that is down takes part when it is back."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Unpack

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.consuming.handlers import BatchHandler, EventHandler
from eventsql_orchestration.consuming.leases import LeasedHandler
from eventsql_orchestration.consuming.queue_consumption import MOST_UNACKNOWLEDGED, QUEUE_WORKERS
from eventsql_orchestration.consuming.queue_handler import QueueHandler
from eventsql_orchestration.consuming.running import AnyRunning, Running, stop_all
from eventsql_orchestration.consuming.throttle import Throttles
from eventsql_orchestration.consuming.worker_pool import MAX_WORKERS, Batching
from eventsql_orchestration.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PartitionOutOfRangeError,
)
from eventsql_orchestration.forks import ProcessSet
from eventsql_orchestration.publishing.transfer import Delay, OnMoved
from eventsql_orchestration.retry import pause_while_away
from eventsql_orchestration.shards.barriers import Barriers
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.two_phase_coordinator import TwoPhaseCoordinator
from eventsql_orchestration.threads import ThreadResult, Wake, in_thread, log_recovery
from eventsql_orchestration.validation import Duration, in_seconds

logger = logging.getLogger(__name__)


@checked
class ClusterConsumption(Running):
    """A consumer that runs on all shards. On a shard that is down, or joins later, it starts when the shard is up."""

    def __init__(self, cluster: Cluster, begin: Callable[[Shard], Running]) -> None:
        self._cluster = cluster
        self._begin = begin
        self._ending = Wake()
        self._on: dict[Shard, Running] = {}
        self._taking = threading.Lock()
        try:
            for shard in cluster.up():
                self._take(shard)
        except BaseException:
            self.stop()
            raise
        if cluster.lone is None:
            cluster.background.add(self._take_missing)

    def _take(self, shard: Shard) -> None:
        with self._taking:
            if shard in self._on or self._ending.is_set():
                return
            try:
                with self._cluster.using(shard):
                    self._on[shard] = begun = self._begin(shard)
            except DatabaseUnavailableError:
                if self._cluster.lone is not None:
                    raise
                # The consumer starts on the shard when it is back. Raises if no shard is up.
                self._cluster.up()
            else:
                if self._ending.is_set():
                    # `stop_soon` has not seen it.
                    begun.stop_soon()

    def _take_missing(self) -> None:
        for shard in self._cluster.members():
            if shard.down is None and shard not in self._on:
                self._take(shard)

    def stop_soon(self) -> None:
        self._cluster.background.remove(self._take_missing)
        # Do not take the lock: a shard that does not answer can keep it for long.
        self._ending.set()
        for each in list(self._on.values()):
            each.stop_soon()

    def threads(self) -> Collection[threading.Thread]:
        return [thread for each in list(self._on.values()) for thread in each.threads()]

    def _end(self, deadline: float) -> bool:
        # Wait until no consumer is about to start on a shard: `_on` has that shard only once the consumer has started.
        complete = self._taking.acquire(timeout=max(0.0, deadline - time.monotonic()))
        if complete:
            self._taking.release()
        # Wait for each, without stopping at the first False: the last batches must be rolled back too.
        ended = [each.await_end(deadline) for each in list(self._on.values())]
        return complete and all(ended)


@checked
class ClusterConsumers:
    """Starts consumers in this process. Any number of processes may run one consumer; they share its partitions.

    With several shards, `workers` is per shard, and so are the offsets of events. Start a handler that must know its
    shard on each shard: `for shard in platform.shards: shard.consumers.start(topic, consumer, partial(handle,
    shard.name))`.
    """

    def __init__(self, cluster: Cluster, registry: ClusterRegistry, barriers: Barriers) -> None:
        self._cluster = cluster
        self._registry = registry
        self._barriers = barriers
        self._throttles = Throttles()
        for shard in cluster.shards:
            self.join(shard)
        self._started: ProcessSet[Running] = ProcessSet()
        """A running consumption is kept by its threads."""

    def join(self, shard: Shard) -> None:
        """Throttle the consumers of all shards together, this shard included."""
        shard.consumers.throttles = self._throttles

    def start(
        self, topic: str, consumer: str, handler: EventHandler, *, workers: int = MAX_WORKERS,
        polling_delay: Duration = 1.0,
    ) -> ClusterConsumption:  # fmt: skip
        """Hand each event to `handler(event, connection)`, in order within each consumer partition.

        Writes through `connection` commit together with the offset: exactly once. All other effects happen at least
        once. When the handler raises, its writes for that event are rolled back and the event is tried again, with
        backoff, up to the consumer's `max_attempts`. The handler must not end the transaction: if it does, as with
        `COMMIT`, the partition stays where it is.

        `polling_delay` is the delay in seconds after a look that found nothing. A consumer with notifications looks
        when it is notified, and otherwise every 10 seconds.

        `workers` (at least 1) is the maximum number of partitions that are consumed side by side, each by a thread with
        a connection.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `ValidationError`.
        """
        return self._start(
            topic, consumer,
            lambda shard: shard.consumers.start(topic, consumer, handler, workers=workers, polling_delay=polling_delay),
        )  # fmt: skip

    def start_batch(
        self, topic: str, consumer: str, handler: BatchHandler, *, workers: int = MAX_WORKERS,
        **batching: Unpack[Batching],
    ) -> ClusterConsumption:  # fmt: skip
        """Hand events to `handler(events, connection)`, `min_events` (1) to `max_events` (1,000) at a time.

        A batch ends early with the event whose value makes 32 MiB full. Fewer than `min_events` wait for more, at most
        `max_polling_delay` (10.0) seconds; a look that finds nothing is repeated after `polling_delay` (1.0) seconds. A
        failed batch is handed over again event by event, so that only the failing event is held up. Otherwise as
        `start`.
        """
        return self._start(
            topic, consumer,
            lambda shard: shard.consumers.start_batch(topic, consumer, handler, workers=workers, **batching),
        )  # fmt: skip

    def start_leased(
        self, topic: str, consumer: str, handler: LeasedHandler, *, lease: Duration = 60.0, workers: int = MAX_WORKERS,
        **batching: Unpack[Batching],
    ) -> ClusterConsumption:  # fmt: skip
        """Hand events to `handler(events, lease)` outside of any transaction: for work that takes longer than seconds.

        The partition is leased for `lease` seconds, and the lease is renewed while the handler runs. When this process
        dies, another takes the events over after that time. Writes in `lease.transaction()` commit together with the
        offset: exactly once. Without such a transaction, the offset is committed when the handler returns: at least
        once. `lease.lost` is set when the partition was taken over, and nothing can be committed any more.

        A handler that raises `ConsumptionError(event)` names the failed event, and the events before it are done.
        After any other error, or an error in `lease.transaction()`, the events are handed over again, one at a time.
        The event that fails then is tried again with backoff, up to the consumer's `max_attempts`. Otherwise as
        `start_batch`.
        """
        return self._start(
            topic, consumer,
            lambda shard: shard.consumers.start_leased(
                topic, consumer, handler, lease=lease, workers=workers, **batching
            ),
        )  # fmt: skip

    def start_queue(
        self, topic: str, consumer: str, handler: QueueHandler, *, workers: int = QUEUE_WORKERS, by_key: bool = True,
        lease: Duration = 60.0, polling_delay: Duration = 1.0, max_unacknowledged: int = MOST_UNACKNOWLEDGED,
    ) -> ClusterConsumption:  # fmt: skip
        """Hand each event to a handler and acknowledge it by itself, so that a slow or failing event delays no other.

        `workers` threads handle events side by side, in any number of processes and whatever the number of partitions.
        With `by_key`, the events of a key are handled one after another, in their order; events without a key go at any
        time.

        `handler(event)` runs outside of any transaction, and the event is acknowledged after it returns: at least once.
        Writes through the connection of `handler(event, connection)` commit together with the acknowledgement: exactly
        once. A handler that raises is called again with backoff, up to the consumer's `max_attempts`; then the event
        becomes a dead letter. Until then, later events of its key wait.

        A process holds its events for `lease` seconds, and renews that while it runs. When it dies, other processes
        take the events over after that time. At most `max_unacknowledged` events of a partition are handed out and not
        yet acknowledged; each is a row. The consumer's offset is the last offset before the first of them. While there
        is an unacknowledged event, the consumer cannot be consumed in another way, or moved without force.

        Raises `TopicNotFoundError`, `ConsumerNotFoundError`, `ValidationError`, and `RedefinitionError` while there are
        unacknowledged events that were handed out with the other `by_key`. Otherwise as `start`.
        """
        return self._start(
            topic, consumer,
            lambda shard: shard.consumers.start_queue(
                topic, consumer, handler, workers=workers, by_key=by_key, lease=lease, polling_delay=polling_delay,
                max_unacknowledged=max_unacknowledged,
            ),
        )  # fmt: skip

    def _start(self, topic: str, consumer: str, begin: Callable[[Shard], Running]) -> ClusterConsumption:
        self._registry.check_same_consumer(topic, consumer)
        started = self.keep(ClusterConsumption(self._cluster, begin))
        if self._cluster.lone is None:
            self._cluster.background.add(self._barriers.settle)
        return started

    def keep(self, running: AnyRunning) -> AnyRunning:
        """Let `close` stop this, too, such as the workers of a queue. Gives it."""
        self._started.add(running)
        return running

    def consume_once(
        self, topic: str, consumer: str, handler: BatchHandler, *, partition: int | None = None, max_events: int = 1_000
    ) -> int:
        """Handle one batch of `partition`, or of each partition, in the caller's thread; gives the number of events.

        Skips partitions that another consumption has. With several shards, this consumes on each shard that is up;
        `partition` is then the partition of this number on each. Raises `TopicNotFoundError`, `ConsumerNotFoundError`
        and `PartitionOutOfRangeError`. An error of the handler is an attempt of its event as in `start`, and is logged.
        """
        if self._cluster.lone is not None:
            return self._cluster.lone.consumers.consume_once(
                topic, consumer, handler, partition=partition, max_events=max_events
            )
        self._barriers.settle()
        states = self._registry.consumer(topic, consumer)
        on = {state.shard for state in states if partition is None or state.partition == partition}
        if not on:
            raise PartitionOutOfRangeError(f"consumer {consumer!r} of topic {topic!r} has no partition {partition}")
        consumed = 0
        for shard in self._cluster.up():
            if shard.label in on:
                with self._cluster.using(shard):
                    consumed += shard.consumers.consume_once(
                        topic, consumer, handler, partition=partition, max_events=max_events
                    )
        return consumed

    def close(self, timeout: Duration = 10.0) -> bool:
        """Stop all that was started here or on a shard, within `timeout` seconds in all."""
        deadline = time.monotonic() + in_seconds(timeout)
        self._cluster.background.remove(self._barriers.settle)
        # The wait does not include a consumption that is started meanwhile.
        running = self._started.all(forget=True)
        for shard in self._cluster.shards:
            running += shard.consumers.running.all(forget=True)
        return stop_all(running, deadline)


@checked
class ClusterTransfer:
    """Moves published events from the buffer into the logs of their topics.

    With several shards, it also finishes publications over several shards.
    """

    def __init__(self, cluster: Cluster, barriers: Barriers) -> None:
        self._cluster = cluster
        self._barriers = barriers
        self.coordinator = TwoPhaseCoordinator(cluster.reachable)

    def run_once(self, topics: Iterable[str] | None = None) -> dict[str, int]:
        """Move the events visible in the buffer now, of `topics` or of all; gives the number of events by topic.

        Topics take turns, one batch each, so that a busy topic does not delay the others. A topic that another transfer
        holds is left to it. A topic whose events cannot be moved does not stop the others; its error is raised at the
        end. A failed batch is tried again with half as many events, and `StuckEventError` names an event that fails
        alone. Unknown topics are ignored.

        A shard that fails does not stop the other shards. Its error is raised after they are done, unless the shard is
        down. Raises `DatabaseUnavailableError` if no shard is up, `SequenceError` and other kinds of `DatabaseError`.
        """
        if self._cluster.lone is not None:
            return self._cluster.lone.transfer.run_once(topics)
        wanted = None if topics is None else list(topics)
        moved: Counter[str] = Counter()
        failed: list[DatabaseError] = []
        self.coordinator.finish()
        for shard in self._cluster.up():
            try:
                with self._cluster.using(shard):
                    moved.update(shard.transfer.run_once(wanted))
            except DatabaseUnavailableError:
                continue
            except DatabaseError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        self._cluster.up()
        self._barriers.release()
        return dict(moved)

    def run(
        self, stop: threading.Event,
        *, polling_delay: Delay = 0.2, wake: threading.Event | None = None, on_moved: OnMoved | None = None,
    ) -> None:  # fmt: skip
        """Transfer until `stop` is set, at once when a process announces events in the buffer.

        Otherwise it looks every `polling_delay` seconds, and on one database also when `wake` is set. After a round
        that moved events which nobody had announced, it looks sooner and then slows down. It retries while the database
        is down or a topic's events cannot be moved. `on_moved` gets the number of events by topic of each round. Each
        of several shards has a thread, and so has a shard that joins. Raises errors of `on_moved`, and `ClosedError`
        when the platform is closed.
        """
        if self._cluster.lone is not None:
            return self._cluster.lone.transfer_until(stop, polling_delay=polling_delay, wake=wake, on_moved=on_moved)
        self._await_shards(stop)
        running: dict[Shard, ThreadResult[None]] = {}
        ending, reporting = threading.Event(), threading.Lock()
        fault: str | None = None

        def report(moved: dict[str, int]) -> None:
            if on_moved is not None:
                with reporting:
                    on_moved(moved)

        try:
            while not stop.is_set():
                for shard in self._cluster.known():
                    if shard not in running:
                        transfer = partial(shard.transfer_until, ending, polling_delay=polling_delay, on_moved=report)
                        running[shard] = in_thread(f"transfer-{shard.label}", transfer)
                    elif running[shard].done():
                        running[shard].result()
                try:
                    self.coordinator.finish()
                    self._barriers.release()
                    if fault is not None:
                        log_recovery(logger, "publications over several shards and consumers of new shards go on")
                    fault = None
                except EventSQLError as error:
                    # A shard can go down in between. If this loop ended, consumers would stay held back for ever.
                    if str(error) != fault:
                        fault = str(error)
                        logger.warning(
                            "publications over several shards and consumers of new shards wait, trying again: %s", error
                        )
                stop.wait(1.0)
        finally:
            ending.set()
        deadline = time.monotonic() + 10.0
        for each in [each for each in running.values() if each.wait(max(0.0, deadline - time.monotonic()))]:
            each.result()
        return None

    def _await_shards(self, stop: threading.Event) -> None:
        """Wait until a shard can be reached, as the transfer of one database does."""
        failures = 0
        while not stop.is_set():
            try:
                self._cluster.open()
            except DatabaseError as error:
                failures += 1
                if failures == 1:
                    logger.warning("the transfer waits for the shards: %s", error)
                stop.wait(pause_while_away(failures))
            else:
                if failures:
                    log_recovery(logger, "the transfer goes on")
                return
