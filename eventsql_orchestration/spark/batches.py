"""Ranges of topics' logs as Arrow record batches, read with COPY by ADBC.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor, which take longer to load than a small
range takes to read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import adbc_driver_manager
import psycopg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it has no types
from psycopg import sql

from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError, DataLossError
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange
from eventsql_orchestration.qualification import qualified
from eventsql_orchestration.spark.copying import CopyConnection, RefusedError
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.shards import Shard, naming
from eventsql_orchestration.spark.values import ValueDecoder

logger = logging.getLogger(__name__)

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
"""The columns of a read, as Spark wants them in Arrow. `topic` and `shard` are the same in every row of a piece and are
not fetched."""

_EXPRESSIONS: Final = {
    "key": sql.SQL("eql_key"),
    "value": sql.SQL("eql_value"),
    "partition": sql.SQL("eql_partition"),
    "offset": sql.SQL("eql_id"),
    "timestamp": sql.SQL("eql_buffered_at::timestamptz"),
    # As JSON it would come as an extension type.
    "headers": sql.SQL("eql_metadata::text"),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A range that a task reads, the table of its events, and its first event when the read was planned.

    Of its events, those are given that meet all of `rows`, which are SQL. `shard` says in which of several databases
    they are.
    """

    offsets: OffsetRange
    table: str
    first: int
    rows: Sequence[str] = ()
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class Projection:
    """What is read of each event: these columns of `TYPES`.

    `value` is decoded where there is a decoder. Events that are gone are an error, unless `fail_on_data_loss` is false.
    """

    columns: Sequence[str]
    decoder: ValueDecoder | None = None
    fail_on_data_loss: bool = True

    @property
    def fetched(self) -> list[str]:
        """The columns that come from the log."""
        names = [name for name in self.columns if name in _EXPRESSIONS]
        if self.decoder is not None and self.decoder.fail_fast and "offset" not in names:
            # An error names the event.
            names.append("offset")
        return names or ["offset"]

    @property
    def schema(self) -> pa.Schema:
        """All nullable, as Spark has them."""
        types = dict(TYPES)
        if self.decoder is not None:
            types["value"] = self.decoder.type
        return pa.schema([pa.field(name, types[name]) for name in self.columns])


def read_batches(source: Source, pieces: Iterable[Piece], wanted: Projection) -> Iterator[pa.RecordBatch]:
    """The events of ranges, those of each in their order.

    Raises `DatabaseUnavailableError` when the server goes away, also in mid-read, and `DatabaseError` when it refuses;
    `DataLossError` where retention has dropped events since the read was planned; `ValidationError` for a value that
    cannot be decoded.
    """
    # One connection at a time, however many shards a task reads.
    for shard, of_shard in groupby(pieces, key=attrgetter("shard")):
        with naming(shard):
            yield from _read_database(source if shard is None else shard.alone(source), of_shard, wanted)


def _read_database(source: Source, pieces: Iterable[Piece], wanted: Projection) -> Iterator[pa.RecordBatch]:
    with ExitStack() as opened:
        connection = None
        for piece in pieces:
            with _errors(source, piece.offsets):
                if connection is None:
                    connection = opened.enter_context(CopyConnection(source.dsn))
                yield from _read_piece(connection, source, piece, wanted)
                connection.commit()


def _read_piece(
    connection: CopyConnection, source: Source, piece: Piece, wanted: Projection
) -> Iterator[pa.RecordBatch]:
    fetched, schema, topic = wanted.fetched, wanted.schema, piece.offsets.topic
    # One snapshot: a segment that is being detached could otherwise be there for the first statement alone.
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    # Times without a zone, of a topic that EventSQL's Java library made, are in UTC.
    connection.execute("SET LOCAL TIME ZONE 'UTC'")
    if not sum(batch.num_rows for batch in connection.batches(_first_query(source, piece))):
        # From here on its segment cannot be dropped, and neither can a later one.
        report_loss(
            f"events from offset {piece.first} on of topic {topic!r} were dropped after the read of "
            f"{piece.offsets} was planned",
            fail=wanted.fail_on_data_loss,
            shard=piece.shard,
        )
    for batch in connection.batches(_query(source, piece, fetched)):
        if batch.num_rows:
            found = dict(zip(fetched, batch.columns, strict=True))
            if wanted.decoder is not None and "value" in found:
                offsets = found["offset"].to_pylist() if wanted.decoder.fail_fast else None
                found["value"] = wanted.decoder.decode(found["value"], topic, offsets)
            same = {"topic": topic, "shard": None if piece.shard is None else piece.shard.name}
            arrays = [
                _constant(same[name], schema.field(name).type, batch.num_rows)
                if name in same
                else _column(name, found[name], schema.field(name).type)
                for name in wanted.columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def report_loss(what: str, *, fail: bool, shard: Shard | None) -> None:
    """Raises `DataLossError`, which the caller gives the shard's name, or logs a warning where it is no failure."""
    if fail:
        raise DataLossError(f"{what}; set failOnDataLoss to false to go on with what is left")
    where = "" if shard is None else f"shard {shard.name!r}: "
    logger.warning("%s%s; the read goes on with what is left", where, what)


def _first_query(source: Source, piece: Piece) -> str:
    return qualified(
        sql.SQL("SELECT eql_id FROM {} WHERE eql_id = {}").format(_log(source, piece), piece.first).as_string()
    )


def _query(source: Source, piece: Piece, fetched: Sequence[str]) -> str:
    offsets = piece.offsets
    # ADBC uses COPY only for queries without parameters, so the numbers are written into it.
    conditions: list[sql.Composable] = [
        sql.SQL("eql_id > {}").format(offsets.after),
        sql.SQL("eql_id <= {}").format(offsets.upto),
    ]
    if offsets.partition != NOT_PARTITIONED:
        conditions.append(sql.SQL("eql_partition = {}").format(offsets.partition))
    # Their values are literals already (filters.py).
    conditions += [sql.SQL(f"({row})") for row in piece.rows]
    return qualified(
        sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY eql_id")
        .format(
            sql.SQL(", ").join(_EXPRESSIONS[name] for name in fetched),
            _log(source, piece),
            sql.SQL(" AND ").join(conditions),
        )
        .as_string()
    )


def _log(source: Source, piece: Piece) -> sql.Identifier:
    return sql.Identifier(source.schema, piece.table)


def _constant(value: str | None, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)


def _column(name: str, found: Any, kind: pa.DataType) -> pa.Array:
    if name == "headers":
        return _maps(found)
    return found if found.type == kind else found.cast(kind)


def _maps(texts: pa.Array) -> pa.Array:
    # Much metadata repeats, and each different one is parsed once. Measured: 720,000 events/s where half of them
    # differ; letting the server take the JSON apart (json_each_text), 270,000.
    encoded = texts.dictionary_encode()
    parsed = [
        [(name, value if value is None or isinstance(value, str) else json.dumps(value)) for name, value in entries]
        for entries in (json.loads(text).items() for text in encoded.dictionary.to_pylist())
    ]
    return pc.take(pa.array(parsed, type=_TEXT_MAP), encoded.indices)


_NO_RIGHT: Final = "42501"
"""The SQLSTATE of a right that is missing."""


@contextmanager
def _errors(source: Source, offsets: OffsetRange) -> Iterator[None]:
    try:
        yield
    except (adbc_driver_manager.Error, psycopg.Error, RefusedError, pa.ArrowException, OSError) as error:
        raise translate(error, source, f"{offsets} could not be read") from error


def translate(error: Exception, source: Source, what: str) -> DatabaseError:
    """An error of ADBC, of Arrow over ADBC, or of a copy, as one of ours that says what it means for its user."""
    state = getattr(error, "sqlstate", None)
    said = str(error).strip()
    detail = next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, RefusedError) and (state is None or state.startswith(("08", "57P", "53"))):
        return DatabaseUnavailableError(f"{what}: {source.label} cannot be reached, or went away ({detail})")
    if state == _NO_RIGHT:
        # Loaded here alone: a task that may do its work does without it.
        from eventsql_orchestration.database.permissions import permission_error  # noqa: PLC0415

        return permission_error(detail.removeprefix("ERROR:").strip(), f"{what}: {source.label}", None, None)
    return DatabaseError(f"{what}: {source.label} refused ({detail})")
