"""CSV files: each row becomes a JSON object, with the types that its form names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from eventsql_orchestration.cli.sources import BOM, BadRecord, File, Record, lines, parse
from eventsql_orchestration.errors import InputError, ValidationError
from eventsql_orchestration.validation import MAX_VALUE_BYTES, counted

_NOT_UTF8: Final = re.compile("[\ud800-\udfff]")
"""The characters that stand for bytes that are not UTF-8."""

_SHOWN: Final = 40
"""Characters of a bad field that its error shows."""


def _as_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_it_is(text: str, form: re.Pattern[str], what: str) -> str:
    if not form.fullmatch(text):
        raise ValueError(f"not {what}")
    return text


def _as_boolean(text: str) -> str:
    written = _BOOLEANS.get(text.lower())
    if written is None:
        raise ValueError("neither true nor false")
    return written


def _as_nested(text: str) -> str:
    try:
        parse(text.encode())
    except ValueError as error:
        raise ValueError("not JSON") from error
    return text


_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(_INTEGER.pattern + r"(\.[0-9]+)?([eE][+-]?[0-9]+)?")

_BOOLEANS: Final = {"true": "true", "t": "true", "false": "false", "f": "false"}
"""PostgreSQL writes t and f."""

_TYPES: Final[Mapping[str, Callable[[str], str]]] = {
    "text": _as_text,
    "integer": partial(_as_it_is, form=_INTEGER, what="an integer"),
    "number": partial(_as_it_is, form=_NUMBER, what="a number"),
    "boolean": _as_boolean,
    "json": _as_nested,
}
"""The JSON of a field of each type. A number keeps its written form, and so every digit."""


@dataclass(frozen=True, slots=True)
class CsvForm:
    """The form of a CSV file: the delimiter of its fields, and the types of fields that are not text.

    Without a delimiter, it is the tab in a file that ends in .tsv, and the comma otherwise. A field of another type
    than text may be surrounded by spaces; an empty field is null. Raises `ValidationError`.
    """

    delimiter: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise ValidationError(f"{self.delimiter!r} is not a delimiter: use one character, or tab")
        for name, kind in self.types.items():
            if kind not in _TYPES:
                raise ValidationError(f"{kind!r} is not a type for field {name!r}: use {', '.join(_TYPES)}")


class CsvFile(File):
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
        for number, line in enumerate(lines(self._chunks()), start=1):
            assert line is not None, "a file has no pauses"
            if len(line) > MAX_VALUE_BYTES:
                raise InputError(f"{self.name}, line {number}: longer than {MAX_VALUE_BYTES:,} bytes")
            # The row reports text that is not UTF-8: an error here would end the reading.
            text = (line.removeprefix(BOM) if number == 1 else line).decode(errors="surrogateescape")
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
            return BadRecord(number, f"{counted(len(row), 'field')}, the header has {len(header)}")

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
            return Record(number, value, parse(value))
        except ValueError as error:
            return BadRecord(number, str(error))

    def _encoded(self, name: str, text: str) -> str:
        kind = self._types.get(name, "text")
        if kind == "text":
            return _as_text(text)
        return _TYPES[kind](text.strip()) if text.strip() else "null"
