"""Staging: a task's rows become blocks in `spark_staged_event`, under an attempt that nobody reads before its
publication.

Many tasks encode and compress rows here at once. Over shards, each row goes to the shard of its key. The publication
only marks the blocks as published, and the transfer copies them into the log (`publishing/blocks.py`).

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types
from psycopg import sql
from psycopg.types.json import Json

from eventsql_orchestration.publishing.blocks import Block, join, new_mark
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.sharding import owner_among
from eventsql_orchestration.spark.adbc import translate
from eventsql_orchestration.spark.encoder import BLOCK_BYTES, Encoder, keys_of
from eventsql_orchestration.spark.options import Source

TABLE: Final = "spark_staged_event"

_LEAST_EVENTS: Final = 1_000
"""The least events of a block, if a batch has few events for each of many topics."""

_MOST_KEPT: Final = 4 * BLOCK_BYTES
"""The bytes that an attempt collects for that before it stages smaller blocks."""


@dataclass(frozen=True, slots=True)
class Share:
    """The staged events of an attempt on one shard, by topic, with the partitions and layouts that the attempt knew.

    `shard` is None for one database. `layouts` lacks topics whose layout does not matter.
    """

    shard: str | None
    events: Mapping[str, int]
    partitions: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The staged events of one attempt of a task, on each shard that has some."""

    id: uuid.UUID
    shares: tuple[Share, ...] = ()

    @property
    def events(self) -> int:
        return sum(sum(share.events.values()) for share in self.shares)


@dataclass(frozen=True, slots=True)
class ClaimHold:
    """A claim as it was when the write was planned. A later epoch of the claim is another owner's.

    `shard` is the claim's shard, if there are several.
    """

    id: int
    epoch: int
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """What identifies a stream's batch: a batch with the same number that was published before must be the same.

    `query` is the id of the streaming query, which lives as long as its checkpoint. `checksum` is the sum of its tasks'
    checksums. Both are None if the writer is the query itself.
    """

    query: str | None = None
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """A database where events are staged, and its topics when the write was planned.

    `shard` is its name if there are several.
    """

    source: Source
    encoder: Encoder
    layouts: Mapping[str, int] = field(default_factory=dict)
    shard: str | None = None


class _Staging:
    """Stages the blocks of one attempt in one target, each in a transaction of its own.

    The query may be slow, and an open transaction would keep vacuum from removing dead rows in the whole database.
    """

    def __init__(self, target: WriteTarget, attempt: uuid.UUID) -> None:
        self._target = target
        self._attempt = attempt
        self._table = sql.Identifier(target.source.schema, TABLE)
        self._events: Counter[str] = Counter()
        with self._errors(), hiding(target.source.dsn):
            # A pooler may share the session, so nothing is prepared. Planning costs little beside a block.
            self._connection = psycopg.connect(
                target.source.dsn, autocommit=True, prepare_threshold=None, client_encoding="UTF8"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self._target.source, "the events could not be staged") from error

    def add(self, block: Block) -> None:
        packed = block.pack()
        with self._errors(), self._connection.transaction():
            # The publication's commit waits for the disk, and for earlier commits with it. It checks for lost blocks.
            self._connection.execute("SET LOCAL synchronous_commit TO off")
            self._connection.execute(
                sql.SQL(
                    "INSERT INTO {} (eql_attempt, eql_position, eql_topic, eql_partition, eql_value, eql_metadata) "
                    "VALUES (%s, %s, %s, -1, %b, %s)"
                ).format(self._table),
                (self._attempt, self._events.total(), block.topic, packed, Json(block.metadata())),
            )
        self._events[block.topic] += block.events

    def share(self) -> Share:
        target, topics = self._target, self._events
        return Share(
            target.shard,
            dict(topics),
            {topic: target.encoder.partitions[topic] for topic in topics},
            {topic: target.layouts[topic] for topic in topics if topic in target.layouts},
        )

    def give_up(self) -> None:
        with suppress(psycopg.Error):
            self._connection.execute(
                sql.SQL("DELETE FROM {} WHERE eql_attempt OPERATOR(pg_catalog.=) %s").format(self._table),
                (self._attempt,),
            )

    def close(self) -> None:
        self._connection.close()


def stage(targets: Sequence[WriteTarget], batches: Iterable[pa.RecordBatch]) -> Attempt:
    """Stage the rows of one attempt, each row in the target of its key.

    Raises as `Encoder.blocks`, and `DatabaseUnavailableError` or `DatabaseError`. Nothing stays staged then.
    """
    attempt = uuid.uuid4()
    stagings: dict[int, _Staging] = {}
    with ExitStack() as stack:
        try:
            for number, block in _joined(targets, batches):
                if number not in stagings:
                    stagings[number] = _Staging(targets[number], attempt)
                    stack.callback(stagings[number].close)
                stagings[number].add(block)
        except BaseException:
            for staging in stagings.values():
                staging.give_up()
            raise
    return Attempt(attempt, tuple(staging.share() for staging in stagings.values()))


def _joined(targets: Sequence[WriteTarget], batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Block]]:
    """The blocks of all batches with the numbers of their targets. Small blocks of a topic are joined."""
    mark = new_mark()
    # Each attempt chooses a target at random, so that all targets get rows without keys.
    keyless = random.randrange(len(targets))  # noqa: S311 - spreads load, guards nothing
    kept: dict[tuple[int, str], Block] = {}
    size = 0
    for batch in batches:
        for number, rows in _by_target(targets, batch, keyless):
            for block in targets[number].encoder.blocks(rows, mark):
                before = kept.pop((number, block.topic), None)
                size -= 0 if before is None else len(before.rows)
                whole = block if before is None else join(before, block)
                if whole.events >= _LEAST_EVENTS or len(whole.rows) >= BLOCK_BYTES // 2:
                    yield number, whole
                else:
                    kept[number, whole.topic] = whole
                    size += len(whole.rows)
        if size > _MOST_KEPT:
            yield from ((number, block) for (number, _), block in kept.items())
            kept, size = {}, 0
    yield from ((number, block) for (number, _), block in kept.items())


def _by_target(
    targets: Sequence[WriteTarget], batch: pa.RecordBatch, keyless: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch by the number of their target, in order within each target.

    The key chooses the target; rows without a key go to `keyless`.
    """
    if len(targets) == 1:
        yield 0, batch
        return
    keys = keys_of(batch.column("key") if "key" in batch.schema.names else None, batch.num_rows)
    coded = keys.dictionary_encode()
    numbers = {str(target.shard): number for number, target in enumerate(targets)}
    owner = owner_among(tuple(sorted(numbers)))
    owners = pa.array([numbers[owner(key)] for key in coded.dictionary.to_pylist()], pa.int16())
    chosen = owners.take(coded.indices).fill_null(keyless)
    for number in range(len(targets)):
        mine = pc.equal(chosen, number)
        count = pc.sum(mine).as_py() or 0
        if count:
            yield number, batch if count == batch.num_rows else batch.filter(mine)
