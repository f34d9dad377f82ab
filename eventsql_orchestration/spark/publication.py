"""Publishing staged blocks of events: one transaction for each batch of a writer, and that once."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConfigurationError,
    DatabaseError,
    EventSQLError,
    RedefinitionError,
    ShardError,
    TopicNotFoundError,
)
from eventsql_orchestration.log import encoding
from eventsql_orchestration.log.blocks import REFERENCE, unpack
from eventsql_orchestration.model import Topic
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt

logger = logging.getLogger(__name__)

ORPHANED_AFTER_HOURS: Final = 24
"""How long a staged event is kept for a publication that may still come."""

LEAST_BY_BLOCKS: Final = 10_000
"""Events that a publication must have to be published as the blocks that were staged. The events of a smaller one go to
the buffer, where any transfer moves them, many publications' at a time; each block takes a transaction of its own."""

MOST_COPIED: Final = 16 * 1024 * 1024
"""Bytes of the blocks of such a publication at most, which are held in memory."""


@dataclass(frozen=True, slots=True)
class ClaimHold:
    """A claim as it was when a write was planned: what a later owner makes of it is not ours to commit."""

    id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """Where a staged block is, how many events of which topic it holds, and in how many bytes."""

    attempt: uuid.UUID
    position: int
    topic: str
    events: int
    size: int


class Publications:
    """Publishes what was staged. One object for one commit; close it, or use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self._platform = EventSQL(source.dsn, schema=source.schema, migrate=False, transfer=False)
        self._queries = Queries("spark", source.schema)
        self._log = Queries("log", source.schema)
        self._blocks = Queries("blocks", source.schema)

    def __enter__(self) -> Publications:
        return self

    def __exit__(self, *_: object) -> None:
        self._platform.close()

    def partitions(self, topic: str | None) -> dict[str, int]:
        """The number of partitions of one topic, or of every one. Raises `TopicNotFoundError`, `ShardError`."""
        registry = self._platform.registry
        try:
            topics = registry.topics() if topic is None else [registry.topic(topic)]
        except TopicNotFoundError as error:
            raise TopicNotFoundError(f"option topic: {error}") from None
        _refuse_shards(topics)
        return {topic.name: topic.partitions for topic in topics}

    def hold(self, claim_id: int) -> ClaimHold:
        """A claim as it is now, for a commit to come. Raises `ClaimLostError` for an unknown id."""
        claim, _ = self._platform.claims.get(claim_id)
        return ClaimHold(claim.id, claim.epoch)

    def publish(
        self,
        writer: str,
        batch: int,
        attempts: Sequence[Attempt],
        claim: ClaimHold | None = None,
        *,
        replayed: bool = False,
    ) -> bool:
        """Publish the events of `attempts`, in that order, unless `writer` has published `batch` before.

        With `claim`, its range is committed in the same transaction. False when there was nothing left to do. With
        `replayed`, a batch that was published before must be the same again: `ConfigurationError` when it has another
        number of events, which would be lost. Raises `ClaimLostError`, `TopicNotFoundError`, `RedefinitionError` or
        `DatabaseError`; then nothing was published.
        """
        with self._platform.database.transaction() as connection:
            events = sum((Counter(attempt.events) for attempt in attempts), Counter[str]())
            # Waits for another transaction that publishes the same, and then knows what became of it.
            first = connection.execute(
                self._queries("record_publication"), {"writer": writer, "batch": batch, "events": events.total()}
            ).rowcount
            if replayed and not first:
                self._check_replay(connection, writer, batch, events.total())
            if first and events:
                self._publish(connection, attempts)
                self._check_topics(connection, attempts)
            if claim is not None:
                self._commit(connection, claim, f"batch {batch} of writer {writer!r}", first=bool(first))
            # Those of the publication are published, or were copied into the buffer.
            self._delete(connection, attempts)
        self._sweep()
        return bool(first)

    def _check_replay(self, connection: Connection, writer: str, batch: int, events: int) -> None:
        row = connection.execute(self._queries("published"), {"writer": writer, "batch": batch}).fetchone()
        assert row is not None, "the record is there: it was in the way of another"
        if row[0] != events:
            raise ConfigurationError(
                f"batch {batch} of writer {writer!r} was published before with {row[0]} events, and has {events} now: "
                "this checkpoint is not the one that it was published with; give writerId a new value, and begin "
                "where the deleted checkpoint ended"
            )

    def _publish(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        staged = self._staged(connection, attempts)
        events, size = sum(block.events for block in staged), sum(block.size for block in staged)
        if events < LEAST_BY_BLOCKS and size < MOST_COPIED:
            self._copy(connection, staged, attempts)
            return
        placed = connection.execute(
            self._blocks("place"), {"attempts": [attempt.id for attempt in attempts], "reference": REFERENCE}
        ).rowcount
        if placed != len(staged):
            raise _swept(attempts[0])

    def _staged(self, connection: Connection, attempts: Sequence[Attempt]) -> list[_Staged]:
        """The blocks of all attempts, in their order. Raises `DatabaseError` unless they are all there."""
        rows = connection.execute(self._queries("staged_blocks"), {"attempts": [attempt.id for attempt in attempts]})
        blocks: dict[uuid.UUID, list[_Staged]] = {}
        for row in rows:
            block = _Staged(*row)
            blocks.setdefault(block.attempt, []).append(block)
        for attempt in attempts:
            events: Counter[str] = Counter()
            for block in blocks.get(attempt.id, ()):
                if block.position != events.total():
                    raise _swept(attempt)
                events[block.topic] += block.events
            if events != Counter(attempt.events):
                raise _swept(attempt)
        return [block for attempt in attempts for block in blocks.get(attempt.id, ())]

    def _copy(self, connection: Connection, staged: Sequence[_Staged], attempts: Sequence[Attempt]) -> None:
        """Write the events of blocks to the buffer."""
        rows = connection.execute(
            self._queries("staged_content"), {"attempts": [attempt.id for attempt in attempts]}, binary=True
        )
        contents = {(attempt, position): packed for attempt, position, packed in rows}
        if len(contents) != len(staged):
            raise _swept(attempts[0])
        packed = [(block.topic, contents[block.attempt, block.position]) for block in staged]
        with connection.cursor().copy(self._log("publish_all")) as copy:
            copy.write(encoding.HEADER)
            for topic, block in packed:
                copy.write(unpack(block, encoding.buffer_prefix(topic)))
            copy.write(encoding.TRAILER)

    def _check_topics(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        """Raises unless the topics are those that the events were staged for; the COPY before keeps them so."""
        known = {(topic, count) for attempt in attempts for topic, count in attempt.partitions.items()}
        # What is staged was placed by the number of partitions alone.
        topics, counts = [topic for topic, _ in known], [count for _, count in known]
        # The COPY before keeps it from becoming one.
        _refuse_shards([topic for topic in self._platform.registry.topics() if topic.name in topics])
        parameters = {"topics": topics, "partitions": counts, "layouts": [None] * len(known)}
        redefined = {name for (name,) in connection.execute(self._log("redefined_topics"), parameters)}
        there = {name for (name,) in connection.execute(self._queries("known_topics"), {"topics": sorted(redefined)})}
        for topic in sorted(redefined):
            if topic not in there:
                raise TopicNotFoundError(f"topic {topic!r} was deleted while events for it were written")
            raise RedefinitionError(
                f"topic {topic!r} was redefined while events for it were written: nothing was published, write again"
            )

    def _commit(self, connection: Connection, hold: ClaimHold, what: str, *, first: bool) -> None:
        claim, state = self._platform.claims.get(hold.id)
        if first:
            # The offset must be where the claim begins: a consumer that knows nothing of leases may have moved it.
            self._platform.claims.commit(connection, replace(claim, epoch=hold.epoch))
        elif state != "committed":
            raise ClaimLostError(f"{what} was published before, but not with {claim}: give writerId a new value")

    def discard(self, attempts: Sequence[Attempt]) -> None:
        """Give up what these attempts staged, as far as it is not published."""
        with self._platform.database.connection() as connection:
            self._delete(connection, attempts)

    def _delete(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        connection.execute(self._queries("delete_attempts"), {"attempts": [attempt.id for attempt in attempts]})

    def _sweep(self) -> None:
        try:
            with self._platform.database.connection() as connection:
                connection.execute(self._queries("delete_orphans"), {"hours": ORPHANED_AFTER_HOURS})
        except (EventSQLError, psycopg.Error) as error:
            # The events are published, and Spark must not hear otherwise; the next publication sweeps again.
            logger.warning("staged events of dead attempts are left for the next publication: %s", error)


def _swept(attempt: Attempt) -> DatabaseError:
    return DatabaseError(
        f"attempt {attempt.id} staged {sum(attempt.events.values())} events, and they are not all there: those of an "
        f"attempt that ends more than {ORPHANED_AFTER_HOURS} hours before its query are given up, and a crash of the "
        "server loses those of the last moment; write again, in smaller batches where the query took so long"
    )


def _refuse_shards(topics: Sequence[Topic]) -> None:
    """Raises `ShardError` where the database is one of several shards: a key's shard is not chosen here."""
    for topic in topics:
        if topic.shards is not None:
            raise ShardError(
                f"option url: the database is shard {topic.shards.own!r} of {len(topic.shards.names)}, and a write by "
                "Spark goes to one database whatever its keys: publish through a platform on all shards instead"
            )
