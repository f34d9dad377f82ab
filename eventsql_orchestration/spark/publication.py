"""Publishing staged events: one transaction for each batch of a writer, and that once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import psycopg

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import ClaimLostError, DatabaseError, EventSQLError, TopicNotFoundError
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt

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

    def publish(self, writer: str, batch: int, attempts: Sequence[Attempt], claim: ClaimHold | None = None) -> bool:
        """Publish the events of `attempts`, in that order, unless `writer` has published `batch` before.

        With `claim`, its range is committed in the same transaction. False when there was nothing left to do. Raises
        `ClaimLostError`, `TopicNotFoundError` or `DatabaseError`; then nothing was published.
        """
        with self._platform.database.transaction() as connection:
            events = sum((Counter(attempt.events) for attempt in attempts), Counter[str]())
            # Waits for another transaction that publishes the same, and then knows what became of it.
            first = connection.execute(
                self._queries("record_publication"), {"writer": writer, "batch": batch, "events": events.total()}
            ).rowcount
            if first:
                self._check_topics(connection, events)
                for attempt in attempts:
                    self._publish(connection, attempt)
            if claim is not None:
                self._commit(connection, claim, f"batch {batch} of writer {writer!r}", first=bool(first))
            self._delete(connection, attempts)
        self._sweep()
        return bool(first)

    def _check_topics(self, connection: Connection, topics: Mapping[str, int]) -> None:
        known = {name for (name,) in connection.execute(self._queries("known_topics"), {"topics": list(topics)})}
        for topic in topics:
            if topic not in known:
                raise TopicNotFoundError(f"topic {topic!r} was deleted while events for it were written")

    def _publish(self, connection: Connection, attempt: Attempt) -> None:
        published = connection.execute(self._queries("publish_attempt"), {"attempt": attempt.id}).rowcount
        staged = sum(attempt.events.values())
        if published != staged:
            raise DatabaseError(
                f"attempt {attempt.id} staged {staged} events and {published} are there: those of an attempt that ends "
                f"more than {ORPHANED_AFTER_HOURS} hours before its query are given up; write again in smaller batches"
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
