"""Ranges of topics' logs as Arrow record batches.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor, which take longer to load than a small
range takes to read.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types
from adbc_driver_manager import Error

from eventsql_orchestration.database.binary import microseconds
from eventsql_orchestration.database.log_names import holds_blocks
from eventsql_orchestration.errors import DatabaseError, DataLossError
from eventsql_orchestration.model import FIRST_TIME, LAST_TIME, OffsetRange
from eventsql_orchestration.spark.adbc import CopyConnection, behind, read_errors
from eventsql_orchestration.spark.blocks import flatten, parts
from eventsql_orchestration.spark.json_values import ValueDecoder
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.shards import ReadShard, naming
from eventsql_orchestration.storage import copy_out
from eventsql_orchestration.validation import json_object

logger = logging.getLogger(__name__)

_UNDEFINED_TABLE: Final = "42P01"

_YEAR_2000: Final = 946_684_800_000_000

_TIMES: Final = struct.pack(
    "=3q", *(_YEAR_2000 + each for each in (microseconds(FIRST_TIME), microseconds(LAST_TIME), -(2**63) - 1))
)
"""In µs since 1970: the first and the last time of an event, and PostgreSQL's `infinity` as ADBC gives it, which is
2^63 - 1 µs since 2000 and overflows."""

_TEXT_MAP: Final = pa.map_(pa.string(), pa.string())

TYPES: Final[Mapping[str, pa.DataType]] = MappingProxyType(
    {
        "key": pa.string(),
        "value": pa.binary(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "headers": _TEXT_MAP,
        "shard": pa.string(),
    }
)
"""The Arrow types of a read's columns. `topic` and `shard` are the same within a piece and are not fetched."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A range that a task reads, its table, and the offset of its first event when the read was planned.

    `rows` are SQL conditions that its events must meet. `shard` is its shard, if there are several databases. `created`
    is the time when its topic was created: a topic of the same name that was created later has another log. `end` is
    the offset of the next piece's first event or, in the last piece, of the last event: a server that has it has the
    whole piece, and a standby that is behind lacks it.
    """

    offsets: OffsetRange
    table: str
    first: int
    rows: Sequence[str] = ()
    shard: ReadShard | None = None
    created: datetime | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """The columns to read, from the columns in `TYPES`, and the decoder of `value`, if there is one.

    Missing events are an error unless `fail_on_data_loss` is false.
    """

    columns: Sequence[str]
    decoder: ValueDecoder | None = None
    fail_on_data_loss: bool = True

    @property
    def fetched(self) -> list[str]:
        """The columns that come from the log."""
        names = [name for name in self.columns if name in copy_out.COLUMNS]
        if self.decoder is not None and self.decoder.fail_fast and "offset" not in names:
            # Errors name the event by its offset.
            names.append("offset")
        return names or ["offset"]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema. All columns are nullable, as in Spark."""
        types = dict(TYPES)
        if self.decoder is not None:
            types["value"] = self.decoder.type
        return pa.schema([pa.field(name, types[name]) for name in self.columns])


def read_batches(source: Source, pieces: Iterable[Piece], wanted: Projection) -> Iterator[pa.RecordBatch]:
    """The events of ranges, in order within each range.

    Raises `DatabaseUnavailableError` if the server goes away, also in mid-read, `DatabaseError` if it refuses the read
    or is a standby that is behind, `DataLossError` if retention has dropped events since the read was planned, and
    `ValidationError` for a value that cannot be decoded.
    """
    # A task has one connection at a time, however many shards it reads.
    for shard, of_shard in groupby(pieces, key=attrgetter("shard")):
        with naming(shard):
            yield from _read_database(source if shard is None else shard.alone(source), of_shard, wanted)


def _read_database(source: Source, pieces: Iterable[Piece], wanted: Projection) -> Iterator[pa.RecordBatch]:
    with ExitStack() as opened:
        connection = None
        for piece in pieces:
            with read_errors(source, piece.offsets):
                if connection is None:
                    connection = opened.enter_context(CopyConnection(source.dsn))
                yield from _read_piece(connection, source, piece, wanted)
                connection.commit()


def _read_piece(
    connection: CopyConnection, source: Source, piece: Piece, wanted: Projection
) -> Iterator[pa.RecordBatch]:
    fetched, schema, topic = wanted.fetched, wanted.schema, piece.offsets.topic
    # One snapshot for all statements: a segment might be detached between them.
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    # Times without a zone are in UTC: EventSQL's Java library makes such tables.
    connection.execute("SET LOCAL TIME ZONE 'UTC'")
    gone = DatabaseError(
        f"{piece.offsets} could not be read: topic {topic!r} was deleted, or its log got another form, after the read "
        "was planned: load it again"
    )
    if piece.created is not None and not _rows(connection, copy_out.topic_query(source.schema, topic, piece.created)):
        raise gone
    try:
        complete = all(
            _rows(connection, copy_out.event_query(source.schema, piece.table, offset))
            for offset in {piece.first, piece.end or piece.first}
        )
    except Error as error:
        if error.sqlstate != _UNDEFINED_TABLE:
            raise
        raise gone from error
    if not complete:
        if _floor(connection, source.schema, topic) <= piece.first:
            raise behind(piece.offsets, "events")
        # From here on, this transaction keeps its segment and all later segments from being dropped.
        report_loss(
            f"events from offset {piece.first} on of topic {topic!r} were dropped after the read of "
            f"{piece.offsets} was planned",
            fail=wanted.fail_on_data_loss,
            shard=piece.shard,
        )
    same = {"topic": topic, "shard": None if piece.shard is None else piece.shard.name}
    for batch in _events(connection, source, piece, fetched):
        if batch.num_rows:
            found = dict(zip(fetched, batch.columns, strict=True))
            if wanted.decoder is not None and "value" in found:
                offsets = found["offset"].to_pylist() if wanted.decoder.fail_fast else None
                found["value"] = wanted.decoder.decode(found["value"], topic, offsets)
            for name in same.keys() & set(wanted.columns):
                found[name] = _repeated(same[name], batch.num_rows)
            if "timestamp" in found:
                found["timestamp"] = _known_times(found["timestamp"])
            if "headers" in found:
                found["headers"] = _maps(found["headers"])
            arrays = [found[field.name].cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _repeated(text: str | None, count: int) -> pa.Array:
    if text is None:
        return pa.nulls(count, pa.string())
    # To convert a Python object, pyarrow loads pandas: 0.2 s of work for each of Spark's processes.
    encoded = text.encode()
    bounds = pa.py_buffer(struct.pack("=2i", 0, len(encoded)))
    return pa.repeat(pa.StringArray.from_buffers(1, bounds, pa.py_buffer(encoded))[0], count)


def _floor(connection: CopyConnection, schema: str, topic: str) -> int:
    """As `segments.floor`, in the task's transaction."""
    # Loaded only here, so that tasks that find all their events start faster.
    from eventsql_orchestration.storage.log_queries import LogQueries  # noqa: PLC0415
    from eventsql_orchestration.storage.segments import Segment, first_kept  # noqa: PLC0415

    query = LogQueries("segments", schema)("segments", topic=topic).as_string()
    rows = (zip(*(column.to_pylist() for column in batch.columns), strict=True) for batch in connection.batches(query))
    return first_kept(Segment(*row) for row in chain.from_iterable(rows))


def _rows(connection: CopyConnection, query: str) -> int:
    return sum(batch.num_rows for batch in connection.batches(query))


def _events(
    connection: CopyConnection, source: Source, piece: Piece, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    if holds_blocks(piece.table) and not piece.rows:
        blocks = copy_out.blocks_query(source.schema, piece.table, piece.offsets, columns)
        for batch in connection.batches(blocks):
            for part in parts(batch):
                yield flatten(part, piece.offsets, columns)
        return
    # filters.py has written the values of `rows` as literals.
    query = copy_out.range_query(source.schema, piece.table, piece.offsets, columns, rows=piece.rows)
    yield from connection.batches(query)


def _known_times(times: pa.Array) -> pa.Array:
    """The times, each as the nearest that an `Event` has: other programs may write any time."""
    # Without Python's objects: see `_repeated`.
    first, last, infinity = pa.Int64Array.from_buffers(pa.int64(), 3, [None, pa.py_buffer(_TIMES)])
    numbers = times.cast(pa.int64())
    numbers = pc.if_else(pc.equal(numbers, infinity), last, numbers)
    return pc.max_element_wise(pc.min_element_wise(numbers, last), first).cast(TYPES["timestamp"])


def report_loss(what: str, *, fail: bool, shard: ReadShard | None) -> None:
    """Raise `DataLossError`, to which the caller adds the shard, or log a warning unless loss is to `fail`."""
    if fail:
        raise DataLossError(f"{what}: set failOnDataLoss to false to read the events that are left")
    where = "" if shard is None else f"shard {shard.name!r}: "
    logger.warning("%s%s; the read goes on with the events that are left", where, what)


def _maps(texts: pa.Array) -> pa.Array:
    # Metadata repeats, so each distinct text is parsed once. Measured: 720,000 events/s if half of them differ, 270,000
    # if the server takes the JSON apart (json_each_text).
    encoded = texts.dictionary_encode()
    maps = [_entries(text) for text in encoded.dictionary.to_pylist()]
    return pc.take(pa.array(maps, type=_TEXT_MAP), encoded.indices)


def _entries(metadata: str) -> list[tuple[str, str | None]] | None:
    """The entries of metadata as texts. None if they are not a JSON object: another program may have written them."""
    found = json_object(metadata)
    if found is None:
        return None
    entries = [
        (name, value if value is None or isinstance(value, str) else json.dumps(value)) for name, value in found.items()
    ]
    if "\\ud" not in metadata.lower():
        return entries
    # JSON can name half of a character, and PostgreSQL stores it. Java also shows it as a question mark.
    return [(_unicode(name), None if value is None else _unicode(value)) for name, value in entries]


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()
