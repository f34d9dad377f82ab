"""Staging: a task's rows become rows of `spark_staged_event` under an attempt of their own, which nobody reads before
the publication that names it.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import adbc_driver_manager
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types
from adbc_driver_postgresql import dbapi  # type: ignore[import-untyped]  # it has no types
from psycopg import sql

from eventsql_orchestration.errors import (
    InvalidPublicationError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.partitioner import partition_of_key
from eventsql_orchestration.model import (
    MAX_KEY_BYTES,
    NOT_PARTITIONED,
    check_partition,
)
from eventsql_orchestration.rules import MAX_VALUE_BYTES
from eventsql_orchestration.spark.batches import translate
from eventsql_orchestration.spark.options import Source

TABLE: Final = "spark_staged_event"


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one attempt of a task has staged: the number of events per topic."""

    id: uuid.UUID
    events: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes staged rows of a batch. `partitions` gives the number of partitions of every topic there is.

    `topic` and `headers` are the options of that name.
    """

    partitions: Mapping[str, int]
    topic: str | None
    headers: Mapping[str, str]

    def encode(self, batch: pa.RecordBatch, attempt: uuid.UUID, position: int) -> tuple[pa.RecordBatch, Counter[str]]:
        """The rows of `batch` as staged rows from `position` on, and how many go to each topic.

        Raises `InvalidPublicationError`, `TopicNotFoundError` or `PartitionOutOfRangeError` that names the column.
        """
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = batch.num_rows
        value = _values(given["value"])
        key = _keys(given.get("key"), rows)
        topics = self._topics(given.get("topic"), rows)
        partitions = self._partitions(topics, key.to_pylist(), given.get("partition"))
        staged = pa.RecordBatch.from_pydict(
            {
                "eql_attempt": pa.repeat(pa.scalar(attempt.bytes, pa.binary(16)), rows),
                "eql_position": pa.array(range(position, position + rows), pa.int64()),
                "eql_topic": pa.array(topics, pa.string()),
                "eql_partition": pa.array(partitions, pa.int16()),
                "eql_key": key,
                "eql_value": value,
                "eql_metadata": self._metadata(given.get("headers"), rows),
            }
        )
        return staged, Counter(topics)

    def _topics(self, column: Any, rows: int) -> Sequence[str]:
        if self.topic is not None:
            return [self.topic] * rows
        topics: list[str] = _text("topic", column).to_pylist()
        for topic in set(topics):
            if topic is None:
                raise InvalidPublicationError("column 'topic' is null: every row needs a topic")
            if topic not in self.partitions:
                raise TopicNotFoundError(
                    f"column 'topic': topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )
        return topics

    def _partitions(self, topics: Sequence[str], keys: Sequence[str | None], column: Any) -> list[int]:
        given: Sequence[int | None] = [None] * len(topics) if column is None else column.to_pylist()
        # Keys repeat, and a digest costs more than looking it up.
        known: dict[tuple[str, str], int] = {}
        partitions = []
        for topic, key, wanted in zip(topics, keys, given, strict=True):
            count = self.partitions[topic]
            if wanted is not None:
                try:
                    partition = check_partition(topic, wanted, count)
                except PartitionOutOfRangeError as error:
                    raise PartitionOutOfRangeError(f"column 'partition': {error}") from None
            elif count == NOT_PARTITIONED:
                partition = NOT_PARTITIONED
            elif key is None:
                partition = random.randrange(count)  # noqa: S311 - spreads load, guards nothing
            else:
                partition = known.get((topic, key), -1)
                if partition < 0:
                    partition = known[topic, key] = partition_of_key(key, count)
            partitions.append(partition)
        return partitions

    def _metadata(self, column: Any, rows: int) -> Any:
        if column is None:
            return pa.repeat(pa.scalar(json.dumps(dict(self.headers)), pa.string()), rows)
        texts: dict[tuple[tuple[str, str], ...], str] = {}
        encoded = []
        for entries in _text("headers", column).to_pylist():
            headers = tuple(entries or ())
            text = texts.get(headers)
            if text is None:
                for name, value in headers:
                    if value is None:
                        raise InvalidPublicationError(f"column 'headers': {name!r} is null, metadata is text")
                    if "\x00" in name or "\x00" in value:
                        raise InvalidPublicationError(
                            f"column 'headers': {name!r} holds a NUL character, which PostgreSQL text cannot store"
                        )
                text = texts[headers] = json.dumps({**dict(headers), **self.headers})
            encoded.append(text)
        return pa.array(encoded, pa.string())


def _values(column: Any) -> Any:
    if column.null_count:
        raise InvalidPublicationError("column 'value' is null: every event needs a value")
    value = column.cast(pa.binary())
    longest = pc.max(pc.binary_length(value)).as_py() or 0
    if longest > MAX_VALUE_BYTES:
        raise InvalidPublicationError(
            f"column 'value': one has {longest} bytes, {MAX_VALUE_BYTES} are allowed: publish a reference to it instead"
        )
    return value


def _keys(column: Any, rows: int) -> Any:
    if column is None:
        return pa.nulls(rows, pa.string())
    column = _text("key", column)
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > MAX_KEY_BYTES:
        raise InvalidPublicationError(f"column 'key': one has {longest} bytes, {MAX_KEY_BYTES} are allowed")
    if pc.any(pc.match_substring(column, "\x00")).as_py():
        raise InvalidPublicationError("column 'key': one holds a NUL character, which PostgreSQL text cannot store")
    return column


def _text(name: str, column: Any) -> Any:
    try:
        # Spark lets any bytes pass for a string.
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidPublicationError(f"column {name!r}: one is not valid UTF-8 text") from None
    return column


def stage(source: Source, encoder: Encoder, batches: Iterable[pa.RecordBatch]) -> Attempt:
    """Stage the rows of one attempt, each batch in a transaction of its own.

    The query that feeds it may be slow, and an open transaction would keep dead rows from being removed anywhere in the
    database.

    Leaves nothing behind when it raises: what `Encoder.encode` does, `DatabaseUnavailableError`, `DatabaseError`.
    """
    attempt = uuid.uuid4()
    events: Counter[str] = Counter()
    try:
        with dbapi.connect(source.dsn, autocommit=True) as connection, connection.cursor() as cursor:
            try:
                for batch in batches:
                    if batch.num_rows:
                        staged, counts = encoder.encode(batch, attempt, events.total())
                        cursor.adbc_ingest(TABLE, staged, mode="append", db_schema_name=source.schema)
                        events += counts
            except BaseException:
                with suppress(adbc_driver_manager.Error):
                    cursor.execute(
                        sql.SQL("DELETE FROM {} WHERE eql_attempt = {}")
                        .format(sql.Identifier(source.schema, TABLE), attempt)
                        .as_string()
                    )
                raise
    except adbc_driver_manager.Error as error:
        raise translate(error, source, "the events could not be staged") from error
    return Attempt(attempt, dict(events))
