"""Publishing: each event on the shard of its key, or on any shard if it has no key."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.client.registry import ClusterRegistry
from eventsql_orchestration.client.streaming import publish_stream, raise_first
from eventsql_orchestration.database import CallersConnection
from eventsql_orchestration.database.connections import joinable_connection
from eventsql_orchestration.errors import EventSQLError, RedefinitionError, RegistryError, ShardError, WrongShardError
from eventsql_orchestration.model import Placement, Publication, Topic
from eventsql_orchestration.publishing.batches import check_publication, read_ahead, refusing_rollback
from eventsql_orchestration.publishing.handed_out import ParamStyle, Statement
from eventsql_orchestration.publishing.publisher import Publisher, check_many
from eventsql_orchestration.shards.cluster import Cluster
from eventsql_orchestration.shards.router import Router
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.threads import in_thread
from eventsql_orchestration.topics.partitioner import Partitioner, default_partition


@checked
class ClusterPublisher:
    """Publishes events, alone or in batches, in a commit of its own or in a caller's transaction."""

    def __init__(self, cluster: Cluster, registry: ClusterRegistry) -> None:
        self._cluster = cluster
        self._lone = None if cluster.lone is None else cluster.lone.publisher
        self._registry = registry
        self._partitioner: Partitioner = default_partition

    def close(self) -> None:
        """Close the connections; the next publication opens new connections."""
        for shard in self._cluster.shards:
            shard.publisher.close()

    @property
    def partitioner(self) -> Partitioner:
        """The function that chooses partitions: by the hash of the key, unless another function was configured."""
        return self._partitioner

    def configure_partitioner(self, partitioner: Partitioner) -> None:
        """Choose partitions by `partitioner(publication, partitions)` instead of by the hash of the key.

        With several shards, it chooses a partition within the shard of the key. It is called again for an
        event that does not take the straight path after all.
        """
        self._partitioner = partitioner
        for shard in self._cluster.shards:
            shard.publisher.configure_partitioner(partitioner)

    @checks_itself
    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        """The partition of a publication; `topic` is its topic, if the caller has looked it up.

        Raises `TopicNotFoundError`, and `PartitionOutOfRangeError` if the topic does not have the partition.
        """
        check_publication(publication)
        if self._lone is not None:
            return self._lone.partition_of(publication, topic)
        return self._cluster.placed(
            publication.key,
            lambda shard, _shards: shard.publisher.partition_of(publication, topic),
            topic=publication.topic,
        )

    @checks_itself
    def publish(self, publication: Publication, *, connection: CallersConnection | None = None) -> Placement:
        """Publish one event. It is committed when this returns. Gives where it is, without an offset.

        With `connection`, of psycopg or SQLAlchemy and to the same database, the event joins the caller's transaction
        and is published when that commits (an outbox). A psycopg connection in autocommit mode has a transaction inside
        `with connection.transaction():`. Outside of it, the event is committed at once, and a batch of `publish_all` in
        its own transaction. Raises `ValidationError`, with nothing written, for a connection to another database, a
        SQLAlchemy connection in AUTOCOMMIT, which cannot roll back, or any other object.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseFullError`, or `RedefinitionError` if the
        topic keeps being redefined; nothing was published then. Raises `DatabaseUnavailableError` if the database
        cannot be reached, and its subclass `ConnectionLostError` if the connection is lost: the event may have been
        published or not. A caller's transaction that is not `READ COMMITTED` fails with `DatabaseBusyError` if the
        topic has changed since the transaction began.

        With several shards, the event goes to the shard of its key; without a key, to any shard that can be reached. A
        `connection` must lead to the shard of the key: otherwise `WrongShardError` names the shard. `shard_of` finds
        the shard beforehand. Raises `ShardUnavailableError` if the shard of the key is down (with
        `on_shard_down="wait"`, after `shard_timeout`), and `ShardPendingError` if its addition takes longer than
        `shard_timeout`. Nothing was published then.
        """
        if self._lone is not None:
            return self._lone.publish(publication, connection=connection)
        self._registry.check_same(check_publication(publication).topic)
        if connection is not None:
            with self._joined(connection) as publisher:
                return publisher.publish(publication, connection=connection)
        return self._cluster.placed(
            publication.key,
            lambda shard, shards: shard.publisher.publish(publication, placed=shards),
            topic=publication.topic,
        )

    def statement(self, publication: Publication, *, paramstyle: ParamStyle = "pyformat") -> Statement:
        """One event as SQL and its parameters, for the transaction of a driver that `publish` does not take.

        `paramstyle` is the driver's: "pyformat" for psycopg, also its `AsyncConnection`, and psycopg2; "named" for
        `sqlalchemy.text`, whose `AsyncConnection` and `AsyncSession` execute it; "numeric_dollar" for asyncpg, whose
        parameters are a tuple. Run the statement in a transaction of the platform's database; the event is published
        when that commits. The partition is chosen as `publish` chooses it. Run the statement once and soon: if the
        topic was redefined since, it fails in the database and publishes nothing. This method looks up the topic in the
        database every few seconds, on a connection of the platform. With `transfer`, the platform moves the event to
        its log.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, and `ShardError` for a platform of several shards: then
        use the `publisher` of `EventSQL.shard_of(key)`, and a connection to that shard.
        """
        if self._lone is None:
            raise ShardError(
                "a statement is for one database, and this platform has several: use "
                "platform.shard_of(key).publisher.statement(…) and a connection to that shard"
            )
        return self._lone.statement(publication, paramstyle=paramstyle)

    def publish_all(self, publications: Iterable[Publication], *, connection: CallersConnection | None = None) -> int:
        """Publish any number of events, of any topics, in order and in one commit on each shard; gives their number.

        `publications` may be longer than memory: beyond the first 16 MiB it is read as it is written. If it raises, or
        an event cannot be published, nothing is published; the caller must then roll back its own transaction. Raises
        `RedefinitionError` if a topic was redefined while events were read, or in the caller's transaction: publish
        again. Otherwise raises as `publish`.

        With several shards, events without a key go to one shard together. With `connection`, all keys must belong to
        the shard of the connection. `PartlyPublishedError` says which shards have committed, and why the others have
        not.
        """
        if self._lone is not None:
            return self._lone.publish_all(publications, connection=connection)
        if connection is not None:
            with self._joined(connection) as publisher:
                return publisher.publish_all(publications, connection=connection)
        check_many(publications)
        router = Router(self._cluster, self._registry.check_same)
        with refusing_rollback():
            first, rest = read_ahead(publications)
            if rest is None:
                return _Batch(self._cluster, router).publish(first)
            return publish_stream(self._cluster, router, chain(first, map(check_publication, rest)))

    @contextmanager
    def _joined(self, connection: CallersConnection) -> Iterator[Publisher]:
        """The publisher of the shard of a caller's connection."""
        try:
            yield self._cluster.of_connection(joinable_connection(connection)).publisher
        except WrongShardError:
            # A caller that asks for the shard now gets the new answer, if the shards can be read.
            with suppress(EventSQLError):
                self._cluster.refresh()
            raise


class _Batch:
    """One call of `publish_all` with events that are in memory."""

    def __init__(self, cluster: Cluster, router: Router) -> None:
        self._cluster = cluster
        self._router = router
        self._deadline = time.monotonic() + cluster.timeout
        self._committed: dict[str, int] = {}

    def publish(self, publications: Sequence[Publication]) -> int:
        left: Sequence[Publication] = publications
        refused: Mapping[str, RegistryError] = {}
        while left:
            names: Iterable[str] = refused
            try:
                if refused:
                    self._reconsider(refused, {each.topic for each in left})
                names = groups = self._router.groups(left)
                shards = {name: self._cluster.named(name, self._deadline) for name in groups}
                self._check(groups, shards)
            except Exception as error:
                # Other shards may have committed before.
                if not self._committed:
                    raise
                raise_first(dict.fromkeys(names, error), self._committed)
            refused = self._publish_groups(groups, shards)
            # The transaction on a shard found that the shards of its events have changed.
            moved = set().union(*(map(id, groups[name]) for name in refused))
            left = [each for each in left if id(each) in moved]
        return sum(self._committed.values())

    def _check(self, groups: dict[str, list[Publication]], shards: dict[str, Shard]) -> None:
        """Check everything that can be checked before anything is written."""
        for shard in shards.values():
            self._cluster.health.reach(shard, self._deadline)
        for name, group in groups.items():
            publisher = shards[name].publisher
            for each in group:
                if each.partition is not None:
                    publisher.partition_of(each)

    def _publish_groups(
        self, groups: dict[str, list[Publication]], shards: dict[str, Shard]
    ) -> dict[str, RegistryError]:
        """Commit on all shards in parallel; gives the shards that refused events because they have moved."""
        placed = self._router.shards
        *others, last = groups

        def commit(name: str) -> int:
            with self._cluster.using(shards[name]):
                return shards[name].publisher.publish_all(groups[name], placed=placed)

        futures = {name: in_thread("publish", partial(commit, name)) for name in others}
        refused: dict[str, RegistryError] = {}
        failed: dict[str, Exception] = {}
        for name in (last, *others):
            try:
                done = futures[name].result() if name in futures else commit(name)
                self._committed[name] = self._committed.get(name, 0) + done
            except (RedefinitionError, WrongShardError) as error:
                refused[name] = error
            except Exception as error:  # noqa: BLE001 - raised below, with the result of the others
                failed[name] = error
        if failed:
            raise_first({**refused, **failed}, self._committed)
        return refused

    def _reconsider(self, refused: Mapping[str, RegistryError], topics: set[str]) -> None:
        for error in refused.values():
            self._cluster.reconsider(error, topics, self._deadline)
        self._router.refresh()
