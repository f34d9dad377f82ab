"""Publishing over shards: each event on the shard of its key, or on any where it has none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import NoReturn

import sqlalchemy

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import Connection, driver_connection
from eventsql_orchestration.errors import (
    PartlyPublishedError,
    RedefinitionError,
    RegistryError,
    ShardSetError,
    ShardUnavailableError,
    WrongShardError,
)
from eventsql_orchestration.log import encoding
from eventsql_orchestration.log.partitioner import Partitioner, default_partition
from eventsql_orchestration.log.publisher import (
    STRAIGHT_BYTES,
    STRAIGHT_MOST,
    Publisher,
    check_many,
    check_publication,
)
from eventsql_orchestration.model import Publication, Topic
from eventsql_orchestration.rules import check_kind
from eventsql_orchestration.sharded.member import Member
from eventsql_orchestration.sharded.members import Members
from eventsql_orchestration.sharded.placing import Placing
from eventsql_orchestration.sharded.registry import ShardedRegistry
from eventsql_orchestration.sharded.streaming import Stream
from eventsql_orchestration.sharding import ShardSet


@checked
class ShardedPublisher(Publisher):
    """A `Publisher` over shards."""

    def __init__(self, members: Members, registry: ShardedRegistry) -> None:
        self._members = members
        self._sharded = registry
        self._chosen: Partitioner = default_partition
        self._threads: ThreadPoolExecutor | None = None
        self._threads_lock = threading.Lock()

    def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        for platform in self._members.platforms:
            platform.publisher.close()

    @property
    def chosen(self) -> Partitioner:
        """The partitioner that is configured."""
        return self._chosen

    def configure_partitioner(self, partitioner: Partitioner) -> None:
        """Choose partitions within a shard by `partitioner`; the shard is always that of the key."""
        self._chosen = partitioner
        for platform in self._members.platforms:
            platform.publisher.configure_partitioner(partitioner)

    @property
    def hashes_keys(self) -> bool:
        """Whether partitions within a shard are those of the keys' hash."""
        return self._chosen is default_partition

    @checks_itself
    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        check_publication(publication)
        if publication.key is None:
            return self._members.any().platform.publisher.partition_of(publication, topic)
        return self._members.keyed(
            publication.key,
            lambda member, _shards: member.platform.publisher.partition_of(publication, topic),
            topic=publication.topic,
        )

    @checks_itself
    def publish(
        self,
        publication: Publication,
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
        placed: ShardSet | None = None,
    ) -> None:
        """Publish one event on the shard of its key; without a key, on one that can be reached.

        With `connection`, the event is part of that transaction, and its key must belong to the shard that the
        connection leads to: `WrongShardError` names it otherwise, and `shard_of` finds it beforehand.

        Raises `ShardUnavailableError` where the shard of the key is down, after the platform's `shard_timeout` where it
        waits for such; `ShardPendingError` where it is being added for longer than that. Nothing was published then.
        Otherwise as on one database.
        """
        check_kind("placed", placed, ShardSet | None)
        self._sharded.check_same(check_publication(publication).topic)
        if connection is not None:
            with self._joined(connection) as publisher:
                publisher.publish(publication, connection=connection)
        elif publication.key is None:
            member = self._members.any()
            with self._members.using(member):
                member.platform.publisher.publish(publication)
        else:
            self._members.keyed(publication.key, _publishing(self._members, publication), topic=publication.topic)

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
        placed: ShardSet | None = None,  # noqa: ARG002 - of one shard
    ) -> int:
        """Publish any number of events, of any topics, in order and in one commit on each shard; gives their number.

        Those without a key go to one shard together. When it raises, nothing is published, unless it is
        `PartlyPublishedError`: that says which shards have committed, and why the others have not. With `connection`,
        all must belong to the shard that it leads to. Otherwise as `publish`, and as on one database.
        """
        if connection is not None:
            with self._joined(connection) as publisher:
                return publisher.publish_all(publications, connection=connection)
        check_many(publications)
        first, rest = _begin(publications)
        if rest is None:
            return _Batch(self._members, self._sharded, self._submit).publish(first)
        return Stream(self._members, self._sharded).publish(chain(first, map(check_publication, rest)))

    @contextmanager
    def _joined(self, connection: Connection | sqlalchemy.Connection) -> Iterator[Publisher]:
        """The publisher of the shard that a caller's connection leads to."""
        try:
            yield self._members.of_connection(driver_connection(connection)).platform.publisher
        except WrongShardError:
            # Whoever asks now which shard it is shall not be told the same again.
            self._members.refresh()
            raise

    def _submit(self, work: Callable[[], int]) -> Future[int]:
        with self._threads_lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(thread_name_prefix="eventsql-publish")
            return self._threads.submit(work)


def _publishing(members: Members, publication: Publication) -> Callable[[Member, ShardSet], None]:
    def publish(member: Member, shards: ShardSet) -> None:
        with members.using(member):
            member.platform.publisher.publish(publication, placed=shards)

    return publish


def _begin(publications: Iterable[Publication]) -> tuple[list[Publication], Iterator[Publication] | None]:
    """As many of the first events as memory is taken for, and the others, if there may be any."""
    first: list[Publication] = []
    size, source = 0, iter(publications)
    for publication in source:
        first.append(publication)
        size += encoding.size(check_publication(publication))
        if len(first) > STRAIGHT_MOST or size > STRAIGHT_BYTES:
            return first, source
    return first, None


class _Batch:
    """One call of `publish_all` whose events are in memory."""

    def __init__(
        self, members: Members, registry: ShardedRegistry, submit: Callable[[Callable[[], int]], Future[int]]
    ) -> None:
        self._members = members
        self._placing = Placing(members, registry)
        self._submit = submit
        self._deadline = time.monotonic() + members.timeout
        self._committed: dict[str, int] = {}

    def publish(self, publications: Sequence[Publication]) -> int:
        left: Sequence[Publication] = publications
        while left:
            groups = self._placing.groups(left)
            members = self._named(groups)
            self._check(groups, members)
            refused = self._publish_groups(groups, members)
            if not refused:
                break
            # Their places have changed meanwhile: each is told by the transaction that would have written it.
            moved = set().union(*(map(id, groups[name]) for name in refused))
            left = [each for each in left if id(each) in moved]
            self._reconsider(refused, {each.topic for each in left})
        return sum(self._committed.values())

    def _named(self, names: Iterable[str]) -> dict[str, Member]:
        """The shards of these names, of which one may have joined while others have committed."""
        try:
            return {name: self._members.named(name) for name in names}
        except ShardSetError as error:
            self._fail(dict.fromkeys(names, error))

    def _check(self, groups: dict[str, list[Publication]], members: dict[str, Member]) -> None:
        """Find out what can be known before anything is written."""
        for name, member in members.items():
            try:
                self._members.reach_in_time(member, self._deadline)
            except ShardUnavailableError as error:
                self._fail({name: error})
        for name, group in groups.items():
            publisher = members[name].platform.publisher
            for each in group:
                if each.partition is not None:
                    publisher.partition_of(each)

    def _publish_groups(
        self, groups: dict[str, list[Publication]], members: dict[str, Member]
    ) -> dict[str, RegistryError]:
        """A commit on each shard, side by side; gives those that refused because the places have changed."""
        shards = self._placing.shards
        *others, last = groups

        def commit(name: str) -> int:
            with self._members.using(members[name]):
                return members[name].platform.publisher.publish_all(groups[name], placed=shards)

        futures = {name: self._submit(lambda name=name: commit(name)) for name in others}  # type: ignore[misc]
        refused: dict[str, RegistryError] = {}
        failed: dict[str, Exception] = {}
        for name in (last, *others):
            try:
                done = futures[name].result() if name in futures else commit(name)
                self._committed[name] = self._committed.get(name, 0) + done
            except (RedefinitionError, WrongShardError) as error:
                refused[name] = error
            except Exception as error:  # noqa: BLE001 - raised below, with what the others have done
                failed[name] = error
        if failed:
            self._fail({**refused, **failed})
        return refused

    def _reconsider(self, refused: Mapping[str, RegistryError], topics: set[str]) -> None:
        for error in refused.values():
            try:
                self._members.reconsider(error, topics, self._deadline)
            except RegistryError:
                self._fail(refused)
        self._placing.refresh()

    def _fail(self, failed: Mapping[str, Exception]) -> NoReturn:
        if self._committed:
            raise PartlyPublishedError(self._committed, failed) from next(iter(failed.values()))
        raise next(iter(failed.values()))
