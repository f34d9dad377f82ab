"""Files and streams of events: JSON lines, CSV and Parquet, read one record at a time, and batches of a stream.

Each record is an event's value with the number of its line or row. A line or row without a value is a `BadRecord`, and
reading goes on after it. A file that cannot be read any further raises `InputError`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from eventsql_orchestration.cli.csv_input import CsvFile, CsvForm
from eventsql_orchestration.cli.sources import BOM, CHUNK_BYTES, BadRecord, File, Record, Source, lines, parse
from eventsql_orchestration.errors import InputError, MissingExtraError, ValidationError
from eventsql_orchestration.validation import MAX_VALUE_BYTES

Item = TypeVar("Item")

_PAUSE: Final = 0.2
"""Seconds without input after which the events so far are published."""

_LINGER: Final = 0.5
"""Maximum seconds that an event of a stream waits for its batch to fill."""


def batches(items: Iterable[Item | None], most: int) -> Iterator[list[Item]]:
    """The items of a stream in batches of at most `most`. None stands for a moment without input, and ends a batch.

    The items before an `InputError` are a batch, too: the user corrects the line and goes on from there.
    """
    batch, since = list[Item](), 0.0
    try:
        for item in items:
            if item is not None:
                since = since if batch else monotonic()
                batch.append(item)
            if batch and (len(batch) >= most or item is None or monotonic() - since >= _LINGER):
                yield batch
                batch = []
    except InputError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _json_records(found: Iterable[bytes | None]) -> Iterator[Record | BadRecord | None]:
    number = 0
    for line in found:
        if line is None:
            yield None
            continue

        number += 1
        if len(line) > MAX_VALUE_BYTES:
            yield BadRecord(number, f"longer than the {MAX_VALUE_BYTES:,} bytes that an event may have")
            continue
        value = line.removesuffix(b"\r")
        if number == 1:
            value = value.removeprefix(BOM)
        if not value.strip():
            continue
        try:
            yield Record(number, value, parse(value))
        except ValueError as error:
            yield BadRecord(number, str(error))


class StandardInput(Source):
    """JSON lines from a pipe, a terminal or a redirected file, as they come."""

    def __init__(self) -> None:
        super().__init__("standard input")

    def records(self) -> Iterator[Record | BadRecord | None]:
        return _json_records(self.lines())

    def lines(self) -> Iterator[bytes | None]:
        """The lines, and None after a moment without input. Raises `InputError`."""
        try:
            yield from lines(self._chunks())
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def _chunks(self) -> Iterator[bytes | None]:
        if sys.stdin is None:
            raise InputError(f"{self.name} is closed: connect it to a pipe or a file")
        stream = sys.stdin.buffer
        try:
            descriptor = stream.fileno()
        except OSError:
            # Input that is not a file of the operating system is already complete.
            yield from iter(partial(stream.read, CHUNK_BYTES), b"")
            return
        while True:
            if not select.select([descriptor], [], [], _PAUSE)[0]:
                yield None
            elif chunk := os.read(descriptor, CHUNK_BYTES):
                yield chunk
            else:
                return


class JsonLinesFile(File):
    """A file with one JSON value on each line. Empty lines count as lines, but not as events."""

    def records(self) -> Iterator[Record | BadRecord | None]:
        return _json_records(lines(self._chunks()))


class ParquetFile(Source):
    """A Parquet file. Each row becomes a JSON object. Times are ISO 8601, decimals text, bytes base64."""

    unit = "row"

    def __init__(self, path: Path, stack: ExitStack) -> None:
        try:
            import pyarrow  # type: ignore[import-untyped]  # noqa: PLC0415 - it has no types; an extra brings it
            import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: PLC0415 - as above
        except ModuleNotFoundError as error:
            raise MissingExtraError("spark", "reading Parquet") from error
        super().__init__(str(path))
        self._unreadable: tuple[type[Exception], ...] = (OSError, pyarrow.ArrowException)
        try:
            self._file: Any = stack.enter_context(pyarrow.parquet.ParquetFile(path))
        except self._unreadable as error:
            raise InputError(f"{path} cannot be read: {error}") from error
        self.total = self._file.metadata.num_rows
        self._read = 0

    def position(self) -> int:
        return self._read

    def records(self) -> Iterator[Record | BadRecord | None]:
        try:
            for batch in self._file.iter_batches(batch_size=10_000):
                # Read row by row: a value that Python cannot hold spoils only its own row.
                for position in range(batch.num_rows):
                    self._read += 1
                    yield self._record(batch, position)
        except self._unreadable as error:
            raise InputError(f"{self.name} cannot be read after row {self._read}: {error}") from error

    def _record(self, batch: Any, position: int) -> Record | BadRecord:
        try:
            content = {
                name: column[position].as_py(maps_as_pydicts="strict")
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            value = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_as_json).encode()
        except (ValueError, KeyError, TypeError) as error:
            return BadRecord(self._read, f"not a JSON object: {error}")
        return Record(self._read, value, parse(value))


def _as_json(value: object) -> object:
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_FORMATS: Final[dict[str, type[JsonLinesFile | CsvFile | ParquetFile]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JsonLinesFile),
    **dict.fromkeys((".csv", ".tsv"), CsvFile),
    ".parquet": ParquetFile,
}


@contextmanager
def open_source(path: Path | None, form: CsvForm) -> Iterator[Source]:
    """Open a file by the ending of its name, or standard input for None. `form` is for CSV alone.

    Raises `ValidationError` for an unknown ending, or for a form of a file that is not CSV, `MissingExtraError`,
    `InputError`.
    """
    ending = Path("" if path is None else path.name.lower().removesuffix(".gz")).suffix
    kind = _FORMATS.get(ending)
    if kind is not CsvFile and form != CsvForm():
        raise ValidationError(
            "a delimiter and types of fields are for a --file that ends in .csv or .tsv, also with .gz"
        )
    if path is None:
        yield StandardInput()
        return
    if kind is None or (kind is ParquetFile and path.name.lower().endswith(".gz")):
        raise ValidationError(
            f"{path} has no known ending: use .jsonl, .json, .ndjson, .csv or .tsv, also with .gz, or .parquet, "
            "or send JSON lines to standard input"
        )
    with ExitStack() as stack:
        yield CsvFile(path, stack, form) if issubclass(kind, CsvFile) else kind(path, stack)


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
