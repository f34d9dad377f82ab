"""Files and streams of events: JSON lines, CSV and Parquet, read one record at a time.

Each record is an event's value with the number of its line or row. What cannot be one is a `BadRecord`, and reading goes
on behind it; a file that cannot be read any further raises `InputError`.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import select
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, Protocol, cast

import click

from eventsql_orchestration.errors import EventSQLError, MissingExtraError, ValidationError
from eventsql_orchestration.model import MAX_VALUE_BYTES

_CHUNK_BYTES: Final = 256 * 1024

_PAUSE: Final = 0.2
"""Seconds without input after which what has come so far is published."""

_BOM: Final = b"\xef\xbb\xbf"

_UNREADABLE: Final = (OSError, EOFError, zlib.error)
"""What reading raises for a bad disk and for a bad or cut off gzip file."""

Unit = Literal["line", "row"]


class InputError(EventSQLError):
    """A file cannot be read, or holds what is not an event."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event's value; `content` is what it says, with numbers as they are written. `number` counts from 1."""

    number: int
    value: bytes
    content: object


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that is no event, and why."""

    number: int
    reason: str


class Pause:
    """Nothing has come for a moment."""


PAUSE: Final = Pause()


class Source(Protocol):
    """Where records come from. `total` and `position()` are in the same unit, bytes or rows, for a progress bar."""

    name: str
    unit: Unit
    total: int | None

    def position(self) -> int: ...

    def records(self) -> Iterator[Record | BadRecord | Pause]:
        """Raises `InputError`."""
        ...


# JSON


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


# Numbers stay as they are written: a key must not change its spelling, and a number may have any number of digits.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse_constant)


def _parse(line: bytes) -> object:
    """The JSON value of a line; raises `ValueError` that says what is wrong with it."""
    try:
        return _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Lines


class _TooLong:
    """Stands for a line that is longer than an event's value may be."""


_TOO_LONG: Final = _TooLong()


def _lines(chunks: Iterable[bytes | Pause]) -> Iterator[bytes | _TooLong | Pause]:
    """Lines without their line feed; of one that is too long nothing is kept."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        if isinstance(chunk, Pause):
            yield chunk
            continue
        first, *others = chunk.split(b"\n")
        for piece in (first, None, *_between(others)):
            if piece is None:
                if others:
                    yield b"".join(parts) if size <= MAX_VALUE_BYTES else _TOO_LONG
                    parts, size = [], 0
                continue
            size += len(piece)
            if size <= MAX_VALUE_BYTES:
                parts.append(piece)
            else:
                parts.clear()
    if size:
        yield b"".join(parts) if size <= MAX_VALUE_BYTES else _TOO_LONG
