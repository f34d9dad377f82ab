"""What a publication does in one database, within a transaction there: its record, its events, its claim."""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psycopg.rows import tuple_row

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConfigurationError,
    RedefinitionError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.parts import Part, Parts
from eventsql_orchestration.log.staged import StagedBlock, StagedBlocks, swept
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.spark.staging import Attempt, Share

KEPT_BATCHES: Final = 100
"""So many of a writer's newest records are kept, however old they are: a stream repeats its last batch."""

KEPT_SECONDS: Final = 30 * 86_400.0
"""How long records are kept, as Dagster's housekeeping does."""

PRUNED: Final = 1_000
"""Records that a publication looks at when it prunes: more than it writes."""


@dataclass(frozen=True, slots=True)
class Unrepeated:
    """Writers of one batch each that nobody named, and that nothing repeats: their records go after `seconds`.

    `names` is what their names are like, `any_name` gives one at random.
    """

    names: str
    seconds: float
    any_name: Callable[[], str]

    def has(self, writer: str) -> bool:
        return re.fullmatch(self.names, writer) is not None


def unnamed() -> str:
    """A writer of its own, for a write without a `writerId`."""
    return f"unnamed-{uuid.uuid4()}"


UNNAMED: Final = Unrepeated("^unnamed-[0-9a-f-]{36}$", 86_400.0, unnamed)
"""Over shards, the record tells which publication took place until no part of it is open."""

OF_CLAIM: Final = Unrepeated(
    "^claim-[0-9]+$",
    KEPT_SECONDS,
    lambda: f"claim-{random.randrange(10**9)}",  # noqa: S311 - spreads work, guards nothing
)
"""A claim is committed once, with a record or without."""


@dataclass(frozen=True, slots=True)
class ClaimHold:
    """A claim as it was when a write was planned: what a later owner makes of it is not ours to commit.

    `shard` is the one that it is of, where there are several.
    """

    id: int
    epoch: int
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that a writer publishes: the attempts that staged it, in its order, and the claim that it commits.

    `replayed` says that the batch must be the one that was published before, where one was.
    """

    writer: str
    number: int
    attempts: tuple[Attempt, ...]
    claim: ClaimHold | None = None
    replayed: bool = False

    @property
    def events(self) -> int:
        return sum(attempt.events for attempt in self.attempts)

    def portions(self) -> dict[str | None, Portion]:
        """What there is of it on each shard that has some."""
        portions: dict[str | None, list[tuple[uuid.UUID, Share]]] = {}
        for attempt in self.attempts:
            for share in attempt.shares:
                portions.setdefault(share.shard, []).append((attempt.id, share))
        return {shard: Portion(tuple(shares)) for shard, shares in portions.items()}

    def __str__(self) -> str:
        return f"batch {self.number} of writer {self.writer!r}"


@dataclass(frozen=True, slots=True)
class Portion:
    """What the attempts of a batch have staged on one shard."""

    shares: tuple[tuple[uuid.UUID, Share], ...] = ()

    @property
    def attempts(self) -> list[uuid.UUID]:
        return [attempt for attempt, _ in self.shares]

    @property
    def events(self) -> int:
        return sum(sum(share.events.values()) for _, share in self.shares)


class Ledger:
    """Publishes in one database."""

    def __init__(self, platform: EventSQL) -> None:
        self.platform = platform
        self.parts = Parts(platform.database)
        self._blocks = StagedBlocks(platform.database.schema)
        self._queries = Queries("spark", platform.database.schema)
        self._log = Queries("log", platform.database.schema)

    # The record

    def record(self, connection: Connection, batch: Batch, publication: uuid.UUID) -> bool:
        """Become the one publication of the writer's batch; False where there was one.

        Waits for another transaction that publishes the same, and then knows what became of it. Raises
        `ConfigurationError` for a batch that may have been published so long ago that its record was deleted.
        """
        values = {"writer": batch.writer, "batch": batch.number, "events": batch.events, "id": publication}
        if connection.execute(self._queries("record_publication"), values).rowcount != 1:
            return False
        cursor = connection.cursor(row_factory=tuple_row)
        if cursor.execute(self._queries("is_forgotten"), values).fetchone() == (True,):
            raise ConfigurationError(
                f"{batch} is not published: whether it was published before is not known any more, since the records "
                f"of this writer's old batches are deleted after {KEPT_SECONDS / 86_400:.0f} days; if it was not, "
                "write it with another writerId"
            )
        return True

    def recorded(self, batch: Batch) -> bool:
        """Whether the batch was published."""
        with self.platform.database.connection() as connection:
            return self._events(connection, batch) is not None

    def _events(self, connection: Connection, batch: Batch) -> int | None:
        values = {"writer": batch.writer, "batch": batch.number}
        row = connection.execute(self._queries("published"), values).fetchone()
        return None if row is None else int(row[0])

    def check_repeated(self, connection: Connection, batch: Batch) -> None:
        """Make sure that a batch that was published is the one that is to be published now, as far as it must be."""
        if batch.replayed and (events := self._events(connection, batch)) != batch.events:
            raise ConfigurationError(
                f"{batch} was published before with {events} events, and has {batch.events} now: this checkpoint is "
                "not the one that it was published with; give writerId a new value, and begin where the deleted "
                "checkpoint ended"
            )
        if batch.claim is not None:
            claim, state = self.platform.claims.get(batch.claim.id)
            if state != "committed":
                raise ClaimLostError(f"{batch} was published before, but not with {claim}: give writerId a new value")

    # The events

    def find(self, connection: Connection, portion: Portion) -> list[StagedBlock]:
        """The blocks of a portion, in its order. Raises `DatabaseError` unless they are all there."""
        found = self._blocks.find(connection, portion.attempts)
        blocks: dict[uuid.UUID, list[StagedBlock]] = {}
        for block in found:
            blocks.setdefault(block.attempt, []).append(block)
        for attempt, share in portion.shares:
            events: Counter[str] = Counter()
            for block in blocks.get(attempt, ()):
                if block.position != events.total():
                    raise swept(attempt, sum(share.events.values()))
                events[block.topic] += block.events
            if events != Counter(share.events):
                raise swept(attempt, sum(share.events.values()))
        return found

    def prepare(self, part: Part, portion: Portion) -> None:
        """Have the blocks of a portion kept, on disk, for a publication that is announced. Raises as `find`."""
        with self.platform.database.transaction() as connection:
            self.parts.bound(connection)
            self.parts.hold(connection, portion.attempts)
            self.find(connection, portion)
            self.parts.prepare(connection, part, portion.attempts, portion.events)

    def publish(self, connection: Connection, portion: Portion) -> None:
        """Publish the events of a portion. Raises as `find`, and as `check_topics`."""
        self._blocks.publish(connection, portion.attempts, self.find(connection, portion))
        self.check_topics(connection, portion)

    def check_topics(self, connection: Connection, portion: Portion) -> None:
        """Raises unless the topics, and the shards, are those that the events were staged for.

        They stay so until the end of the transaction, which has published to the buffer: who changes them locks it.
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
        claim, _ = self.platform.claims.get(hold.id)
        # The offset must be where the claim begins: a consumer that knows nothing of leases may have moved it.
        self.platform.claims.commit(connection, replace(claim, epoch=hold.epoch))

    # What is left

    def delete(self, connection: Connection, attempts: Sequence[uuid.UUID]) -> None:
        """Delete what attempts staged, unless it is published or will be."""
        self._blocks.delete(connection, attempts)

    def give_up(self, attempts: Sequence[uuid.UUID]) -> None:
        """`delete`, in a transaction of its own."""
        with self.platform.database.connection() as connection:
            self.delete(connection, attempts)

    def prune(self, writer: str) -> None:
        """Delete some records that nothing repeats any more: of old batches of a writer, and of writers of its kind.

        Those of Dagster's assets are pruned by its housekeeping, which knows the runs.
        """
        queries, values = self._queries, {"writer": writer, "limit": PRUNED, "newest": KEPT_BATCHES}
        with self.platform.database.connection() as connection:
            connection.execute(queries("prune_batches"), {**values, "seconds": KEPT_SECONDS})
            for kind in (UNNAMED, OF_CLAIM):
                if kind.has(writer):
                    # From any name on: so all get their turn, whichever of them are young.
                    of_kind = {"names": kind.names, "from": kind.any_name(), "seconds": kind.seconds}
                    connection.execute(queries("prune_writers"), {**values, **of_kind})

    def sweep(self) -> None:
        """Delete what attempts staged that nobody published or gave up."""
        with self.platform.database.connection() as connection:
            self._blocks.sweep(connection)
