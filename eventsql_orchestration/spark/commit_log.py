"""The commit log of writes: the record of a batch, its events and its claim, in a transaction in one database."""

from __future__ import annotations

import logging
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.errors import ClaimLostError, ConfigurationError, RedefinitionError, TopicNotFoundError
from eventsql_orchestration.publishing.staged_blocks import StagedBlock, StagedBlocks, missing_blocks
from eventsql_orchestration.publishing.two_phase_participant import PublicationPart, TwoPhaseParticipant
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.spark.staging import QUERY_IS_WRITER, Attempt, ClaimHold, Share, StreamBatch

logger = logging.getLogger(__name__)

KEPT_BATCHES: Final = 100
"""The newest records of a writer are kept however old they are: a stream repeats its last batch."""

KEPT_SECONDS: Final = 30 * 86_400.0
"""How long other records are kept. Dagster's housekeeping keeps its records as long."""

PRUNED: Final = 1_000
"""The records that a publication looks at when it prunes: more than it writes."""


@dataclass(frozen=True, slots=True)
class OneBatchWriters:
    """Generated writers of one batch each, which is never repeated. Their records are deleted after `seconds`.

    `names` is a pattern of their names, `any_name` makes a random one.
    """

    names: str
    seconds: float
    any_name: Callable[[], str]

    def has(self, writer: str) -> bool:
        return re.fullmatch(self.names, writer) is not None


def unnamed() -> str:
    """A new writer, for a write without a `writerId`."""
    return f"unnamed-{uuid.uuid4()}"


UNNAMED: Final = OneBatchWriters("^unnamed-[0-9a-f-]{36}$", 86_400.0, unnamed)
"""Over shards, the record identifies the publication until none of its parts is open."""

OF_CLAIM: Final = OneBatchWriters(
    "^claim-[0-9]+$",
    KEPT_SECONDS,
    lambda: f"claim-{random.randrange(10**9)}",  # noqa: S311 - spreads work, guards nothing
)
"""A claim is committed once, with a record or without."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of a writer: the attempts that staged it, in order, the claim to commit, and the stream it belongs to."""

    writer: str
    number: int
    attempts: tuple[Attempt, ...]
    claim: ClaimHold | None = None
    stream: StreamBatch | None = None

    @property
    def events(self) -> int:
        return sum(attempt.events for attempt in self.attempts)

    @property
    def topics(self) -> list[str]:
        return sorted({topic for attempt in self.attempts for share in attempt.shares for topic in share.events})

    def __str__(self) -> str:
        return f"batch {self.number} of writer {self.writer!r}"


class _Record(NamedTuple):
    """What is recorded of a published batch. A record from before revision 0072 has no topics."""

    events: int
    topics: list[str]
    query: str | None
    checksum: int | None


@dataclass(frozen=True, slots=True)
class Portion:
    """The shares of attempts on one shard."""

    shares: tuple[tuple[uuid.UUID, Share], ...] = ()

    @property
    def attempts(self) -> list[uuid.UUID]:
        return [attempt for attempt, _ in self.shares]

    @property
    def events(self) -> int:
        return sum(sum(share.events.values()) for _, share in self.shares)


def portions_of(attempts: Iterable[Attempt]) -> dict[str | None, Portion]:
    """The portion of attempts on each shard that has events of them."""
    portions: dict[str | None, list[tuple[uuid.UUID, Share]]] = {}
    for attempt in attempts:
        for share in attempt.shares:
            portions.setdefault(share.shard, []).append((attempt.id, share))
    return {shard: Portion(tuple(shares)) for shard, shares in portions.items()}


class CommitLog:
    """Publishes in one database."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.parts = TwoPhaseParticipant(shard.database)
        self._blocks = StagedBlocks(shard.database.schema)
        self._queries = Queries("spark", shard.database.schema)
        self._log = Queries("log", shard.database.schema)

    # The record

    def record(self, connection: Connection, batch: Batch, publication: uuid.UUID) -> bool:
        """Record the batch as published by this publication. False if the batch has a record.

        Waits for another transaction that records the same batch. Raises `ConfigurationError` for a batch whose record
        may have been deleted.
        """
        stream = batch.stream or StreamBatch()
        values = {
            "writer": batch.writer, "batch": batch.number, "events": batch.events, "topics": batch.topics,
            "id": publication, "query": stream.query, "checksum": stream.checksum,
        }  # fmt: skip
        if connection.execute(self._queries("record_publication"), values).rowcount != 1:
            return False

        if fetch_first(connection, self._queries("is_forgotten"), values) == (True,):
            raise ConfigurationError(
                f"{batch} is not published, because it may have been published more than "
                f"{KEPT_SECONDS / 86_400:.0f} days ago: records are deleted then. If not, use another writerId"
            )
        return True

    def recorded(self, batch: Batch) -> bool:
        """Whether the batch was published."""
        with self.shard.database.connection() as connection:
            return self._record(connection, batch) is not None

    def _record(self, connection: Connection, batch: Batch) -> _Record | None:
        values = {"writer": batch.writer, "batch": batch.number}
        row = fetch_first(connection, self._queries("published"), values)
        return None if row is None else _Record(*row)

    def check_repeated(self, connection: Connection, batch: Batch) -> None:
        """Check that a batch is the same as the batch that was published under its number before.

        A batch outside of streams with another number of events is only warned of: a run that is repeated may find
        more rows. Raises `ConfigurationError` if a stream's batch is another batch, or if none of the topics is the
        same, and `ClaimLostError` if the claim was not committed.
        """
        recorded = self._record(connection, batch)
        # Nobody else writes batches of a query that is the writer: if the topic is another one, it was changed.
        if recorded is not None and batch.stream != QUERY_IS_WRITER:
            _check_topics(batch, recorded)
        if batch.stream is not None:
            self._check_stream(connection, batch, batch.stream, recorded)
        elif recorded is not None and recorded.events != batch.events:
            logger.warning(
                "%s was published before with %d events, so these %d events are not published: give each batch a "
                "batchId of its own",
                batch, recorded.events, batch.events,
            )  # fmt: skip
        if batch.claim is not None:
            claim, state = self.shard.claims.get(batch.claim.id)
            if state != "committed":
                raise ClaimLostError(f"{batch} was published before, but not with {claim}: give writerId a new value")

    def _check_stream(
        self, connection: Connection, batch: Batch, stream: StreamBatch, recorded: _Record | None
    ) -> None:
        events, _, query, checksum = recorded or (None, [], None, None)
        # Without a query and a checksum, the writer is the query.
        same_query = query == stream.query and (query is not None or stream.checksum is None)
        same_rows = None in (checksum, stream.checksum) or checksum == stream.checksum
        if same_query and (checksum is None or checksum != stream.checksum):
            # A query repeats only its last batch. A checkpoint that was set back plans other batches, which may have as
            # many events.
            self._check_last(connection, batch, stream)
        if events == batch.events and (same_query or same_rows):
            return
        if same_query:
            raise ConfigurationError(
                f"{batch} was published before with {events} events, and has {batch.events} now. Give the query a new "
                "checkpoint, and a new writerId if it has one. If this checkpoint was set back, begin after the "
                "published events. If the query gives other rows when it is repeated, begin where the batch ends: its "
                "file in the checkpoint's directory offsets says where"
            )
        if events != batch.events:
            difference = f"with {events} events, and has {batch.events} now"
        elif None in (query, stream.query):
            raise ConfigurationError(
                f"{batch} was published before with other rows, or with its rows in another order, and Spark does not "
                "name its streaming query. If the checkpoint was deleted, give writerId a new value, and begin where "
                "the deleted checkpoint ended. If not, the batch is published: skip it in the function of foreachBatch"
            )
        else:
            difference = "by another streaming query, and has other events now"
        raise ConfigurationError(
            f"{batch} was published before {difference}, with another checkpoint: give writerId a new value, and begin "
            "where the deleted checkpoint ended"
        )

    def _check_last(self, connection: Connection, batch: Batch, stream: StreamBatch) -> None:
        values = {"writer": batch.writer, "batch": batch.number, "query": stream.query}
        if fetch_first(connection, self._queries("has_later_batch"), values) == (True,):
            raise ConfigurationError(
                f"{batch} was published before, and so were later batches: this checkpoint was set back, or another "
                "process runs the query. If it was set back, give the query a new checkpoint, and a new writerId if it "
                "has one, and begin after the published events"
            )

    # The events

    def find(self, connection: Connection, portion: Portion) -> list[StagedBlock]:
        """The blocks of a portion. Raises `DatabaseError` if one is missing."""
        found = self._blocks.find(connection, portion.attempts)
        blocks: dict[uuid.UUID, list[StagedBlock]] = {}
        for block in found:
            blocks.setdefault(block.attempt, []).append(block)

        for attempt, share in portion.shares:
            events: Counter[str] = Counter()
            for block in blocks.get(attempt, ()):
                events[block.topic] += block.events
            if events != Counter(share.events):
                raise missing_blocks(attempt, sum(share.events.values()))
        return found

    def prepare(self, part: PublicationPart, portion: Portion) -> None:
        """Keep the blocks of a portion, on disk, for an announced publication. Raises as `find`."""
        with self.shard.database.transaction() as connection:
            self.parts.limit_transaction(connection)
            self.parts.lock_blocks(connection, portion.attempts)
            self.find(connection, portion)
            self.parts.prepare(connection, part, portion.attempts, portion.events)

    def publish(self, connection: Connection, portion: Portion) -> None:
        """Publish the events of a portion. Raises as `find` and `check_topics`."""
        self._blocks.publish(connection, portion.attempts, self.find(connection, portion))
        self.check_topics(connection, portion)

    def check_topics(self, connection: Connection, portion: Portion) -> None:
        """Raise `TopicNotFoundError` or `RedefinitionError` if topics or shards have changed since the staging.

        Call it after publishing to the buffer: a change locks the buffer, so it waits for the caller's transaction.
        """
        known = {
            (topic, count, share.layouts.get(topic))
            for _, share in portion.shares
            for topic, count in share.partitions.items()
        }
        topics, counts, layouts = ([each[field] for each in known] for field in range(3))
        values = {"topics": topics, "partitions": counts, "layouts": layouts}
        redefined = {name for (name,) in connection.execute(self._log("redefined_topics"), values)}
        if not redefined:
            return

        there = {name for (name,) in connection.execute(self._queries("known_topics"), {"topics": sorted(redefined)})}
        for topic in sorted(redefined - there):
            raise TopicNotFoundError(f"topic {topic!r} was deleted while events for it were written")
        cause = "" if portion.shares[0][1].shard is None else ", or a shard was added,"
        raise RedefinitionError(
            f"topic {min(redefined)!r} was redefined{cause} while events for it were written: nothing was published, "
            "write again"
        )

    def commit(self, connection: Connection, hold: ClaimHold) -> None:
        """Commit the range of a claim. Raises `ClaimLostError`."""
        claim, _ = self.shard.claims.get(hold.id)
        # This checks the offset, too: a consumer that knows no leases may have moved it.
        self.shard.claims.commit(connection, replace(claim, epoch=hold.epoch))

    # Cleaning up

    def delete(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Delete the blocks of attempts, unless they are published or prepared."""
        self._blocks.delete(connection, attempts)

    def prune(self, writer: str) -> None:
        """Delete some old records: of the writer's batches, and of generated writers of its kind.

        Dagster's housekeeping prunes the records of assets, because it knows the runs.
        """
        queries, values = self._queries, {"writer": writer, "limit": PRUNED, "newest": KEPT_BATCHES}
        with self.shard.database.connection() as connection:
            connection.execute(queries("prune_batches"), {**values, "seconds": KEPT_SECONDS})
            for kind in (UNNAMED, OF_CLAIM):
                if kind.has(writer):
                    # A random start gives each record its turn.
                    of_kind = {"names": kind.names, "from": kind.any_name(), "seconds": kind.seconds}
                    connection.execute(queries("prune_writers"), {**values, **of_kind})

    def sweep(self) -> None:
        """Delete old blocks that nobody published or gave up."""
        with self.shard.database.connection() as connection:
            self._blocks.sweep(connection)


def _check_topics(batch: Batch, recorded: _Record) -> None:
    if recorded.topics and batch.topics and set(recorded.topics).isdisjoint(batch.topics):
        raise ConfigurationError(
            f"{batch} was published before to topic {', '.join(recorded.topics)}, and nothing is published to topic "
            f"{', '.join(batch.topics)}: give each topic's writes a writerId of their own"
        )
