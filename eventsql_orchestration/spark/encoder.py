"""Encodes rows of Arrow batches as blocks of events (`publishing/blocks.py`), a column at a time.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from sys import byteorder
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.errors import InvalidPublicationError, PartitionOutOfRangeError, TopicNotFoundError
from eventsql_orchestration.model import MAX_KEY_BYTES, NOT_PARTITIONED, check_partition
from eventsql_orchestration.publishing.blocks import Block, prefix
from eventsql_orchestration.topics.partitioner import partition_of_key
from eventsql_orchestration.validation import MAX_VALUE_BYTES

BLOCK_BYTES: Final = 4 * 1024 * 1024
"""The size of an uncompressed block. It bounds the transfer's memory, and the time that moving a block takes."""

_NO_METADATA: Final = "{}"


@dataclass(frozen=True, slots=True)
class Encoder:
    """Makes blocks of a batch. `partitions` has the number of partitions of every topic.

    `topic` and `headers` are the options of those names.
    """

    partitions: Mapping[str, int]
    topic: str | None
    headers: Mapping[str, str]

    def blocks(self, batch: pa.RecordBatch, mark: bytes) -> Iterator[Block]:
        """The rows of `batch` in blocks of about `BLOCK_BYTES`, in order within each topic.

        Raises `InvalidPublicationError`, `TopicNotFoundError` or `PartitionOutOfRangeError`, which name the column.
        """
        for topic, rows in self._by_topic(batch):
            count = max(1, min(rows.num_rows, -(-rows.nbytes // BLOCK_BYTES)))
            ends = [rows.num_rows * number // count for number in range(count + 1)]
            for start, end in pairwise(ends):
                if end > start:
                    yield self._encode(topic, rows.slice(start, end - start), mark)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self.topic is not None:
            yield self.topic, batch
            return
        column = batch.column("topic")
        if column.null_count:
            raise InvalidPublicationError("column 'topic' is null: every row needs a topic")
        numbers: dict[str, list[int]] = {}
        for number, topic in enumerate(_text("topic", column).to_pylist()):
            numbers.setdefault(topic, []).append(number)
        for topic in numbers:
            if topic not in self.partitions:
                raise TopicNotFoundError(
                    f"column 'topic': topic {topic!r} does not exist: create it with `eventsql topic create {topic}`"
                )
        for topic, rows in numbers.items():
            yield topic, batch if len(numbers) == 1 else batch.take(pa.array(rows, pa.int64()))

    def _encode(self, topic: str, batch: pa.RecordBatch, mark: bytes) -> Block:
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = batch.num_rows
        value = _values(given["value"])
        key = keys_of(given.get("key"), rows)
        partitions = self._partitions(topic, key, given.get("partition"))
        metadata = self._metadata(given.get("headers"), rows)
        # The columns in the order of `copy_format.LOG_COLUMNS`. A field is its length and its bytes.
        encoded = pc.binary_join_element_wise(
            pa.scalar(prefix(mark), pa.binary()),
            _lengths(key, null=-1),
            key.cast(pa.binary()).fill_null(b""),
            _lengths(value),
            value,
            _lengths(metadata),
            metadata,
            pa.scalar(struct.pack(">i", 2), pa.binary()),
            _big_endian(_numbers("h", partitions)),
            b"",
        )
        counts = pc.value_counts(partitions)
        per_partition = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
        return Block(topic, mark, _content(encoded), dict(per_partition))

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
        if column is None:
            text = _json(self.headers) if self.headers else _NO_METADATA
            return pa.repeat(pa.scalar(text.encode(), pa.binary()), rows)
        texts: dict[tuple[tuple[str, str], ...], bytes] = {}
        encoded: list[bytes] = []
        for entries in _text("headers", column).to_pylist():
            headers = tuple(entries or ())
            known = texts.get(headers)
            if known is None:
                for name, value in headers:
                    if value is None:
                        raise InvalidPublicationError(f"column 'headers': {name!r} is null, metadata is text")
                    if "\x00" in name or "\x00" in value:
                        raise InvalidPublicationError(
                            f"column 'headers': {name!r} holds a NUL character, which PostgreSQL text cannot store"
                        )
                known = texts[headers] = _json({**dict(headers), **self.headers}).encode()
            encoded.append(known)
        return pa.array(encoded, pa.binary())


def _json(metadata: Mapping[str, str]) -> str:
    return json.dumps(dict(metadata), ensure_ascii=False, separators=(",", ":"))


def _lengths(column: Any, *, null: int = 0) -> Any:
    return _big_endian(_numbers("i", pc.binary_length(column).fill_null(null).cast(pa.int32())))


def _numbers(code: str, column: Any) -> array[int]:
    numbers = array(code)
    width = numbers.itemsize
    numbers.frombytes(memoryview(column.buffers()[1])[column.offset * width : (column.offset + len(column)) * width])
    return numbers


def _big_endian(numbers: array[int]) -> Any:
    if byteorder == "little":
        numbers.byteswap()
    width = pa.binary(numbers.itemsize)
    return pa.Array.from_buffers(width, len(numbers), [None, pa.py_buffer(numbers.tobytes())]).cast(pa.binary())


def _content(column: Any) -> bytes:
    """The bytes of all rows of a binary column."""
    _, offsets, content = column.buffers()
    (first, last) = (struct.unpack_from("=i", offsets, 4 * (column.offset + row))[0] for row in (0, len(column)))
    return memoryview(content)[first:last].tobytes()


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


def keys_of(column: Any, rows: int) -> Any:
    """The checked keys of a batch of `rows` rows. `column` is None if the batch has no keys."""
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
        # Spark accepts any bytes as a string.
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise InvalidPublicationError(f"column {name!r}: one is not valid UTF-8 text") from None
    return column
