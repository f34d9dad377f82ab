"""Publishing: events are committed before the call returns, or join the caller's transaction.

Events go to the buffer, and the transfer moves them to their topic's log. A batch may take the straight path instead:
the publisher becomes the topic's only writer for one short transaction, moves the buffered events, and appends the
batch to the log. The batch is written once then, instead of three times. Events of one publisher and of one key keep
their order over both paths, because an append first moves all events that were committed before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Final, Protocol, runtime_checkable

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.binary import encode_integer, encode_smallint
from eventsql_orchestration.database.rows import fetch_all, send_copy
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import RedefinitionError, ValidationError
from eventsql_orchestration.model import BLOCKS, Placement, Publication, Topic, check_partition
from eventsql_orchestration.publishing import batches, copy_format
from eventsql_orchestration.publishing.batches import check_publication, read_ahead, refusing_rollback
from eventsql_orchestration.publishing.handed_out import ParamStyle, Statement, rendered
from eventsql_orchestration.publishing.log_writer import LOCK_TIMEOUT, LogWriter
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.sharding import ANYWHERE, ShardSet
from eventsql_orchestration.threads import after_commit
from eventsql_orchestration.topics.partitioner import Partitioner, default_partition, default_partitions
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import check_kind

REDEFINITIONS: Final = 5
"""Maximum number of further attempts for a batch whose topic is redefined at the same time."""

STRAIGHT_LEAST: Final = 50
"""The least number of events in a batch on the straight path. Smaller batches commit side by side in the buffer, which
is faster than one after the other under the topic's lock."""


@runtime_checkable
class TransactionPublisher(Protocol):
    """Publishes batches as part of a caller's transaction, on one database or over several shards."""

    def publish_all(self, publications: Iterable[Publication], *, connection: CallersConnection | None = None) -> int:
        """Publish any number of events in order; gives their number. See `Publisher.publish_all`."""


class EventPublisher(TransactionPublisher, Protocol):
    """Publishes events one by one, too."""

    def publish(self, publication: Publication, *, connection: CallersConnection | None = None) -> Placement:
        """Publish one event; gives where it is. See `Publisher.publish`."""


@checked
class Publisher:
    """Publishes events. One instance serves any number of threads."""

    def __init__(
        self, database: Database, registry: Registry, *, straight: bool = True,
        on_published: Callable[[bool], None] = lambda _committed: None,
        on_appended: Callable[[str], None] = lambda _topic: None,
    ) -> None:  # fmt: skip
        """With `straight`, batches may go to the log directly.

        `on_published` is called after events went to the buffer, with whether their transaction has been committed. For
        a caller's transaction, it is called before the commit. `on_appended` is called with the topic after a batch
        went to its log.
        """
        self._database = database
        self._registry = registry
        self._queries = Queries("log", database.schema)
        self._insertion = SingleStatement("publish", self._queries("publish"))
        self._partitioner: Partitioner = default_partition
        self._writer = LogWriter(database, lock_timeout=LOCK_TIMEOUT) if straight else None
        self._on_published = after_commit(on_published)
        self._on_appended = after_commit(on_appended)

    def close(self) -> None:
        """Close the connection of the straight path; the next batch opens another."""
        if self._writer is not None:
            self._writer.close()

    def configure_partitioner(self, partitioner: Partitioner) -> None:
        """See `ClusterPublisher.configure_partitioner`."""
        self._partitioner = partitioner

    @checks_itself
    def publish(
        self, publication: Publication, *, connection: CallersConnection | None = None, placed: ShardSet | None = None
    ) -> Placement:
        """Publish one event. See `ClusterPublisher.publish`.

        On a shard, an event whose key belongs to another shard raises `WrongShardError`. `placed` is the shard set by
        which the caller has chosen this shard already.
        """
        check_publication(publication)
        check_kind("placed", placed, ShardSet | None)
        for _ in range(2):
            topic = self._definition(publication.topic, placed)
            partition = self._partition(publication, topic)
            if self._insert(publication, topic, partition, connection):
                self._on_published(connection is None)
                return Placement(partition, None)
            self._registry.forget(topic.name)
        raise _redefined([publication.topic])

    def statement(self, publication: Publication, *, paramstyle: ParamStyle = "pyformat") -> Statement:
        """See `ClusterPublisher.statement`."""
        topic = self._definition(publication.topic, None)
        partition = self._partition(publication, topic)
        values = {
            "topic": topic.name, "partitions": topic.partitions, "layout": topic.layout, "partition": partition,
            "key": publication.key, "value": publication.value,
            "metadata": copy_format.encode_metadata(publication.metadata).decode(),
        }  # fmt: skip
        self._on_published(False)
        return rendered(self._queries("publish_statement").as_string(), values, paramstyle)

    def publish_all(
        self, publications: Iterable[Publication], *, connection: CallersConnection | None = None,
        placed: ShardSet | None = None,
    ) -> int:  # fmt: skip
        """Publish any number of events in order and with one commit. See `ClusterPublisher.publish_all`."""
        check_many(publications)
        if connection is not None:
            return self._publish_buffered(batches.parts_of(publications), connection, placed)
        if placed is not None and placed.names and isinstance(publications, list):
            # These are one shard's part of a batch that is in memory already.
            return self._publish_known(publications, placed)
        with refusing_rollback():
            first, rest = read_ahead(publications)
            if rest is None:
                return self._publish_known(first, placed)
            return self._publish_buffered(batches.parts_of(chain(first, rest)), None, placed)

    def publish_batch(self, publications: list[Publication]) -> Placements:
        """Publish events that are in memory, as `publish_all` does; gives where they are."""
        placements = Placements()
        self._publish_known(publications, None, placements)
        return placements

    def _publish_known(
        self, publications: list[Publication], placed: ShardSet | None, placements: Placements | None = None
    ) -> int:
        """Publish events that are in memory. If their topic is redefined meanwhile, try its new definition."""
        names = {publication.topic for publication in publications}
        for name in names:
            # Do this before the transaction below: it holds a connection, and the registry may need another.
            self._registry.cached_topic(name)
        # A batch over many shards has one log, and one lock, on each of them.
        least = STRAIGHT_LEAST // max(1, len(placed.names) if placed is not None else 1)
        if self._writer is not None and len(publications) >= least and len(names) == 1:
            topic = self._definition(publications[0].topic, placed)
            if self._append(self._writer, topic, publications, placements):
                return len(publications)
        for _ in range(REDEFINITIONS):
            with suppress(RedefinitionError):
                return self._publish_buffered([publications], None, placed, placements)
        return self._publish_buffered([publications], None, placed, placements)

    def _publish_buffered(
        self, parts: Iterable[list[Publication]], connection: CallersConnection | None, placed: ShardSet | None,
        placements: Placements | None = None,
    ) -> int:  # fmt: skip
        # The whole batch uses one definition of the topic: the definition that chose the partitions is checked in the
        # end.
        topics: dict[str, Topic] = {}
        published = 0

        def rows() -> Iterator[bytes]:
            nonlocal published
            yield copy_format.HEADER
            for part in parts:
                yield from self._encoded(part, topics, placed, placements)
                published += len(part)
            yield copy_format.TRAILER

        with (
            self._transaction(connection) as psycopg_connection,
            psycopg_connection.cursor(row_factory=tuple_row) as cursor,
        ):
            send_copy(cursor, self._queries("publish_all"), rows())
            self._check(psycopg_connection, topics.values(), joined=connection is not None)
        if published:
            self._on_published(connection is None)
        return published

    def _append(
        self, writer: LogWriter, topic: Topic, publications: list[Publication], placements: Placements | None
    ) -> bool:
        """Take the straight path. False, with nothing done, if the events must go to the buffer."""
        if not writer.may_append(topic.name):
            return False
        partitions = self._partitions(publications, topic)
        if placements is not None:
            partitions = placements.noted(partitions)
        encode = batches.in_blocks if topic.storage == BLOCKS else batches.in_rows
        # In parts: the server stores one part while the next is encoded.
        parts = encode(publications, partitions)
        with writer.session(timeout=LOCK_TIMEOUT) as mine:
            appended = writer.append(topic, parts, len(publications)) if mine else None
        if appended is None:
            return False

        if placements is not None:
            placements.appended(appended)
        self._on_appended(topic.name)
        return True

    def _partitions(self, publications: list[Publication], topic: Topic) -> Iterable[int]:
        """The partitions of a topic's events, found lazily. The caller's partitioner runs before the topic is held."""
        by_key = self._partitioner is default_partition and topic.shards is None
        if by_key and all(each.partition is None for each in publications):
            parts = batches.slices(publications, batches.CHUNK_EVENTS)
            return chain.from_iterable(default_partitions(part, topic.partitions) for part in parts)
        return [self._partition(each, topic) for each in publications]

    @property
    def hashes_keys(self) -> bool:
        """Whether the key's hash chooses the partition of an event that has a key and names no partition."""
        return self._partitioner is default_partition

    @checks_itself
    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        """See `ClusterPublisher.partition_of`."""
        check_publication(publication)
        check_kind("topic", topic, Topic | None)
        return self._partition(publication, topic or self._registry.cached_topic(publication.topic))

    def _definition(self, name: str, placed: ShardSet | None) -> Topic:
        """A topic, without its shards if the caller has chosen this shard by the same shard set."""
        topic = self._registry.cached_topic(name)
        if topic.shards is not None and (placed is ANYWHERE or topic.shards.same_places(placed)):
            return replace(topic, shards=None)
        return topic

    def _partition(self, publication: Publication, topic: Topic) -> int:
        if topic.shards is not None:
            # The transaction checks the topic's layout, which changes when a shard is added.
            topic.shards.check(publication.key)
        partition = publication.partition
        if partition is None:
            partition = self._partitioner(publication, topic.partitions)
            if self._partitioner is default_partition:
                return partition
        return check_partition(topic.name, partition, topic.partitions)

    def _encoded(
        self, publications: list[Publication], topics: dict[str, Topic], placed: ShardSet | None,
        placements: Placements | None,
    ) -> Iterator[bytes]:  # fmt: skip
        """The rows of publications in the buffer. Adds the definitions that choose their partitions to `topics`.

        With `placements`, these are all publications of the batch.
        """
        for name in {publication.topic for publication in publications} - set(topics):
            topics[name] = self._definition(name, placed)
        partitions: dict[str, list[int]] = {}
        for name, own in batches.by_topic(publications):
            partitions[name] = list(self._partitions(own, topics[name]))
            yield from batches.for_buffer(topics[name], own, partitions[name])
        if placements is not None:
            rest = {name: iter(own) for name, own in partitions.items()}
            placements.noted(next(rest[publication.topic]) for publication in publications)

    def _insert(
        self, publication: Publication, topic: Topic, partition: int, connection: CallersConnection | None
    ) -> bool:
        """Insert an event. False, with nothing done, if its topic is no longer defined like `topic`."""
        key, metadata = publication.key, copy_format.encode_metadata(publication.metadata)
        if connection is None:
            values = {
                "topic": topic.name.encode(), "partitions": encode_smallint(topic.partitions),
                "layout": encode_integer(topic.layout), "partition": encode_smallint(partition),
                "key": None if key is None else key.encode(), "value": publication.value, "metadata": metadata,
            }  # fmt: skip
            return self._database.execute(self._insertion, values) == 1

        with self._database.callers(connection) as driver:
            inserted = driver.execute(
                self._queries("publish_joined"),
                {
                    "topic": topic.name, "partitions": topic.partitions, "layout": topic.layout,
                    "partition": partition, "key": key, "value": publication.value, "metadata": metadata.decode(),
                },
            )  # fmt: skip
            return inserted.rowcount == 1

    def _check(self, connection: Connection, topics: Collection[Topic], *, joined: bool) -> None:
        """Raise `RedefinitionError` unless the topics have these definitions. The open COPY keeps them unchanged."""
        known = {
            "topics": [topic.name for topic in topics],
            "partitions": [topic.partitions for topic in topics],
            "layouts": [topic.layout for topic in topics],
        }
        if joined:
            connection.execute(self._queries("hold_topics"), known)
        if redefined := [name for (name,) in fetch_all(connection, self._queries("redefined_topics"), known)]:
            for name in redefined:
                self._registry.forget(name)
            if joined:
                # The batch is written. If the caller published it again and committed, it would be there twice.
                with suppress(psycopg.Error):
                    connection.execute(self._queries("abort"))
            raise _redefined(redefined)

    @contextmanager
    def _transaction(self, given: CallersConnection | None) -> Iterator[Connection]:
        with self._database.joined(given) as connection:
            if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
                with connection.transaction(), refusing_rollback():
                    yield connection
            else:
                yield connection


def check_many(publications: object) -> None:
    """Raise `ValidationError` unless `publications` is iterable and not a string."""
    if isinstance(publications, str | bytes) or not isinstance(publications, Iterable):
        raise ValidationError(
            f"publish_all takes an iterable of publications, not {type(publications).__name__}: use publish for one"
        )


def _redefined(topics: list[str]) -> RedefinitionError:
    names = ", ".join(topics)
    return RedefinitionError(
        f"topic {names} was redefined meanwhile, and nothing was published: publish again, in a new transaction"
    )
