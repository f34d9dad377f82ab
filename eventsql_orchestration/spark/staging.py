"""Staging: a task's rows become blocks in `spark_staged_event`, under an attempt that nobody reads before its
publication.

Many tasks encode rows here at once. Over shards, each row goes to the shard of its key. The publication only marks the
blocks as published, and the transfer moves them into the log (`publishing/staged_blocks.py`).

Runs in Spark's tasks, so it imports neither pyspark nor SQLAlchemy.
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

from eventsql_orchestration.database.rows import send_copy
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import STAGED_COLUMNS
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.sharding import owner_among
from eventsql_orchestration.spark.adbc import translate
from eventsql_orchestration.spark.encoder import BATCH_BYTES, Encoder, keys_of
from eventsql_orchestration.spark.options import Source

TABLE: Final = "spark_staged_event"

_MOST_KEPT: Final = 4 * BATCH_BYTES
"""The bytes of rows for several topics that an attempt collects until a topic has `BATCH_BYTES`: blocks should be
large."""


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
    shares: tuple[Share, ...]

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
    """The identity of a stream's batch: a batch that was published before with the same number must have the same
    identity.

    `query` is the id of the streaming query, which lives as long as its checkpoint, or None if Spark does not name it.
    `checksum` is the sum of its tasks' checksums. Both are None in `QUERY_IS_WRITER`, and for a batch without tasks.
    """

    query: str | None = None
    checksum: int | None = None


QUERY_IS_WRITER: Final = StreamBatch()
"""The identity of any batch of a query that is the writer itself: the writer and the number say all."""


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
        columns = sql.SQL(", ").join(map(sql.Identifier, STAGED_COLUMNS))
        self._copy = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(self._table, columns)
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

    def add(self, topic: str, rows: pa.RecordBatch) -> None:
        """Stage the rows of a topic. Raises as `Encoder.blocks`."""
        staged, position = [], self._events.total()
        for block in self._target.encoder.blocks(topic, rows):
            staged.append(block.staged_row(self._attempt, position, topic))
            position += block.events

        with self._errors(), self._connection.transaction():
            # The publication's commit waits for the disk, and for earlier commits with it. It checks for lost blocks.
            self._connection.execute("SET LOCAL synchronous_commit TO off")
            send_copy(self._connection.cursor(), self._copy, [copy_format.HEADER, *staged, copy_format.TRAILER])
        self._events[topic] += rows.num_rows

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

    Raises as `Encoder.by_topic` and `Encoder.blocks`, and `DatabaseUnavailableError` or `DatabaseError`. Nothing stays
    staged then.
    """
    attempt = uuid.uuid4()
    stagings: dict[int, _Staging] = {}
    with ExitStack() as stack:
        try:
            for number, topic, rows in _joined(targets, batches):
                if number not in stagings:
                    stagings[number] = _Staging(targets[number], attempt)
                    stack.callback(stagings[number].close)
                stagings[number].add(topic, rows)
        except BaseException:
            for staging in stagings.values():
                staging.give_up()
            raise
    return Attempt(attempt, tuple(staging.share() for staging in stagings.values()))


def _joined(
    targets: Sequence[WriteTarget], batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[int, str, pa.RecordBatch]]:
    """The rows of all batches, in order within each topic, with the numbers of their targets and their topics.

    Rows of a topic come about `BATCH_BYTES` at a time.
    """
    # Each attempt chooses a target at random, so that all targets get rows without keys.
    keyless = random.randrange(len(targets))  # noqa: S311 - spreads load, guards nothing
    kept: dict[tuple[int, str], list[pa.RecordBatch]] = {}
    for batch in batches:
        for number, rows in _by_target(targets, batch, keyless):
            for topic, of_topic in targets[number].encoder.by_topic(rows):
                if not of_topic.num_rows:
                    continue
                kept.setdefault((number, topic), []).append(of_topic)
                if _size(kept[number, topic]) >= BATCH_BYTES:
                    yield number, topic, _one(kept.pop((number, topic)))
        if sum(map(_size, kept.values())) > _MOST_KEPT:
            yield from ((*place, _one(parts)) for place, parts in kept.items())
            kept = {}
    yield from ((*place, _one(parts)) for place, parts in kept.items())


def _size(parts: Sequence[pa.RecordBatch]) -> int:
    return sum(part.nbytes for part in parts)


def _one(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    # A part may lack a column that another part has.
    tables = [pa.Table.from_batches([part]) for part in parts]
    (whole,) = pa.concat_tables(tables, promote_options="default").combine_chunks().to_batches()
    return whole


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
