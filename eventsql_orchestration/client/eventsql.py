"""`EventSQL` over several databases."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, Unpack

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.errors import ShardError
from eventsql_orchestration.log.asynchronous import AsyncPublisher
from eventsql_orchestration.log.buffered import BoundOptions, BufferedPublisher
from eventsql_orchestration.log.lag import ConsumerLag
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.rules import DEFAULT_SCHEMA
from eventsql_orchestration.sharded.buffered import ShardedAsyncPublisher, ShardedBufferedPublisher
from eventsql_orchestration.sharded.consumers import ShardedConsumers, ShardedRetainer, ShardedTransfer
from eventsql_orchestration.sharded.decisions import Unfinished
from eventsql_orchestration.sharded.gates import Gates, HeldBack
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members, OnShardDown
from eventsql_orchestration.sharded.operations import (
    ShardedDeadLetters,
    ShardedLag,
    ShardedRepartitioner,
    ShardedSeeker,
)
from eventsql_orchestration.sharded.publisher import ShardedPublisher
from eventsql_orchestration.sharded.registry import ShardedRegistry

_OF_ONE: Final = frozenset({"claims", "database", "layouts", "listener", "notifier", "reader"})
"""What makes sense on one database alone."""


class SingleShardError(ShardError, AttributeError):
    """What was asked for is of one database: take it of one of `platform.shards`."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A shard: its name, its database, the generation with which it came, and what it is up to.

    `state` is `takes events`, `down`, `joining` while it is being added, or `prepared` for that, without a generation.
    """

    shard: str
    database: str
    generation: int | None
    state: Literal["takes events", "down", "joining", "prepared"]


@checked
class ShardedEventSQL(EventSQL):
    """Events over several PostgreSQL databases; `EventSQL(url, url, …)` makes one. See docs/shards.md."""

    def __init__(
        self,
        dsn: str,
        *more: str,
        schema: str = DEFAULT_SCHEMA,
        migrate: bool = True,
        transfer: bool = True,
        straight: bool = True,
        on_shard_down: OnShardDown = "fail",
        shard_timeout: float = 10.0,
    ) -> None:
        self._options: dict[str, Any] = {
            "schema": schema, "migrate": migrate, "transfer": transfer, "straight": straight,
        }  # fmt: skip
        self.shard = None
        platforms = [EventSQL(each, **self._options) for each in (dsn, *more)]
        self._members = Members(platforms, migrate=migrate, on_down=on_shard_down, timeout=shard_timeout)
        self._gates = Gates(self._members)
        self.registry: ShardedRegistry = ShardedRegistry(self._members, self._gates)
        sharded = self.registry
        self.publisher = self._publisher = ShardedPublisher(self._members, sharded)
        self.dead_letters = self._dead_letters = ShardedDeadLetters(self._members)
        self.transfer: ShardedTransfer = ShardedTransfer(self._members, self._gates)
        self.repartitioner = ShardedRepartitioner(self._members)
        self.retention = ShardedRetainer(self._members)
        self.consumers: ShardedConsumers = ShardedConsumers(self._members, sharded, self._gates)
        self.seeker = ShardedSeeker(self._members, sharded, self._gates)
        self._sharded_lag = ShardedLag(self._members, self._gates)
        self._buffering: weakref.WeakSet[BufferedPublisher | AsyncPublisher] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(repr, self.shards))}>"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE:
            raise SingleShardError(
                f"platform.{name} is of one database, and this platform has {len(self.shards)}: use "
                f"platform.shards[i].{name}, or --shard NAME on the command line; a queue, an event store and views "
                "live on one of them"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def shards(self) -> tuple[EventSQL, ...]:
        """The platforms on each database by itself; `shard` is the name of each, once it was reached."""
        return self._members.platforms

    def open(self) -> ShardedEventSQL:
        """Check now, and not at the first use, that the databases are the shards of one set.

        Raises `ShardSetError` where they are not, and `DatabaseUnavailableError` where none can be reached.
        """
        self._members.open()
        return self

    def shard_of(self, key: str) -> EventSQL:
        """The platform on the shard of a key, whose connections take events of that key (`connection=`).

        Raises `ShardSetError` where this process has no URL of it.
        """
        return self._members.named(self._members.open().owner(key)).platform

    def add_url(self, dsn: str) -> None:
        """Tell a running platform the URL of a shard that was added, or is being added, to the others.

        Its consumers and transfers go on with that one too. Raises `ShardSetError` for any other database.
        """
        platform = EventSQL(dsn, **self._options)
        # Before anything is published to it or consumed from it.
        platform.publisher.configure_partitioner(self._publisher.chosen)
        platform.dead_letters.configure(self._dead_letters.made_by)
        self.consumers.join(platform.consumers)
        self._members.add(platform)

    def standing(self) -> list[Standing]:
        """Each shard, those first that were there first, and whether it can be reached; then those only prepared."""
        self._members.refresh()
        standing = [self._standing(member) for member in self._members.known()]
        return sorted(standing, key=lambda each: each.state == "prepared")

    def _standing(self, member: Member) -> Standing:
        name, where = member.name, str(member.platform.database)
        came = max(1, self._members.generation_of(member))
        if member.down is not None:
            return Standing(name, where, came, "down")
        if member.active:
            return Standing(name, where, came, "takes events")
        # The shards that were there know of it from the first fence on.
        known = name in self._members.state.generations[-1]
        return Standing(name, where, came, "joining") if known else Standing(name, where, None, "prepared")

    def held_back(self) -> list[HeldBack]:
        """Let go the consumers that may go on with a shard that joined; gives those that may not yet."""
        self._members.open()
        return self._gates.settle()

    def unfinished(self) -> list[Unfinished]:
        """Finish what Spark has published over several shards at once; gives what waits for a shard that is down."""
        self._members.open()
        return self.transfer.decisions.finish()

    def buffered_publisher(self, **options: Unpack[BoundOptions]) -> BufferedPublisher:
        publisher = ShardedBufferedPublisher(self._members, self.registry, **options)
        self._buffering.add(publisher)
        return publisher

    def async_publisher(self, **options: Unpack[BoundOptions]) -> AsyncPublisher:
        publisher = ShardedAsyncPublisher(self._members, self.registry, **options)
        self._buffering.add(publisher)
        return publisher

    def lag(self, topic: str | None = None) -> list[ConsumerLag]:
        """The lag of every consumer partition on every shard; one that is down is shown as unreachable."""
        return self._sharded_lag.read(topic)

    def buffered(self) -> dict[str, int]:
        """On the shards that are up, together."""
        return self._sharded_lag.buffered()

    def announce(self, topics: Iterable[str]) -> None:
        wanted = list(topics)
        for platform in self.shards:
            platform.announce(wanted)

    def transfer_until(self, stop: threading.Event, **options: Any) -> None:
        self.transfer.run(stop, **options)

    def close(self, timeout: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout
        ended = self.consumers.close(timeout)
        for publisher in list(self._buffering):
            publisher.close(max(0.0, deadline - time.monotonic()))
        self.publisher.close()
        self._members.close()
        # Side by side: one that is down must not take the time of the others.
        results: list[bool] = []
        closing = [
            threading.Thread(
                target=lambda platform=platform: results.append(platform.close(max(0.5, deadline - time.monotonic())))
            )
            for platform in self.shards
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        return ended and all(results)

    def __enter__(self) -> ShardedEventSQL:
        return self
