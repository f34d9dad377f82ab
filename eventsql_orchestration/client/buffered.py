"""Publishing at high rates over shards: a buffered publisher on each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from typing import Unpack

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.errors import PublisherClosedError, WrongShardError
from eventsql_orchestration.log.asynchronous import AsyncPublisher
from eventsql_orchestration.log.buffered import CLOSE_TIMEOUT, Acknowledgement, BoundOptions, Bounds, BufferedPublisher
from eventsql_orchestration.log.publisher import Publisher, check_publication
from eventsql_orchestration.model import Publication, Topic
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.registry import ShardedRegistry
from eventsql_orchestration.sharding import ShardSet


class _LanePublisher(Publisher):
    """A shard's publisher as its lanes use it: what goes wrong there is noticed by the platform."""

    def __init__(self, members: Members, member: Member) -> None:
        self._members = members
        self._member = member

    @property
    def hashes_keys(self) -> bool:
        return self._member.platform.publisher.hashes_keys

    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        return self._member.platform.publisher.partition_of(publication, topic)

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        connection: object = None,  # noqa: ARG002 - lanes commit by themselves
        placed: ShardSet | None = None,  # noqa: ARG002 - nor does one choose the shard twice
    ) -> int:
        """As `Publisher.publish_all`. Raises `WrongShardError` for keys that have moved since they were given."""
        try:
            with self._members.using(self._member):
                return self._member.platform.publisher.publish_all(publications)
        except WrongShardError:
            # Those that are given from now on go where they belong.
            self._members.refresh()
            raise


@checked
class ShardedBufferedPublisher(BufferedPublisher):
    """A `BufferedPublisher` over shards: the bounds are those of each shard.

    An event that was given before a shard was added, and whose key belongs to the new one by the time it is committed,
    fails with `WrongShardError`: publish it again.
    """

    def __init__(self, members: Members, registry: ShardedRegistry, **bounds: Unpack[BoundOptions]) -> None:
        Bounds(**bounds)
        self._members = members
        self._sharded = registry
        self._bounds = bounds
        self._lock = threading.Lock()
        self._closed = False
        self._of: dict[Member, BufferedPublisher] = {}

    @checks_itself
    def publish(self, publication: Publication, *, timeout: float | None = None) -> Acknowledgement:
        """As on one database. Raises also `ShardUnavailableError`, `ShardPendingError`."""
        self._sharded.check_same(check_publication(publication).topic)
        if publication.key is None:
            return self._on(self._members.any()).publish(publication, timeout=timeout)
        deadline = time.monotonic() + self._members.timeout
        while True:
            member = self._members.named(self._members.open().owner(publication.key))
            if member.down is not None:
                self._members.reach_in_time(member, deadline)
            try:
                member.check_active()
                return self._on(member).publish(publication, timeout=timeout)
            except WrongShardError as error:
                self._members.reconsider(error, [publication.topic], deadline)

    def _on(self, member: Member) -> BufferedPublisher:
        found = self._of.get(member)
        if found is None:
            with self._lock:
                if self._closed:
                    raise PublisherClosedError
                found = self._of.get(member)
                if found is None:
                    publisher = _LanePublisher(self._members, member)
                    found = self._of[member] = BufferedPublisher(publisher, member.platform.registry, **self._bounds)
        return found

    def flush(self, *, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for each in list(self._of.values()):
            each.flush(timeout=_left(deadline))

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._closed = True
        for each in list(self._of.values()):
            each.close(_left(deadline))


@checked
class ShardedAsyncPublisher(AsyncPublisher):
    """An `AsyncPublisher` over shards, as `ShardedBufferedPublisher` is a `BufferedPublisher`."""

    def __init__(self, members: Members, registry: ShardedRegistry, **bounds: Unpack[BoundOptions]) -> None:
        Bounds(**bounds)
        self._members = members
        self._sharded = registry
        self._bounds = bounds
        self._shut = False
        self._of: dict[Member, AsyncPublisher] = {}
        self._compared: set[str] = set()

    @checks_itself
    async def enqueue(self, publication: Publication) -> asyncio.Future[None]:
        """As on one database. Raises also `ShardUnavailableError`, `ShardPendingError`."""
        if check_publication(publication).topic not in self._compared:
            await asyncio.to_thread(self._sharded.check_same, publication.topic)
            self._compared.add(publication.topic)
        if publication.key is None:
            member = await asyncio.to_thread(self._members.any)
            return await self._on(member).enqueue(publication)
        deadline = time.monotonic() + self._members.timeout
        while True:
            member = self._members.named(self._members.open().owner(publication.key))
            if member.down is not None:
                await asyncio.to_thread(self._members.reach_in_time, member, deadline)
            try:
                member.check_active()
                return await self._on(member).enqueue(publication)
            except WrongShardError as error:
                await asyncio.to_thread(self._members.reconsider, error, [publication.topic], deadline)

    def _on(self, member: Member) -> AsyncPublisher:
        if self._shut:
            raise PublisherClosedError
        if member not in self._of:
            publisher = _LanePublisher(self._members, member)
            self._of[member] = AsyncPublisher(publisher, member.platform.registry, **self._bounds)
        return self._of[member]

    async def flush(self) -> None:
        for each in list(self._of.values()):
            await each.flush()

    async def aclose(self, timeout: float | None = CLOSE_TIMEOUT) -> None:  # noqa: ASYNC109 - as the base class
        deadline = None if timeout is None else time.monotonic() + timeout
        self._shut = True
        for each in list(self._of.values()):
            await each.aclose(_left(deadline))

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._shut = True
        for each in list(self._of.values()):
            each.close(_left(deadline))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
