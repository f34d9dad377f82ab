"""Staging: a task's rows become blocks in `spark_staged_event` under an attempt of their own, which nobody reads before
the publication that names it.

Rows are encoded and compressed here, where many tasks work at once, and on shards each goes to that of its key; the
publication, which is one transaction of one process on each, says only that they are published, and the transfer copies
them into the log (`log/blocks.py`).

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

from eventsql_orchestration.log.blocks import Block, join, new_mark
from eventsql_orchestration.redaction import hiding
from eventsql_orchestration.sharding import owner_among
from eventsql_orchestration.spark.batches import translate
from eventsql_orchestration.spark.encoder import BLOCK_BYTES, Encoder, keys_of
from eventsql_orchestration.spark.options import Source

TABLE: Final = "spark_staged_event"

_LEAST_EVENTS: Final = 1_000
"""What a block should hold at least, where a batch has few events for each of many topics."""

_MOST_KEPT: Final = 4 * BLOCK_BYTES
"""How much an attempt keeps for that before it stages smaller blocks."""


@dataclass(frozen=True, slots=True)
class Share:
    """What an attempt has staged on one shard: the number of events per topic, and the topics as it knew them.

    `shard` is None where there is one database. `layouts` may lack a topic whose layout does not matter.
    """

    shard: str | None
    events: Mapping[str, int]
    partitions: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one attempt of a task has staged, on each shard that got some of it."""

    id: uuid.UUID
    shares: tuple[Share, ...] = ()

    @property
    def events(self) -> int:
        return sum(sum(share.events.values()) for share in self.shares)


@dataclass(frozen=True, slots=True)
class Place:
    """Where events are staged: a database, with its topics as they were when the write was planned.

    `shard` is its name where it is one of several.
    """

    source: Source
    encoder: Encoder
    layouts: Mapping[str, int] = field(default_factory=dict)
    shard: str | None = None


class _Staging:
    """What one attempt stages in one place, each block in a transaction of its own.

    The query that feeds it may be slow, and an open transaction would keep dead rows from being removed anywhere in the
    database.
    """

    def __init__(self, place: Place, attempt: uuid.UUID) -> None:
        self._place = place
        self._attempt = attempt
        self._table = sql.Identifier(place.source.schema, TABLE)
        self._events: Counter[str] = Counter()
        with self._errors(), hiding(place.source.dsn):
            # Nothing stays on its session, for a pooler's sake; beside a block, planning its statement costs nothing.
            self._connection = psycopg.connect(place.source.dsn, autocommit=True, prepare_threshold=None)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translate(error, self._place.source, "the events could not be staged") from error

    def add(self, block: Block) -> None:
        packed = block.pack()
        with self._errors(), self._connection.transaction():
            # What came before a commit that waits for the disk is there with it; a lost block stops the publication.
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
        place, topics = self._place, self._events
        return Share(
            place.shard,
            dict(topics),
            {topic: place.encoder.partitions[topic] for topic in topics},
            {topic: place.layouts[topic] for topic in topics if topic in place.layouts},
        )

    def give_up(self) -> None:
        with suppress(psycopg.Error):
            self._connection.execute(
                sql.SQL("DELETE FROM {} WHERE eql_attempt = %s").format(self._table), (self._attempt,)
            )

    def close(self) -> None:
        self._connection.close()


def stage(places: Sequence[Place], batches: Iterable[pa.RecordBatch]) -> Attempt:
    """Stage the rows of one attempt: of several places, each row in that of its key.

    Leaves nothing behind when it raises: what `Encoder.blocks` does, `DatabaseUnavailableError`, `DatabaseError`.
    """
    attempt = uuid.uuid4()
    stagings: dict[int, _Staging] = {}
    with ExitStack() as stack:
        try:
            for number, block in _joined(places, batches):
                if number not in stagings:
                    stagings[number] = _Staging(places[number], attempt)
                    stack.callback(stagings[number].close)
                stagings[number].add(block)
        except BaseException:
            for staging in stagings.values():
                staging.give_up()
            raise
    return Attempt(attempt, tuple(staging.share() for staging in stagings.values()))


def _joined(places: Sequence[Place], batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Block]]:
    """The blocks of all batches, with the numbers of their places; what is little of a topic waits for more."""
    mark = new_mark()
    # Another one for each attempt: so they all get their part.
    keyless = random.randrange(len(places))  # noqa: S311 - spreads load, guards nothing
    kept: dict[tuple[int, str], Block] = {}
    size = 0
    for batch in batches:
        for number, rows in _by_place(places, batch, keyless):
            for block in places[number].encoder.blocks(rows, mark):
                before = kept.pop((number, block.topic), None)
                size -= 0 if before is None else len(before.rows)
                whole = block if before is None else join(before, block)
                if whole.events >= _LEAST_EVENTS or len(whole.rows) >= BLOCK_BYTES // 2:
                    yield number, whole
                else:
                    kept[number, whole.topic] = whole
                    size += len(whole.rows)
        if size > _MOST_KEPT:
            yield from _numbered(kept)
            kept, size = {}, 0
    yield from _numbered(kept)


def _numbered(kept: Mapping[tuple[int, str], Block]) -> Iterator[tuple[int, Block]]:
    for (number, _), block in kept.items():
        yield number, block


def _by_place(places: Sequence[Place], batch: pa.RecordBatch, keyless: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a batch by the number of their place, those of one in their order.

    A key's is the shard that it belongs to, `keyless` that of rows without one.
    """
    if len(places) == 1:
        yield 0, batch
        return
    keys = keys_of(batch.column("key") if "key" in batch.schema.names else None, batch.num_rows)
    coded = keys.dictionary_encode()
    numbers = {str(place.shard): number for number, place in enumerate(places)}
    owner = owner_among(tuple(sorted(numbers)))
    owners = pa.array([numbers[owner(key)] for key in coded.dictionary.to_pylist()], pa.int16())
    chosen = owners.take(coded.indices).fill_null(keyless)
    for number in range(len(places)):
        mine = pc.equal(chosen, number)
        count = pc.sum(mine).as_py() or 0
        if count:
            yield number, batch if count == batch.num_rows else batch.filter(mine)
