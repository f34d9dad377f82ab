"""Publishing: events are committed before the call returns, or join the caller's transaction.

Events are written to the buffer, from which the transfer moves them to their topic's log. A batch may take the
straight path instead: the publisher becomes the topic's one writer for a short transaction of its own, moves what lies
in the buffer, and appends the batch to the log, so that it is written once and not three times. Events of one
publisher, and of one key, keep their order over both paths, because whoever appends moves first what was committed
before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Final, TypeAlias

import sqlalchemy
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.json import Json

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import RedefinitionError, ValidationError
from eventsql_orchestration.log import encoding
from eventsql_orchestration.log.partitioner import Partitioner, default_partition
from eventsql_orchestration.log.registry import Registry
from eventsql_orchestration.log.writer import LOCK_TIMEOUT, LogWriter
from eventsql_orchestration.model import Publication, Topic, check_partition
from eventsql_orchestration.rules import check_kind
from eventsql_orchestration.sharding import ANYWHERE, ShardSet

REDEFINITIONS: Final = 5
"""How often a batch is published anew because its topic was redefined just then."""

STRAIGHT_LEAST: Final = 50
"""Events of a batch that takes the straight path. Smaller ones commit side by side in the buffer, faster together than
one after the other under the topic's lock."""

STRAIGHT_MOST: Final = 20_000
STRAIGHT_BYTES: Final = 16 * 1024 * 1024
"""A larger batch would hold the topic, and memory, for too long."""

_CHUNK_BYTES: Final = 256 * 1024
_CHUNK_EVENTS: Final = 500

Encoded: TypeAlias = tuple[str, bytes]
"""An event's topic and the rest of its row."""


@checked
class Publisher:
    """Publishes events. One instance serves any number of threads."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        *,
        straight: bool = True,
        on_published: Callable[[], None] | None = None,
        on_appended: Callable[[str], None] | None = None,
    ) -> None:
        """With `straight`, batches may be appended to the log directly.

        `on_published` is called after events went to the buffer, `on_appended` with a topic after some went to its log.
        """
        self._database = database
        self._registry = registry
        self._queries = Queries("log", database.schema)
        self._partitioner: Partitioner = default_partition
        self._writer = LogWriter(database, lock_timeout=LOCK_TIMEOUT) if straight else None
        self._on_published = on_published or (lambda: None)
        self._on_appended = on_appended or (lambda _topic: None)

    def close(self) -> None:
        """Close the connection of the straight path; the next batch opens another."""
        if self._writer is not None:
            self._writer.close()

    def configure_partitioner(self, partitioner: Partitioner) -> None:
        """Choose partitions by `partitioner(publication, partitions)` instead of by the hash of the key.

        It may be asked again about events that turn out to go through the buffer.
        """
        self._partitioner = partitioner

    @checks_itself
    def publish(
        self,
        publication: Publication,
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
        placed: ShardSet | None = None,
    ) -> None:
        """Publish one event; it is committed when this returns.

        With `connection`, of psycopg or SQLAlchemy and on the same database, the event is part of the caller's
        transaction instead, and is published when that commits (an outbox). One of psycopg in autocommit mode has a
        transaction inside `with connection.transaction():`; outside, the event is committed at once, and a batch of
        `publish_all` in a transaction of its own. Raises `ValidationError` for a connection to another database, for
        one of SQLAlchemy in AUTOCOMMIT, which cannot roll back, and for what is no such connection; nothing was written
        then.

        Raises `TopicNotFoundError`, `PartitionOutOfRangeError`, `DatabaseFullError`, and `RedefinitionError` when the
        topic does not stop being redefined; in each case nothing was published. `DatabaseUnavailableError` where the
        connection was lost: in the commit, whether the event is published is not known then. A caller's transaction
        that is not `READ COMMITTED` fails with `DatabaseBusyError` where the topic has changed since it began.

        Where the database is a shard, an event whose key belongs to another one raises `WrongShardError`. `placed` is
        the set by which a caller has chosen this shard for it already.
        """
        check_publication(publication)
        check_kind("placed", placed, ShardSet | None)
        topic = self._definition(publication.topic, placed)
        partition = self._partition(publication, topic)
        statement = "publish" if connection is None else "publish_joined"
        with self._connection(connection) as driver:
            if not self._insert(driver, statement, publication, partition, topic):
                self._registry.forget(topic.name)
                topic = self._definition(publication.topic, placed)
                if not self._insert(driver, statement, publication, self._partition(publication, topic), topic):
                    raise _redefined([topic.name])
        self._on_published()

    def publish_all(
        self,
        publications: Iterable[Publication],
        *,
        connection: Connection | sqlalchemy.Connection | None = None,
        placed: ShardSet | None = None,
    ) -> int:
        """Publish any number of events, of any topics, in order and in one commit; gives their number.

        `publications` may be longer than memory: beyond the first 16 MiB it is read as it is written. When it raises,
        or one of them cannot be published, none is; a transaction of the caller's must be rolled back then. Raises
        `RedefinitionError` when a topic was redefined while they were read, or in the caller's transaction: publish
        again. Otherwise as `publish`.
        """
        check_many(publications)
        if connection is None:
            if placed is not None and placed.names and isinstance(publications, list):
                # The part of a batch in memory whose size is known to be small enough.
                return self._publish_known(publications, placed)
            first, rest = _begin(publications)
            if rest is None:
                return self._publish_known(first, placed)
            publications = chain(first, rest)
        return self._publish_buffered(publications, connection, placed)

    def _publish_known(self, publications: list[Publication], placed: ShardSet | None) -> int:
        """Events that can be read more than once: where their topic is redefined meanwhile, by its new definition."""
        names = {publication.topic for publication in publications}
        for name in names:
            # Not in the transaction below: it has a connection, and this may need another.
            self._registry.cached_topic(name)
        # A part of a batch of many shards has as many topics, each with a lock of its own, to go to.
        least = STRAIGHT_LEAST // max(1, len(placed.names) if placed is not None else 1)
        if self._writer is not None and len(publications) >= least and len(names) == 1:
            topic = self._definition(publications[0].topic, placed)
            if self._append(self._writer, topic, publications):
                return len(publications)
        for _ in range(REDEFINITIONS):
            with suppress(RedefinitionError):
                return self._publish_buffered(publications, None, placed)
        return self._publish_buffered(publications, None, placed)

    def _publish_buffered(
        self,
        publications: Iterable[Publication],
        connection: Connection | sqlalchemy.Connection | None,
        placed: ShardSet | None,
    ) -> int:
        # One definition for the whole batch: what is checked in the end is what its partitions were chosen by.
        topics: dict[str, Topic] = {}
        encoded = self._encoded(publications, topics, placed)
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

    def _append(self, writer: LogWriter, topic: Topic, publications: list[Publication]) -> bool:
        """Take the straight path; False, and nothing done, when the events must go to the buffer."""
        if not writer.may_append(topic.name):
            return False
        rows = self._rows(publications, topic)
        with writer.session(timeout=LOCK_TIMEOUT) as mine:
            appended = mine and writer.append(topic, _chunks(rows))
        if appended:
            self._on_appended(topic.name)
        return appended

    def _rows(self, publications: list[Publication], topic: Topic) -> Iterator[bytes]:
        """The rows of events, encoded when they are asked for; no code of the caller's runs then: the topic is held."""
        partitions: Iterable[int]
        by_key = self._partitioner is default_partition and topic.shards is None
        if by_key and all(each.partition is None for each in publications):
            partitions = (default_partition(each, topic.partitions) for each in publications)
        else:
            partitions = [self._partition(each, topic) for each in publications]
        return map(encoding.encode, publications, partitions)

    @property
    def hashes_keys(self) -> bool:
        """Whether an event with a key has its partition by `default_partition`, unless it names one."""
        return self._partitioner is default_partition

    @checks_itself
    def partition_of(self, publication: Publication, topic: Topic | None = None) -> int:
        """The partition that a publication goes to; `topic` is its topic where the caller has looked it up.

        Raises `TopicNotFoundError`, and `PartitionOutOfRangeError` when its topic has no such partition.
        """
        check_publication(publication)
        check_kind("topic", topic, Topic | None)
        return self._partition(publication, topic or self._registry.cached_topic(publication.topic))

    def _definition(self, name: str, placed: ShardSet | None) -> Topic:
        """A topic, without its shards where a caller has placed its events by the same set, or means this very one."""
        topic = self._registry.cached_topic(name)
        if topic.shards is not None and (placed is ANYWHERE or topic.shards.same_places(placed)):
            return replace(topic, shards=None)
        return topic

    def _partition(self, publication: Publication, topic: Topic) -> int:
        if topic.shards is not None:
            # What is checked in the transaction with the topic's layout, which changes when a shard is added.
            topic.shards.check(publication.key)
        partition = publication.partition
        if partition is None:
            partition = self._partitioner(publication, topic.partitions)
            if self._partitioner is default_partition:
                return partition
        return check_partition(topic.name, partition, topic.partitions)

    def _encoded(
        self, publications: Iterable[Publication], topics: dict[str, Topic], placed: ShardSet | None
    ) -> Iterator[Encoded]:
        """The rows of publications; the definitions that their partitions are chosen by are added to `topics`."""
        for publication in publications:
            name = check_publication(publication).topic
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = self._definition(name, placed)
            yield name, encoding.encode(publication, self._partition(publication, topic))

    def _insert(
        self, connection: Connection, statement: str, publication: Publication, partition: int, topic: Topic
    ) -> bool:
        """Insert an event; False, and nothing done, when its topic is not defined like `topic` any more."""
        inserted = connection.execute(
            self._queries(statement),
            {
                "topic": topic.name,
                "partition": partition,
                "key": publication.key,
                "value": publication.value,
                "metadata": Json(publication.metadata),
                "partitions": topic.partitions,
                "layout": topic.layout,
            },
        )
        return inserted.rowcount == 1

    def _check(self, connection: Connection, topics: Collection[Topic], *, joined: bool) -> None:
        """Raise `RedefinitionError` unless these are the topics' definitions, which the open COPY keeps as they are."""
        known = definitions(topics)
        if joined:
            connection.execute(self._queries("hold_topics"), known)
        cursor = connection.cursor(row_factory=tuple_row).execute(self._queries("redefined_topics"), known)
        if redefined := [name for (name,) in cursor]:
            for name in redefined:
                self._registry.forget(name)
            raise _redefined(redefined)

    def _connection(self, given: Connection | sqlalchemy.Connection | None) -> AbstractContextManager[Connection]:
        return self._database.joined(given)

    @contextmanager
    def _transaction(self, given: Connection | sqlalchemy.Connection | None) -> Iterator[Connection]:
        with self._connection(given) as connection:
            if connection.autocommit and connection.info.transaction_status is TransactionStatus.IDLE:
                with connection.transaction():
                    yield connection
            else:
                yield connection


def definitions(topics: Collection[Topic]) -> dict[str, object]:
    """The topics as a publisher knows them, for the statement `redefined_topics`."""
    return {
        "topics": [topic.name for topic in topics],
        "partitions": [topic.partitions for topic in topics],
        "layouts": [topic.layout for topic in topics],
    }


def check_many(publications: object) -> None:
    """Raise `ValidationError` for what is not any number of publications, as a single one is not."""
    if isinstance(publications, str | bytes) or not isinstance(publications, Iterable):
        raise ValidationError(
            f"publish_all takes a list of publications, or anything else that gives them one by one, not "
            f"{type(publications).__name__}: a single one goes to publish"
        )


def check_publication(publication: object) -> Publication:
    """Return `publication`, or raise `ValidationError` for anything else."""
    if isinstance(publication, Publication):
        return publication
    raise ValidationError(
        f"publication: a Publication is needed, not {type(publication).__name__}: "
        "Publication(topic, value, key=…, metadata=…)"
    )


def _redefined(topics: list[str]) -> RedefinitionError:
    return RedefinitionError(f"topic {', '.join(topics)} was redefined meanwhile: nothing was published, publish again")


def _begin(publications: Iterable[Publication]) -> tuple[list[Publication], Iterator[Publication] | None]:
    """As many of the first events as the straight path takes and one more, and the others, if there may be any."""
    first: list[Publication] = []
    size = 0
    source = iter(publications)
    for publication in source:
        first.append(check_publication(publication))
        size += encoding.size(publication)
        if len(first) > STRAIGHT_MOST or size > STRAIGHT_BYTES:
            return first, source
    return first, None


def _chunks(rows: Iterator[bytes]) -> Iterator[list[bytes]]:
    """The rows in parts: while the server stores one, the next is encoded."""
    while chunk := list(islice(rows, _CHUNK_EVENTS)):
        yield chunk


def _buffer_rows(encoded: Iterable[Encoded]) -> Iterator[tuple[int, bytes]]:
    """The same events as a COPY into the buffer takes them, in chunks of some size with their number."""
    prefixes: dict[str, bytes] = {}
    parts, size, count = [encoding.HEADER], 0, 0
    for topic, event in encoded:
        prefix = prefixes.get(topic)
        if prefix is None:
            prefix = prefixes[topic] = encoding.buffer_prefix(topic)
        parts += (prefix, event)
        size += len(event)
        count += 1
        if size > _CHUNK_BYTES:
            yield count, b"".join(parts)
            parts, size, count = [], 0, 0
    parts.append(encoding.TRAILER)
    yield count, b"".join(parts)
