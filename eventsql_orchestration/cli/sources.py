"""Records of files: an event's value, or the reason why a line has none."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from eventsql_orchestration.errors import InputError
from eventsql_orchestration.validation import MAX_VALUE_BYTES

CHUNK_BYTES: Final = 256 * 1024

BOM: Final = b"\xef\xbb\xbf"

UNREADABLE: Final = (OSError, EOFError, zlib.error)
"""Errors of a bad disk, and of a gzip file that is bad or cut off."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event's value, and its `content` with numbers in their written form. `number` counts from 1."""

    number: int
    value: bytes
    content: object


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that is not an event, and the reason."""

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


def parse(line: bytes) -> object:
    """The JSON value of a line. Raises `ValueError` with the fault of the line."""
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        unfinished = error.pos >= len(error.doc.rstrip())
        hint = ", where the line ends: write each value on one line" if unfinished else ""
        raise ValueError(f"not JSON: {error.msg} at column {error.pos + 1}{hint}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Lines


def lines(chunks: Iterable[bytes | None]) -> Iterator[bytes | None]:
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


class File(Source):
    """A file that is read as bytes, through gzip if its name ends in `.gz`."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        super().__init__(str(path))
        try:
            self._raw = stack.enter_context(path.open("rb"))
            self.total = os.fstat(self._raw.fileno()).st_size or None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        self._content: io.BufferedIOBase = self._raw
        if path.suffix.lower() == ".gz":
            self._content = stack.enter_context(gzip.GzipFile(fileobj=self._raw))

    def position(self) -> int:
        return self._raw.tell()

    def _chunks(self) -> Iterator[bytes]:
        try:
            # `read` waits for all of these bytes without a look at signals: Ctrl-C would wait for more input.
            yield from iter(partial(self._content.read1, CHUNK_BYTES), b"")
        except UNREADABLE as error:
            raise InputError(f"{self.name} cannot be read to its end: {error}") from error
