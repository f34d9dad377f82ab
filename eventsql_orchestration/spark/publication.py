"""Publishing staged blocks of events: one transaction for each batch of a writer, and that once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
    TopicNotFoundError,
)
from eventsql_orchestration.log import encoding
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt, unpack

logger = logging.getLogger(__name__)

ORPHANED_AFTER_HOURS: Final = 24
"""How long a staged event is kept for a publication that may still come."""


@dataclass(frozen=True, slots=True)
class ClaimHold:
    """A claim as it was when a write was planned: what a later owner makes of it is not ours to commit."""

    id: int
    epoch: int


class Publications:
    """Publishes what was staged. One object for one commit; close it, or use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self._platform = EventSQL(source.dsn, schema=source.schema, migrate=False, transfer=False)
        self._queries = Queries("spark", source.schema)
        self._log = Queries("log", source.schema)

    def __enter__(self) -> Publications:
        return self

    def __exit__(self, *_: object) -> None:
        self._platform.close()

    def partitions(self, topic: str | None) -> dict[str, int]:
        """The number of partitions of one topic, or of every one. Raises `TopicNotFoundError`."""
        registry = self._platform.registry
        try:
            topics = registry.topics() if topic is None else [registry.topic(topic)]
        except TopicNotFoundError as error:
            raise TopicNotFoundError(f"option topic: {error}") from None
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
        """Hand the blocks on to the buffer; what reads them is another connection, while this one writes."""
        with (
            self._platform.database.connection() as reading,
            closing(self._blocks(reading, attempts)) as blocks,
            connection.cursor().copy(self._log("publish_all")) as copy,
        ):
            copy.write(encoding.HEADER)
            for rows in blocks:
                copy.write(rows)
            copy.write(encoding.TRAILER)

    def _blocks(self, reading: Connection, attempts: Sequence[Attempt]) -> Generator[bytes, None, None]:
        keys = [(attempt, position) for attempt in attempts for position in self._positions(reading, attempt)]

        def fetch(attempt: Attempt, position: int) -> bytes:
            row = reading.execute(
                self._queries("staged_block"), {"attempt": attempt.id, "position": position}, binary=True
            ).fetchone()
            if row is None:
                raise _swept(attempt)
            return unpack(row[0])

        # One block ahead: the server encodes no row while it waits for the next block.
        with ThreadPoolExecutor(1) as reader:
            ahead = [reader.submit(fetch, *key) for key in keys[:1]]
            for key in keys[1:]:
                block = ahead.pop().result()
                ahead.append(reader.submit(fetch, *key))
                yield block
            for last in ahead:
                yield last.result()

    def _positions(self, reading: Connection, attempt: Attempt) -> list[int]:
        """Where the attempt's blocks begin. Raises `DatabaseError` unless they are all there."""
        staged = reading.execute(self._queries("staged_blocks"), {"attempt": attempt.id}).fetchall()
        ends = [position + events for position, events in staged]
        if [position for position, _ in staged] != [0, *ends[:-1]][: len(staged)] or (
            (ends[-1] if ends else 0) != sum(attempt.events.values())
        ):
            raise _swept(attempt)
        return [position for position, _ in staged]

    def _check_topics(self, connection: Connection, attempts: Sequence[Attempt]) -> None:
        """Raises unless the topics are those that the events were staged for; the COPY before keeps them so."""
        known = {(topic, count) for attempt in attempts for topic, count in attempt.partitions.items()}
        parameters = {"topics": [topic for topic, _ in known], "partitions": [count for _, count in known]}
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
        """Give up what these attempts staged."""
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
        f"attempt that ends more than {ORPHANED_AFTER_HOURS} hours before its query are given up; write again in "
        "smaller batches"
    )
