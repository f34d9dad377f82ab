"""Publishing at high rates: on each shard, events of many callers share a commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Generic, TypeVar, Unpack
from weakref import WeakValueDictionary

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.errors import EventSQLError, PublisherClosedError, WrongShardError
from eventsql_orchestration.forks import ProcessLock, after_fork
from eventsql_orchestration.model import Placement, Publication, Topic
from eventsql_orchestration.publishing.async_publisher import AsyncCollector
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.buffer_limits import BufferLimits, BufferOptions
from eventsql_orchestration.publishing.buffered import Acknowledgement, Collector
from eventsql_orchestration.publishing.lanes import CLOSE_TIMEOUT, BatchPublisher, time_left
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import Duration

AnyCollector = TypeVar("AnyCollector", Collector, AsyncCollector)


class _Watched:
    """The publisher of one of several shards. It tells the cluster that the shard is down, or that keys moved."""

    def __init__(self, cluster: Cluster, shard: Shard) -> None:
        self._cluster = cluster
        self._shard = shard

    @property
    def hashes_keys(self) -> bool:
        return self._shard.publisher.hashes_keys

    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        return self._shard.publisher.partition_of(publication, topic)

    def publish_batch(self, publications: list[Publication]) -> Placements:
        try:
            with self._cluster.using(self._shard):
                return self._shard.publisher.publish_batch(publications)
        except WrongShardError:
            # Later events go to the right shard, as soon as the shards can be read.
            with suppress(EventSQLError):
                self._cluster.refresh()
            raise


class _PerShard(Generic[AnyCollector]):
    """A collector for each shard that has received an event."""

    def __init__(
        self, cluster: Cluster, registry: ClusterRegistry, make: Callable[[BatchPublisher, Registry], AnyCollector]
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._make: Callable[[BatchPublisher, Registry], AnyCollector] = make
        self._turn = ProcessLock()
        self._of: dict[Shard, AnyCollector] = {}
        self.closed = False
        self.lone: AnyCollector | None = None
        if cluster.lone is not None:
            self.lone = make(cluster.lone.publisher, cluster.lone.registry)

    def on(self, shard: Shard) -> AnyCollector:
        """The collector of a shard. Raises `PublisherClosedError`."""
        found = self._of.get(shard)
        if found is None:
            with self._turn.lock:
                if self.closed:
                    raise PublisherClosedError
                if shard not in self._of:
                    self._of[shard] = self._make(_Watched(self._cluster, shard), shard.registry)
                found = self._of[shard]
        return found

    def for_event(self, publication: Publication, deadline: float) -> AnyCollector:
        """The collector of an event's shard. It waits until the shard can be reached. Raises as `publish`."""
        self._registry.check_same(check_publication(publication).topic)
        if publication.key is None:
            return self.on(self._cluster.any())
        shard = self._cluster.owner(publication.key, deadline)
        if shard.down is not None:
            self._cluster.health.reach(shard, deadline)
        shard.check_active()
        return self.on(shard)

    def all(self) -> list[AnyCollector]:
        return [self.lone] if self.lone is not None else list(self._of.values())

    def close(self) -> list[AnyCollector]:
        """Make no more collectors; gives the existing collectors."""
        with self._turn.lock:
            self.closed = True
        return self.all()


@checked
class BufferedPublisher:
    """Publishes events of any number of threads, many with each commit, and acknowledges each event after its commit.

    `BufferLimits` lists the options. They bound memory: when the buffer is full, `publish` waits for room. With several
    shards, the limits apply to each shard.

    Events of one key are committed in the order in which they were given. So are events without a key that name the
    same partition, and all events of a topic without partitions. Events of different keys have no order, even in one
    partition.

    An event that fails does not stop the events after it. If the caller gives it again, it comes after them. If the
    order of a key matters more than speed, wait for the key's last event before giving the next. If a shard is added
    and the key of a waiting event moves to it, the event fails with `WrongShardError`: publish it again.

    Close the publisher, or use it as a context manager: events that are not acknowledged when the process ends may be
    lost.
    """

    def __init__(self, cluster: Cluster, registry: ClusterRegistry, **limits: Unpack[BufferOptions]) -> None:
        self._cluster = cluster
        self._collectors: _PerShard[Collector] = _PerShard(
            cluster, registry, partial(Collector, limits=BufferLimits(**limits))
        )

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._collectors.closed

    @checks_itself
    def publish(self, publication: Publication, *, timeout: Duration | None = None) -> Acknowledgement:
        """Give one event. Its acknowledgement is done when the event is committed or has failed.

        Its `result` gives where the event is. If the buffer is full, this waits for room for at most `timeout` seconds.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError` (if it had to look up the
        topic), `DatabaseBusyError` if there is no room in time, `PublisherClosedError`; with several shards also
        `ShardUnavailableError`, `ShardPendingError`. The event is not published then.

        The acknowledgement has the database's error for this event, or `PartitionOutOfRangeError` if its topic has lost
        its partition since. Neither affects other events of the same commit. `DatabaseUnavailableError` and other
        errors of the database affect the whole commit. If the connection broke during the commit, its events may have
        been published; publishing them again may publish them twice.

        Callbacks of the acknowledgement run in the thread that commits. They should be short and must not wait for
        other events.
        """
        if self._collectors.lone is not None:
            return self._collectors.lone.publish(publication, timeout=timeout)
        deadline = time.monotonic() + self._cluster.timeout
        while True:
            try:
                return self._collectors.for_event(publication, deadline).publish(publication, timeout=timeout)
            except WrongShardError as error:
                self._cluster.reconsider(error, [publication.topic], deadline)

    def flush(self, *, timeout: Duration | None = None) -> None:
        """Wait until every event that was given before is acknowledged, or has failed.

        Raises `DatabaseBusyError` if that takes longer than `timeout` seconds; the events are still on their way.
        """
        left = time_left(timeout)
        for each in self._collectors.all():
            each.flush(timeout=left())

    def close(self, timeout: Duration | None = CLOSE_TIMEOUT) -> None:
        """Take no more events, and commit the events that were given.

        An event that is not committed after `timeout` seconds gets a `PublisherClosedError`, which says whether its
        outcome is known.
        """
        left = time_left(timeout)
        for each in self._collectors.close():
            each.close(left())

    def __enter__(self) -> BufferedPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@checked
class AsyncPublisher:
    """Publishes events of any number of tasks, many with each commit, and acknowledges each event after its commit.

    Options, order and failures are the same as in `BufferedPublisher`. When the buffer is full, tasks wait for room, in
    the order in which they came.

    The publisher belongs to the event loop of its first use. Close it, or use it with `async with`: events that are not
    acknowledged when the process ends may be lost. Cancelling a task that waits for an acknowledgement, or the future
    of an event, does not take the event back.
    """

    def __init__(self, cluster: Cluster, registry: ClusterRegistry, **limits: Unpack[BufferOptions]) -> None:
        self._cluster = cluster
        self._collectors: _PerShard[AsyncCollector] = _PerShard(
            cluster, registry, partial(AsyncCollector, limits=BufferLimits(**limits))
        )
        self._seen: set[str] = set()
        self._after_fork()
        after_fork(self, AsyncPublisher._after_fork)

    def _after_fork(self) -> None:
        """See `forks`. The tasks that give events belong to the parent process."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._giving: set[asyncio.Future[None]] = set()

    @property
    def closed(self) -> bool:
        """Whether it takes no more events."""
        return self._collectors.closed

    @checks_itself
    async def publish(self, publication: Publication) -> Placement:
        """Publish one event; it is committed when this returns. Gives where it is.

        Raises as `enqueue`, and the errors of its future. If the task is cancelled, the event may still be published.
        """
        future = await self.enqueue(publication)
        return await future

    @checks_itself
    async def enqueue(self, publication: Publication) -> asyncio.Future[Placement]:
        """Give one event, when there is room; the future is done when the event is committed or has failed.

        Its result is where the event is.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseUnavailableError` (if it had to look up the
        topic), `PublisherClosedError`; with several shards also `ShardUnavailableError`, `ShardPendingError`. The event
        is not published then. It is not published either if the task is cancelled before this returns. The future has
        the errors of an acknowledgement of `BufferedPublisher.publish`.
        """
        if self._collectors.lone is not None:
            return await self._collectors.lone.enqueue(publication)
        deadline = time.monotonic() + self._cluster.timeout
        given = asyncio.get_running_loop().create_future()
        self._giving.add(given)
        try:
            async with self._turn(check_publication(publication).key):
                while True:
                    try:
                        return await (await self._for_event(publication, deadline)).enqueue(publication)
                    except WrongShardError as error:
                        await asyncio.to_thread(self._cluster.reconsider, error, [publication.topic], deadline)
        finally:
            self._giving.discard(given)
            given.set_result(None)

    def _turn(self, key: str | None) -> AbstractAsyncContextManager[None]:
        """A block that the events of a key enter one after the other: no event passes one that waits for its shard."""
        return nullcontext() if key is None else self._turns.setdefault(key, asyncio.Lock())

    async def _for_event(self, publication: Publication, deadline: float) -> AsyncCollector:
        topic, key = publication.topic, publication.key
        if topic in self._seen and key is not None and (shard := self._cluster.owner_if_up(key)) is not None:
            # Nothing to wait for: a thread for each event would take longer than the event.
            shard.check_active()
            return self._collectors.on(shard)
        found = await asyncio.to_thread(self._collectors.for_event, publication, deadline)
        self._seen.add(topic)
        return found

    async def flush(self) -> None:
        """Wait until every event that was given before is committed, or has failed; its future is done then."""
        if self._giving:
            # Their tasks wait for a shard, or for room.
            await asyncio.wait([*self._giving])
        for each in self._collectors.all():
            await each.flush()

    async def aclose(self, timeout: Duration | None = CLOSE_TIMEOUT) -> None:  # noqa: ASYNC109 - the rest is reported
        """Take no more events, and commit the events that were given. See `BufferedPublisher.close`."""
        left = time_left(timeout)
        for each in self._collectors.close():
            await each.aclose(left())

    def close(self, timeout: Duration | None = CLOSE_TIMEOUT) -> None:
        """As `aclose`, for code that is not a task. The calling thread waits, even if it runs the event loop."""
        left = time_left(timeout)
        for each in self._collectors.close():
            each.close(left())

    async def __aenter__(self) -> AsyncPublisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
