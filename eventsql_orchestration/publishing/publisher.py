"""Publishing: events are committed before the call returns, or join the caller's transaction.

Events go to the buffer, and the transfer moves them to their topic's log. A batch may take the straight path instead:
the publisher becomes the topic's only writer for one short transaction, moves the buffered events, and appends the
batch to the log. The batch is written once then, instead of three times. Events of one publisher and of one key keep
their order over both paths, because an append first moves all events that were committed before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Final, Protocol, TypeAlias, runtime_checkable

from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.rows import fetch_all
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import RedefinitionError, ValidationError
from eventsql_orchestration.model import BLOCKS, Placement, Publication, Topic, check_partition
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import EncodedBlock, encode_blocks
from eventsql_orchestration.publishing.handed_out import ParamStyle, Statement, rendered
from eventsql_orchestration.publishing.log_writer import LOCK_TIMEOUT, LogWriter
from eventsql_orchestration.publishing.placements import Placements
from eventsql_orchestration.sharding import ANYWHERE, ShardSet
from eventsql_orchestration.topics.partitioner import Partitioner, default_partition, default_partitions
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import check_kind

REDEFINITIONS: Final = 5
"""Attempts to publish a batch whose topic is redefined at the same time."""

STRAIGHT_LEAST: Final = 50
"""The least events of a batch on the straight path. Smaller batches commit side by side in the buffer, which is faster
than one after the other under the topic's lock."""

STRAIGHT_MOST: Final = 20_000
STRAIGHT_BYTES: Final = 16 * 1024 * 1024
"""A larger batch would hold the topic and memory for too long."""

_smallint: Final = struct.Struct(">h").pack
_integer: Final = struct.Struct(">i").pack

_CHUNK_BYTES: Final = 256 * 1024
_CHUNK_EVENTS: Final = 500
_PART_EVENTS: Final = 5_000
"""Events of a batch that are made blocks at a time: the server stores some blocks while the next are encoded."""

Encoded: TypeAlias = tuple[str, bytes]
"""An event's topic and the rest of its row."""


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
        on_published: Callable[[], None] = lambda: None, on_appended: Callable[[str], None] = lambda _topic: None,
    ) -> None:  # fmt: skip
        """With `straight`, batches may go to the log directly.

        `on_published` is called after events went to the buffer, `on_appended` with the topic after a batch went to its
        log.
        """
        self._database = database
        self._registry = registry
        self._queries = Queries("log", database.schema)
        self._insertion = SingleStatement("publish", self._queries("publish"))
        self._partitioner: Partitioner = default_partition
        self._writer = LogWriter(database, lock_timeout=LOCK_TIMEOUT) if straight else None
        self._on_published = on_published
        self._on_appended = on_appended

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
                self._on_published()
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
        self._on_published()
        return rendered(self._queries("publish_statement").as_string(), values, paramstyle)

    def publish_all(
        self, publications: Iterable[Publication], *, connection: CallersConnection | None = None,
        placed: ShardSet | None = None,
    ) -> int:  # fmt: skip
        """Publish any number of events in order and with one commit. See `ClusterPublisher.publish_all`."""
        check_many(publications)
        if connection is None:
            if placed is not None and placed.names and isinstance(publications, list):
                # One shard's part of a batch that is in memory already.
                return self._publish_known(publications, placed)
            first, rest = read_ahead(publications)
            if rest is None:
                return self._publish_known(first, placed)
            publications = chain(first, rest)
        return self._publish_buffered(publications, connection, placed)

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
            # Before the transaction below, which has a connection: the registry may need another.
            self._registry.cached_topic(name)
        # A batch over many shards has one log, and one lock, on each of them.
        least = STRAIGHT_LEAST // max(1, len(placed.names) if placed is not None else 1)
        if self._writer is not None and len(publications) >= least and len(names) == 1:
            topic = self._definition(publications[0].topic, placed)
            if self._append(self._writer, topic, publications, placements):
                return len(publications)
        for _ in range(REDEFINITIONS):
            with suppress(RedefinitionError):
                return self._publish_buffered(publications, None, placed, placements)
        return self._publish_buffered(publications, None, placed, placements)

    def _publish_buffered(
        self, publications: Iterable[Publication], connection: CallersConnection | None, placed: ShardSet | None,
        placements: Placements | None = None,
    ) -> int:  # fmt: skip
        # One definition for the whole batch: the one that chose the partitions is checked in the end.
        topics: dict[str, Topic] = {}
        encoded = self._encoded(publications, topics, placed, placements)
        published = 0
        with (
            self._transaction(connection) as psycopg_connection,
            psycopg_connection.cursor(row_factory=tuple_row) as cursor,
        ):
            with cursor.copy(self._queries("publish_all")) as copy:
                for count, chunk in _buffer_rows(encoded):
                    copy.write(chunk)
                    published += count
            self._check(psycopg_connection, topics.values(), joined=connection is not None)
        if published:
            self._on_published()
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
        make_parts = _blocks if topic.storage == BLOCKS else _row_parts
        parts = make_parts(publications, partitions)
        with writer.session(timeout=LOCK_TIMEOUT) as mine:
            # In parts: the server stores one part while the next is encoded.
            appended = writer.append(topic, parts) if mine else None
        if appended is None:
            return False

        if placements is not None:
            placements.appended(appended)
        self._on_appended(topic.name)
        return True

    def _partitions(self, publications: list[Publication], topic: Topic) -> Iterable[int]:
        """The partitions of events, found lazily. The caller's partitioner runs before the topic is held."""
        by_key = self._partitioner is default_partition and topic.shards is None
        if by_key and all(each.partition is None for each in publications):
            parts = _parts(publications, _CHUNK_EVENTS)
            return chain.from_iterable(default_partitions(part, topic.partitions) for part in parts)
        return [self._partition(each, topic) for each in publications]

    @property
    def hashes_keys(self) -> bool:
        """See `ClusterPublisher.hashes_keys`."""
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
        self, publications: Iterable[Publication], topics: dict[str, Topic], placed: ShardSet | None,
        placements: Placements | None,
    ) -> Iterator[Encoded]:  # fmt: skip
        """The rows of publications. Adds the definitions that choose their partitions to `topics`."""
        if placements is not None:
            placements.begin()
        for publication in publications:
            name = check_publication(publication).topic
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = self._definition(name, placed)
            partition = self._partition(publication, topic)
            if placements is not None:
                placements.note(partition)
            yield name, copy_format.encode(publication, partition)

    def _insert(
        self, publication: Publication, topic: Topic, partition: int, connection: CallersConnection | None
    ) -> bool:
        """Insert an event. False, with nothing done, if its topic is no longer defined like `topic`."""
        key, metadata = publication.key, copy_format.encode_metadata(publication.metadata)
        if connection is None:
            values = {
                "topic": topic.name.encode(), "partitions": _smallint(topic.partitions),
                "layout": _integer(topic.layout), "partition": _smallint(partition),
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
        known = definitions(topics)
        if joined:
            connection.execute(self._queries("hold_topics"), known)
        if redefined := [name for (name,) in fetch_all(connection, self._queries("redefined_topics"), known)]:
            for name in redefined:
                self._registry.forget(name)
            raise _redefined(redefined)

    @contextmanager
    def _transaction(self, given: CallersConnection | None) -> Iterator[Connection]:
        with self._database.joined(given) as connection:
            if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
                with connection.transaction():
                    yield connection
            else:
                yield connection


def definitions(topics: Collection[Topic]) -> dict[str, object]:
    """The values of the statement `redefined_topics`."""
    return {
        "topics": [topic.name for topic in topics],
        "partitions": [topic.partitions for topic in topics],
        "layouts": [topic.layout for topic in topics],
    }


def check_many(publications: object) -> None:
    """Raise `ValidationError` unless `publications` is iterable and no string."""
    if isinstance(publications, str | bytes) or not isinstance(publications, Iterable):
        raise ValidationError(
            f"publish_all takes an iterable of publications, not {type(publications).__name__}: use publish for one"
        )


def check_publication(publication: object) -> Publication:
    """Return `publication`, or raise `ValidationError` for anything else."""
    if isinstance(publication, Publication):
        return publication
    raise ValidationError(
        f"publication must be a Publication(topic, value, key=…, metadata=…), not {type(publication).__name__}"
    )


def _redefined(topics: list[str]) -> RedefinitionError:
    names = ", ".join(topics)
    return RedefinitionError(f"topic {names} was redefined meanwhile, and nothing was published: publish again")


def read_ahead(publications: Iterable[Publication]) -> tuple[list[Publication], Iterator[Publication] | None]:
    """The first events, up to one more than the straight path takes, and the rest; None if there is no rest."""
    if type(publications) is list and len(publications) <= STRAIGHT_MOST:
        # The caller's list may change later.
        known = list(publications)
        if set(map(type, known)) <= {Publication} and sum(map(copy_format.size, known)) <= STRAIGHT_BYTES:
            return known, None

    first: list[Publication] = []
    size = 0
    source = iter(publications)
    for publication in source:
        first.append(check_publication(publication))
        size += copy_format.size(publication)
        if len(first) > STRAIGHT_MOST or size > STRAIGHT_BYTES:
            return first, source
    return first, None


def _parts(publications: list[Publication], events: int) -> Iterator[list[Publication]]:
    """The publications, so many at a time."""
    return (publications[start : start + events] for start in range(0, len(publications), events))


def _buffer_rows(encoded: Iterable[Encoded]) -> Iterator[tuple[int, bytes]]:
    """The events as a COPY into the buffer takes them: chunks of bytes, each with its number of events."""
    prefixes: dict[str, bytes] = {}
    parts, size, count = [copy_format.HEADER], 0, 0
    for topic, event in encoded:
        prefix = prefixes.get(topic)
        if prefix is None:
            prefix = prefixes[topic] = copy_format.buffer_prefix(topic)
        parts += (prefix, event)
        size += len(event)
        count += 1
        if size > _CHUNK_BYTES:
            yield count, b"".join(parts)
            parts, size, count = [], 0, 0
    parts.append(copy_format.TRAILER)
    yield count, b"".join(parts)


def _row_parts(publications: list[Publication], partitions: Iterable[int]) -> Iterator[list[bytes]]:
    rows = map(copy_format.encode, publications, partitions)
    return iter(lambda: list(islice(rows, _CHUNK_EVENTS)), [])


def _blocks(publications: list[Publication], partitions: Iterable[int]) -> Iterator[list[EncodedBlock]]:
    """The blocks of events. The first part is encoded here, before the topic is held."""
    left = iter(partitions)

    def encoded() -> Iterator[list[EncodedBlock]]:
        for part in _parts(publications, _PART_EVENTS):
            yield list(encode_blocks(part, list(islice(left, len(part)))))

    parts = encoded()
    return chain([next(parts)], parts)
