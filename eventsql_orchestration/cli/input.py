"""Files and streams of events: JSON lines, CSV and Parquet, read one record at a time.

Each record is an event's value with the number of its line or row. A line or row without a value is a `BadRecord`, and
reading goes on after it. A file that cannot be read any further raises `InputError`.
"""

from __future__ import annotations

import base64
import csv
import gzip
import json
import os
import re
import select
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, cast

from eventsql_orchestration.errors import InputError, MissingExtraError, ValidationError
from eventsql_orchestration.validation import MAX_VALUE_BYTES

_CHUNK_BYTES: Final = 256 * 1024

_PAUSE: Final = 0.2
"""Seconds without input after which the events so far are published."""

_BOM: Final = b"\xef\xbb\xbf"

_NOT_UTF8: Final = re.compile("[\ud800-\udfff]")
"""The characters that stand for bytes that are not UTF-8."""

_SHOWN: Final = 40
"""Characters of a bad field that its error shows."""

_UNREADABLE: Final = (OSError, EOFError, zlib.error)
"""Errors of a bad disk, and of a gzip file that is bad or cut off."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event's value, and its `content` with numbers in their written form. `number` counts from 1."""

    number: int
    value: bytes
    content: object


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that is no event, and the reason."""

    number: int
    reason: str


class Source(ABC):
    """A source of records. `total` and `position()` have the same unit, bytes or rows, for a progress bar."""

    unit: Literal["line", "row"] = "line"
    total: int | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def position(self) -> int:
        return 0

    @abstractmethod
    def records(self) -> Iterator[Record | BadRecord | None]:
        """The records, and None after a moment without input. Raises `InputError`."""


# JSON


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


# Numbers stay in their written form: a key keeps its spelling, and a number may have any number of digits.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse_constant)


def _parse(line: bytes) -> object:
    """The JSON value of a line. Raises `ValueError` with the fault of the line."""
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Lines


def _lines(chunks: Iterable[bytes | None]) -> Iterator[bytes | None]:
    """Lines without their line feed, and None for a pause.

    A line that is too long for an event's value keeps only its first bytes: one more than the limit.
    """
    limit = MAX_VALUE_BYTES + 1
    line = bytearray()
    for chunk in chunks:
        if chunk is None:
            yield None
            continue

        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line += end[: limit - len(line)]
            yield bytes(line)
            line.clear()
        line += rest[: limit - len(line)]
    if line:
        yield bytes(line)


def _json_records(chunks: Iterable[bytes | None]) -> Iterator[Record | BadRecord | None]:
    number = 0
    for line in _lines(chunks):
        if line is None:
            yield None
            continue

        number += 1
        if len(line) > MAX_VALUE_BYTES:
            yield BadRecord(number, f"longer than the {MAX_VALUE_BYTES:,} bytes that an event may have")
            continue
        value = line.removesuffix(b"\r")
        if number == 1:
            value = value.removeprefix(_BOM)
        if not value.strip():
            continue
        try:
            yield Record(number, value, _parse(value))
        except ValueError as error:
            yield BadRecord(number, str(error))


class StandardInput(Source):
    """JSON lines from a pipe, a terminal or a redirected file, as they come."""

    def records(self) -> Iterator[Record | BadRecord | None]:
        try:
            yield from _json_records(self._chunks())
        except OSError as error:
            raise InputError(f"{self.name} cannot be read: {error.strerror or error}") from error

    def _chunks(self) -> Iterator[bytes | None]:
        if sys.stdin is None:
            raise InputError(f"{self.name} is closed: name a file with --file")
        stream = sys.stdin.buffer
        try:
            descriptor = stream.fileno()
        except OSError:
            # Input that is not a file of the operating system is already complete.
            yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
            return
        while True:
            if not select.select([descriptor], [], [], _PAUSE)[0]:
                yield None
            elif chunk := os.read(descriptor, _CHUNK_BYTES):
                yield chunk
            else:
                return


class _File(Source):
    """A file that is read as bytes, through gzip if its name ends in `.gz`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        super().__init__(str(path))
        try:
            self._raw = stack.enter_context(path.open("rb"))
            self.total = os.fstat(self._raw.fileno()).st_size or None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        self._content: BinaryIO = self._raw
        if path.suffix.lower() == ".gz":
            self._content = stack.enter_context(cast("BinaryIO", gzip.GzipFile(fileobj=self._raw)))

    def position(self) -> int:
        return self._raw.tell()

    def _chunks(self) -> Iterator[bytes]:
        try:
            yield from iter(partial(self._content.read, _CHUNK_BYTES), b"")
        except _UNREADABLE as error:
            raise InputError(f"{self.name} cannot be read to its end: {error}") from error


class JsonLinesFile(_File):
    """A file with one JSON value on each line. Empty lines count as lines, but not as events."""

    def records(self) -> Iterator[Record | BadRecord | None]:
        return _json_records(self._chunks())


def _as_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_integer(text: str) -> str:
    if not _INTEGER.fullmatch(text):
        raise ValueError("no integer")
    return text


def _as_number(text: str) -> str:
    if not _NUMBER.fullmatch(text):
        raise ValueError("no number")
    return text


def _as_boolean(text: str) -> str:
    written = _BOOLEANS.get(text.lower())
    if written is None:
        raise ValueError("neither true nor false")
    return written


def _as_nested(text: str) -> str:
    try:
        _parse(text.encode())
    except ValueError as error:
        raise ValueError("no JSON") from error
    return text


_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(_INTEGER.pattern + r"(\.[0-9]+)?([eE][+-]?[0-9]+)?")

_BOOLEANS: Final = {"true": "true", "t": "true", "false": "false", "f": "false"}
"""PostgreSQL writes t and f."""

_TYPES: Final[Mapping[str, Callable[[str], str]]] = {
    "text": _as_text,
    "integer": _as_integer,
    "number": _as_number,
    "boolean": _as_boolean,
    "json": _as_nested,
}
"""The JSON of a field of each type. A number keeps its written form, and so every digit."""


@dataclass(frozen=True, slots=True)
class CsvForm:
    """The form of a CSV file: the delimiter of its fields, and the types of those that are no text.

    Without a delimiter, it is the tab in a file that ends in .tsv, and the comma otherwise. A field of another type
    than text may be surrounded by spaces; an empty one is null. Raises `ValidationError`.
    """

    delimiter: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise ValidationError(f"{self.delimiter!r} is no delimiter: take one character, or tab")
        for name, kind in self.types.items():
            if kind not in _TYPES:
                raise ValidationError(f"{kind!r} is no type for field {name!r}: take {', '.join(_TYPES)}")


class CsvFile(_File):
    """A CSV file with a header. Each row becomes a JSON object of texts, and of the types that its form names."""

    def __init__(self, path: Path, stack: ExitStack, form: CsvForm) -> None:
        super().__init__(path, stack)
        is_tabbed = path.name.lower().removesuffix(".gz").endswith(".tsv")
        self._delimiter = form.delimiter or ("\t" if is_tabbed else ",")
        self._types = form.types

    def records(self) -> Iterator[Record | BadRecord | None]:
        csv.field_size_limit(MAX_VALUE_BYTES)
        rows = csv.reader(self._text_lines(), strict=True, delimiter=self._delimiter)
        header: list[str] | None = None
        while True:
            number = rows.line_num + 1
            try:
                row = next(rows)
                if header is None:
                    header = self._header(row, number)
                elif row:
                    yield self._record(number, header, row)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise InputError(f"{self.name}, line {number}: {error}") from error
                yield BadRecord(number, str(error))

    def _text_lines(self) -> Iterator[str]:
        for number, line in enumerate(_lines(self._chunks()), start=1):
            assert line is not None, "a file has no pauses"
            if len(line) > MAX_VALUE_BYTES:
                raise InputError(f"{self.name}, line {number}: longer than {MAX_VALUE_BYTES:,} bytes")
            # The row reports text that is not UTF-8: an error here would end the reading.
            text = (line.removeprefix(_BOM) if number == 1 else line).decode(errors="surrogateescape")
            yield f"{text}\n"

    def _header(self, row: list[str], number: int) -> list[str] | None:
        for name in row:
            if not name.strip():
                raise InputError(f"{self.name}, line {number}: the header has a column without a name")
            if row.count(name) > 1:
                raise InputError(f"{self.name}, line {number}: the header names {name!r} twice")
            if _NOT_UTF8.search(name):
                raise InputError(f"{self.name}, line {number}: the header is not UTF-8")
        missing = [name for name in self._types if row and name not in row]
        if missing:
            raise InputError(f"{self.name}, line {number}: the header has no field {missing[0]!r} for its type")
        return row or None

    def _record(self, number: int, header: list[str], row: list[str]) -> Record | BadRecord:
        if len(row) != len(header):
            return BadRecord(number, f"{len(row)} fields, the header has {len(header)}")

        fields = []
        for name, text in zip(header, row, strict=True):
            if _NOT_UTF8.search(text):
                return BadRecord(number, f"field {name!r} is not UTF-8")
            try:
                fields.append(f"{_as_text(name)}: {self._encoded(name, text)}")
            except ValueError as error:
                return BadRecord(number, f"field {name!r} is {error}: {text[:_SHOWN]!r}")

        value = f"{{{', '.join(fields)}}}".encode()
        if not self._types:
            return Record(number, value, dict(zip(header, row, strict=True)))
        try:
            return Record(number, value, _parse(value))
        except ValueError as error:
            return BadRecord(number, str(error))

    def _encoded(self, name: str, text: str) -> str:
        kind = self._types.get(name, "text")
        if kind == "text":
            return _as_text(text)
        return _TYPES[kind](text.strip()) if text.strip() else "null"


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
            return BadRecord(self._read, f"no JSON object: {error}")
        return Record(self._read, value, _parse(value))


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

    Raises `ValidationError` for an unknown ending, or for a form of a file that is no CSV, `MissingExtraError`,
    `InputError`.
    """
    ending = Path("" if path is None else path.name.lower().removesuffix(".gz")).suffix
    kind = _FORMATS.get(ending)
    if kind is not CsvFile and form != CsvForm():
        raise ValidationError(
            "a delimiter and types of fields are for a --file that ends in .csv or .tsv, also with .gz"
        )
    if path is None:
        yield StandardInput("standard input")
        return
    if kind is None or (kind is ParquetFile and path.name.lower().endswith(".gz")):
        raise ValidationError(
            f"{path} has no known ending: take .jsonl, .json, .ndjson, .csv or .tsv, also with .gz, or .parquet, "
            "or send JSON lines to standard input"
        )
    with ExitStack() as stack:
        yield CsvFile(path, stack, form) if issubclass(kind, CsvFile) else kind(path, stack)


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
