"""Encodes rows of Arrow batches as blocks of a log (`publishing/block_format.py`), a column at a time.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import byteorder
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.database.binary import BYTEA, JSON, NULL, TEXT
from eventsql_orchestration.errors import InvalidPublicationError, PartitionOutOfRangeError, TopicNotFoundError
from eventsql_orchestration.model import MAX_KEY_BYTES, NOT_PARTITIONED, check_partition
from eventsql_orchestration.publishing.block_format import MOST_BYTES, MOST_EVENTS, EncodedBlock, array_field
from eventsql_orchestration.publishing.copy_format import encode_metadata
from eventsql_orchestration.topics.partitioner import partition_of_key
from eventsql_orchestration.validation import MAX_VALUE_BYTES, check_metadata

BATCH_BYTES: Final = 4 * 1024 * 1024
"""The size of the rows that are encoded at once. They become blocks of each of their partitions."""

_NO_METADATA: Final = b"{}"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes blocks of rows. `partitions` has the number of partitions of every topic.

    `topic` and `headers` are the options of those names.
    """

    partitions: Mapping[str, int]
    topic: str | None
    headers: Mapping[str, str]

    def blocks(self, topic: str, batch: pa.RecordBatch) -> Iterator[EncodedBlock]:
        """The rows of a topic as blocks, those of each partition in their order.

        Raises `InvalidPublicationError` or `PartitionOutOfRangeError`, which name the column.
        """
        count = max(1, min(batch.num_rows, -(-batch.nbytes // BATCH_BYTES)))
        ends = [batch.num_rows * number // count for number in range(count + 1)]
        for start, end in pairwise(ends):
            if end > start:
                yield from self._encode(topic, batch.slice(start, end - start))

    def by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows of each topic. Raises `InvalidPublicationError` or `TopicNotFoundError`, which name the column."""
        if self.topic is not None:
            yield self.topic, batch
            return
        column = batch.column("topic")
        if column.null_count:
            raise InvalidPublicationError("column 'topic' is null: every row needs a topic")
        # Looking at each row in Python would cost as much as encoding it: 0.25 µs.
        coded = _text("topic", column).dictionary_encode()
        topics = coded.dictionary.to_pylist()
        for topic in topics:
            if topic not in self.partitions:
                raise TopicNotFoundError(
                    f"column 'topic': topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )
        if len(topics) == 1:
            yield topics[0], batch
            return
        # Sorting is stable: the rows of a topic keep their order. From 5 topics on, sorting takes less time than a look
        # at all rows for each topic: with 100 topics, 0.5 µs for each row instead of 1.3.
        order = pc.array_sort_indices(coded.indices)
        counts = pc.value_counts(coded.indices.take(order))
        start = 0
        for number, rows in zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True):
            yield topics[number], batch.take(order.slice(start, rows))
            start += rows

    def _encode(self, topic: str, batch: pa.RecordBatch) -> Iterator[EncodedBlock]:
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = batch.num_rows
        value = _values(given["value"])
        key = keys_of(given.get("key"), rows)
        partitions = self._partitions(topic, key, given.get("partition"))
        columns = [key, value, self._metadata(given.get("headers"), rows)]

        counts = pc.value_counts(partitions)
        if len(counts) > 1:
            # Sorting is stable: the rows of a partition keep their order.
            order = pc.array_sort_indices(partitions)
            columns = [None if column is None else column.take(order) for column in columns]
            counts = pc.value_counts(partitions.take(order))
        encoded = [None if column is None else _elements(column) for column in columns]

        start = 0
        for partition, events in zip(
            counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True
        ):
            for cut, length in _cuts(encoded, start, events):
                arrays = (
                    _array(of_type, column, elements, cut, length)
                    for of_type, column, elements in zip((TEXT, BYTEA, JSON), columns, encoded, strict=True)
                )
                yield EncodedBlock(partition, length, b"".join(arrays))
            start += events

    def _partitions(self, topic: str, keys: Any, column: Any) -> Any:
        """The partition of each row, as 16-bit numbers."""
        count = self.partitions[topic]
        if column is None:
            column = pa.nulls(len(keys), pa.int64())
        try:
            for bound in pc.min_max(column).values():
                if bound.is_valid:
                    check_partition(topic, bound.as_py(), count)
        except PartitionOutOfRangeError as error:
            raise PartitionOutOfRangeError(f"column 'partition': {error}") from None
        column = column.cast(pa.int16())
        if not column.null_count:
            return column
        if count == NOT_PARTITIONED:
            return column.fill_null(NOT_PARTITIONED)
        # Keys repeat, and a look-up costs less than a digest.
        known: dict[str, int] = {}
        partitions = column.to_pylist()
        for row, key in enumerate(keys.to_pylist()):
            if partitions[row] is not None:
                continue
            if key is None:
                partitions[row] = random.randrange(count)  # noqa: S311 - spreads load, guards nothing
            else:
                partition = known.get(key, -1)
                if partition < 0:
                    partition = known[key] = partition_of_key(key, count)
                partitions[row] = partition
        return pa.array(partitions, pa.int16())

    def _metadata(self, column: Any, rows: int) -> Any:
        """The metadata of each row as JSON; None if no row has any."""
        if column is None:
            if not self.headers:
                return None
            return pa.repeat(pa.scalar(encode_metadata(self.headers), pa.binary()), rows)
        texts: dict[tuple[tuple[str, str | None], ...], bytes] = {}
        encoded: list[bytes] = []
        for entries in _text("headers", column).to_pylist():
            headers = tuple(entries or ())
            known = texts.get(headers)
            if known is None:
                known = texts[headers] = encode_metadata(_checked({**dict(headers), **self.headers}))
            encoded.append(known)
        return pa.array(encoded, pa.binary()) if any(text != _NO_METADATA for text in texts.values()) else None


def _checked(metadata: Mapping[str, str | None]) -> Mapping[str, str]:
    for name, text in metadata.items():
        if text is None:
            raise InvalidPublicationError(f"column 'headers': header {name!r} is null: leave it out, or make it a text")
    try:
        return check_metadata(metadata, error=InvalidPublicationError)
    except InvalidPublicationError as error:
        raise InvalidPublicationError(f"column 'headers': {error}") from None


def _cuts(encoded: Sequence[Any], start: int, length: int) -> Iterator[tuple[int, int]]:
    """Where blocks of some rows begin, and how many events they have, by `MOST_EVENTS` and `MOST_BYTES`."""
    size = sum(_end(column, start + length) - _end(column, start) for column in encoded if column is not None)
    if length == 1 or (length <= MOST_EVENTS and size <= MOST_BYTES):
        yield start, length
        return
    half = length // 2
    yield from _cuts(encoded, start, half)
    yield from _cuts(encoded, start + half, length - half)


def _array(of_type: int, column: Any, encoded: Any, start: int, length: int) -> bytes:
    """An array of the elements `start` to `start + length` of a column; NULL if it has none of them."""
    if column is None:
        return NULL
    nulls = column.slice(start, length).null_count
    if nulls == length:
        return NULL
    body = memoryview(encoded.buffers()[2])[_end(encoded, start) : _end(encoded, start + length)]
    return array_field(of_type, length, body.tobytes(), nulls=nulls > 0)


def _end(column: Any, rows: int) -> int:
    """Where the first rows of a binary column end in its bytes."""
    (end,) = struct.unpack_from("=i", column.buffers()[1], 4 * (column.offset + rows))
    return int(end)


def _elements(column: Any) -> Any:
    """The values of a column, each behind its length; the length of a missing value is -1."""
    lengths = pc.binary_length(column).fill_null(-1).cast(pa.int32())
    return pc.binary_join_element_wise(_big_endian(lengths), column.cast(pa.binary()).fill_null(b""), b"")


def _big_endian(column: Any) -> Any:
    """The bytes of each number of a column of 32-bit numbers."""
    numbers = array("i")
    numbers.frombytes(memoryview(column.buffers()[1])[column.offset * 4 : (column.offset + len(column)) * 4])
    if byteorder == "little":
        numbers.byteswap()
    return pa.Array.from_buffers(pa.binary(4), len(numbers), [None, pa.py_buffer(numbers.tobytes())]).cast(pa.binary())


def _values(column: Any) -> Any:
    if column.null_count:
        raise InvalidPublicationError("column 'value' is null: every event needs a value")
    value = column.cast(pa.binary())
    longest = pc.max(pc.binary_length(value)).as_py() or 0
    if longest > MAX_VALUE_BYTES:
        raise InvalidPublicationError(
            f"column 'value': a value has {longest} bytes, {MAX_VALUE_BYTES} are allowed: publish a reference instead"
        )
    return value


def keys_of(column: Any, rows: int) -> Any:
    """The checked keys of a batch of `rows` rows. `column` is None if the batch has no keys."""
    if column is None:
        return pa.nulls(rows, pa.string())
    column = _text("key", column)
    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > MAX_KEY_BYTES:
        raise InvalidPublicationError(f"column 'key': a key has {longest} bytes, {MAX_KEY_BYTES} are allowed")
    # Searching the bytes of all keys at once takes a tenth of the time, and mostly finds nothing.
    if _has_nul(column) and pc.any(pc.match_substring(column, "\x00")).as_py():
        raise InvalidPublicationError("column 'key': a key holds a NUL character, which PostgreSQL text cannot store")
    return column


def _has_nul(column: Any) -> bool:
    """Whether the memory that holds a column's text has a NUL character, in this part of the column or in another."""
    text = column.buffers()[2]
    return text is not None and b"\x00" in text.to_pybytes()


def _text(name: str, column: Any) -> Any:
    try:
        # Spark accepts any bytes as a string.
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidPublicationError(f"column {name!r}: a value is not valid UTF-8 text") from None
    return column
