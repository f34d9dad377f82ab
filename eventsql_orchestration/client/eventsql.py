"""`EventSQL`: the whole platform, on one database or over several shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Unpack

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.capture import Capture, Captures
from eventsql_orchestration.client.admin import (
    ClusterCompactor,
    ClusterEraser,
    ClusterLag,
    ClusterRepartitioner,
    ClusterRetainer,
    ClusterSeeker,
)
from eventsql_orchestration.client.buffered import AsyncPublisher, BufferedPublisher
from eventsql_orchestration.client.consumers import ClusterConsumers, ClusterTransfer
from eventsql_orchestration.client.dead_letters import ClusterDeadLetters
from eventsql_orchestration.client.publisher import ClusterPublisher
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.consuming.claims import Claims
from eventsql_orchestration.consuming.lag import ConsumerLag
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.notifications import Listener
from eventsql_orchestration.errors import SingleShardError, WrongShardError
from eventsql_orchestration.publishing.buffer_limits import BufferOptions
from eventsql_orchestration.shards.barriers import Barriers, HeldBack
from eventsql_orchestration.shards.cluster import Cluster, OnShardDown
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.shards.two_phase_coordinator import Unfinished
from eventsql_orchestration.store.store import Store
from eventsql_orchestration.threads import in_thread
from eventsql_orchestration.topics.layouts import Layouts
from eventsql_orchestration.topics.reader import Reader
from eventsql_orchestration.validation import DEFAULT_SCHEMA, Duration, in_seconds


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """A shard: its name, its database, the generation with which it joined, and its state.

    `state` is `takes events`, `down`, `joining` (the shard is being added), or `prepared` (it is ready to be added, and
    has no generation).
    """

    shard: str
    database: str
    generation: int | None
    state: Literal["takes events", "down", "joining", "prepared"]


@checked
class EventSQL:
    """Events over one PostgreSQL database, or over several databases as its shards.

    `dsn` is the URL of the database, `more` are the URLs of further shards (docs/shards.md). The first use connects,
    and brings the tables in `schema` up to date unless `migrate` is False. With `transfer`, a thread moves buffered
    events into their logs from the first publication of this object on. With `straight`, batches may go directly to
    their log if no other process holds the topic. One object serves any number of threads.
    Close it, or use it as a context manager. Afterwards every use raises `ClosedError`, until `open()` or another
    `with` opens it again.

    With several databases, an event or a message of a queue whose shard is down fails; with `on_shard_down="wait"`, it
    waits for up to `shard_timeout` seconds. An event whose shard is being added also waits for up to `shard_timeout`
    seconds.
    """

    def __init__(
        self, dsn: str, *more: str, schema: str = DEFAULT_SCHEMA, migrate: bool = True, transfer: bool = True,
        straight: bool = True, on_shard_down: OnShardDown = "fail", shard_timeout: Duration = 10.0,
    ) -> None:  # fmt: skip
        self._options: Any = {"schema": schema, "migrate": migrate, "transfer": transfer, "straight": straight}
        shards = [Shard(each, **self._options) for each in (dsn, *more)]
        timeout = in_seconds(shard_timeout)
        self._cluster = Cluster(shards, migrate=migrate, on_down=on_shard_down, timeout=timeout)
        self._barriers = Barriers(self._cluster)
        self.registry = ClusterRegistry(self._cluster, self._barriers)
        self.publisher = ClusterPublisher(self._cluster, self.registry)
        self.dead_letters = ClusterDeadLetters(self._cluster)
        self.transfer = ClusterTransfer(self._cluster, self._barriers)
        self.repartitioner = ClusterRepartitioner(self._cluster)
        self.compactor = ClusterCompactor(self._cluster)
        self.eraser = ClusterEraser(self._cluster)
        self.retention = ClusterRetainer(self._cluster)
        self.consumers = ClusterConsumers(self._cluster, self.registry, self._barriers)
        self.seeker = ClusterSeeker(self._cluster, self.registry, self._barriers)
        self._lag = ClusterLag(self._cluster, self._barriers)
        self._buffering: dict[BufferedPublisher | AsyncPublisher, None] = {}
        lone = self._cluster.lone
        self._store = None if lone is None else Store(lone.database, notifier=lone.notifier, listener=lone.listener)

    def __repr__(self) -> str:
        on = ", ".join(
            f"{shard.database}" + ("" if shard.name is None else f" ({shard.name})") for shard in self.shards
        )
        return f"<{type(self).__name__} on {on}>"

    # On one database

    @property
    def database(self) -> Database:
        """The only database. Raises `SingleShardError` if there are several."""
        return self._only("database").database

    @property
    def reader(self) -> Reader:
        """Reads the log of the only database. Raises `SingleShardError` if there are several."""
        return self._only("reader").reader

    @property
    def claims(self) -> Claims:
        """Claims on the only database. Raises `SingleShardError` if there are several."""
        return self._only("claims").claims

    @property
    def layouts(self) -> Layouts:
        """The layouts of topics in the only database. Raises `SingleShardError` if there are several."""
        return self._only("layouts").layouts

    @property
    def listener(self) -> Listener:
        """Listens to the only database. Raises `SingleShardError` if there are several."""
        return self._only("listener").listener

    @property
    def store(self) -> Store:
        """The event store of the only database. Raises `SingleShardError` if there are several."""
        self._only("store", "Store(platform.shards[i])")
        assert self._store is not None, "there is one database"
        return self._store

    @property
    def captures(self) -> Captures:
        """The captures of tables of the only database. Raises `SingleShardError` if there are several."""
        return Captures(self._only("captures", "Captures(platform.shards[i])").database)

    def capture(
        self, table: str, topic: str,
        *, key: Sequence[str] | None = None, columns: Sequence[str] | None = None, snapshot: bool = True,
    ) -> Capture:  # fmt: skip
        """Publish each change of a row of `table` to `topic`, as part of its transaction. See `Captures.create`."""
        return self.captures.create(table, topic, key=key, columns=columns, snapshot=snapshot)

    def _only(self, name: str, instead: str | None = None) -> Shard:
        if self._cluster.lone is not None:
            return self._cluster.lone
        instead = instead or f"platform.shards[i].{name}"
        raise SingleShardError(
            f"platform.{name} belongs to one database, and this platform has {len(self.shards)}: use {instead} "
            "or --shard NAME; an event store, views and captures live on one of them"
        )

    # The shards

    @property
    def shards(self) -> tuple[Shard, ...]:
        """A `Shard` for each database. With several, each has a `name` after it was reached."""
        return self._cluster.shards

    def open(self) -> EventSQL:
        """Connect now instead of at the first use, and check the tables; also after `close`. Raises database errors.

        With several databases, raises `ShardSetError` if they are not the shards of one set, and
        `DatabaseUnavailableError` if none can be reached.
        """
        self._reopen()
        self._cluster.open()
        return self

    def opened(self) -> tuple[Shard, ...]:
        """The `shards`, after the first call has connected as `open` does. Raises as `open`, and `ClosedError`."""
        self._check_open()
        self._cluster.open()
        return self.shards

    def members(self) -> list[Shard]:
        """The shards of the set, up or down, the oldest first. A shard that is only prepared is left out.

        Raises as `open`.
        """
        return self._cluster.members()

    def _reopen(self) -> None:
        for shard in self.shards:
            shard.database.open()

    def shard_of(self, key: str) -> Shard:
        """The shard of a key. Its connections take events of the key (`connection=`).

        Raises `ShardSetError` if this process does not know the shard's URL.
        """
        return self._cluster.owner(key)

    def using(self, shard: Shard) -> AbstractContextManager[None]:
        """A block that uses a shard. If it finds the shard down, the shard counts as down until it answers again."""
        return self._cluster.using(shard)

    def reach(self, shard: Shard, since: float) -> None:
        """Make sure that a shard can be reached. Raises `ShardUnavailableError`.

        With `on_shard_down="wait"`, waits until `shard_timeout` has passed `since` a time of `time.monotonic`.
        """
        self._cluster.health.reach(shard, since + self._cluster.timeout)

    def reconsider(self, error: WrongShardError, since: float) -> None:
        """Read the set of shards again after a shard refused a key; wait a little if the shard is being added.

        Raises `error` if `shard_timeout` has passed `since` a time of `time.monotonic`.
        """
        self._cluster.reconsider(error, [], since + self._cluster.timeout)

    def add_url(self, dsn: str) -> None:
        """Tell a running platform the URL of a shard that was added, or is being added.

        The platform's consumers and transfers start on that shard too. Raises `ShardSetError` for any other database,
        and if this platform was opened with one URL.
        """
        shard = Shard(dsn, **self._options)
        # Configure the shard before anything is published to it or consumed from it.
        shard.publisher.configure_partitioner(self.publisher.partitioner)
        shard.dead_letters.configure(self.dead_letters.factory)
        self.consumers.join(shard)
        try:
            self._cluster.add(shard)
        except BaseException:
            shard.close()
            raise

    def status(self) -> list[ShardStatus]:
        """Each shard, the oldest first, then the prepared shards; none if there is a single URL."""
        if self._cluster.lone is not None:
            return []
        self._cluster.refresh()
        found = [self._status(shard) for shard in self._cluster.known()]
        return sorted(found, key=lambda each: each.state == "prepared")

    def _status(self, shard: Shard) -> ShardStatus:
        name, where = shard.label, str(shard.database)
        came = max(1, self._cluster.generation_of(shard))
        if shard.down is not None:
            return ShardStatus(name, where, came, "down")
        if shard.active:
            return ShardStatus(name, where, came, "takes events")
        # The older shards know of it from the first fence on.
        known = name in self._cluster.state.generations[-1]
        return ShardStatus(name, where, came, "joining") if known else ShardStatus(name, where, None, "prepared")

    def held_back(self) -> list[HeldBack]:
        """Release consumers that may start on a shard that joined; gives the consumers that may not yet."""
        return self._barriers.settle()

    def unfinished(self) -> list[Unfinished]:
        """Finish publications over several shards; gives the publications that could not be finished, and why."""
        return [] if self._cluster.lone is not None else self.transfer.coordinator.finish()

    # Publishing at high rates

    def buffered_publisher(self, **options: Unpack[BufferOptions]) -> BufferedPublisher:
        """A publisher that commits events of many threads together; `close()` closes it. Options: `BufferLimits`."""
        self._check_open()
        publisher = BufferedPublisher(self._cluster, self.registry, **options)
        self._keep(publisher)
        return publisher

    def async_publisher(self, **options: Unpack[BufferOptions]) -> AsyncPublisher:
        """As `buffered_publisher`, for asyncio."""
        self._check_open()
        publisher = AsyncPublisher(self._cluster, self.registry, **options)
        self._keep(publisher)
        return publisher

    def _check_open(self) -> None:
        for shard in self.shards:
            shard.database.check_open()

    def _keep(self, publisher: BufferedPublisher | AsyncPublisher) -> None:
        # Keep it until it is closed, even if its caller forgets it: it may have events that are not committed. Another
        # thread may come in between.
        self._buffering[publisher] = None
        for each in [each for each in list(self._buffering) if each.closed]:
            self._buffering.pop(each, None)

    # Lag

    def lag(self, topic: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition, of one topic or of all. Raises `TopicNotFoundError`.

        With several shards, a shard that is down is shown as unreachable.
        """
        return self._lag.read(topic)

    def buffered(self) -> dict[str, int]:
        """The number of events of each topic that wait in the buffer; topics without buffered events are left out.

        With several shards, the sum over the shards that are up.
        """
        return self._lag.buffered()

    # Closing

    def close(self, timeout: Duration = 10.0) -> bool:
        """Stop the consumers, workers, subscriptions and the transfer of this object and close its connections.

        This takes about `timeout` seconds at most. Consumers, workers and subscriptions may finish their current
        batches; gives False if some were rolled back. Events that wait in buffered publishers are committed first.
        Published events are transferred as far as time allows. Whatever uses this object later gets `ClosedError`: see
        `open`.
        """
        deadline = time.monotonic() + in_seconds(timeout)
        if self._store is not None:
            # Subscriptions finish while consumers do.
            self._store.close(0.0)
        ended = self.consumers.close(timeout)
        if self._store is not None:
            ended = self._store.close(max(0.0, deadline - time.monotonic())) and ended
        for publisher in list(self._buffering):
            publisher.close(max(0.0, deadline - time.monotonic()))
        self.publisher.close()
        self._cluster.close()
        if self._cluster.lone is not None:
            return self._cluster.lone.close(max(0.0, deadline - time.monotonic())) and ended
        # Close shards side by side: a shard that is down must not take the time of the other shards.
        left = max(0.5, deadline - time.monotonic())
        closing = [in_thread("close", partial(shard.close, left), daemon=False) for shard in self.shards]
        for each in closing:
            each.wait()
        return all([ended, *(each.result() for each in closing)])

    def __enter__(self) -> EventSQL:
        self._reopen()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
