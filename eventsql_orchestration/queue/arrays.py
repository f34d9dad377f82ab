"""Arrays of messages in PostgreSQL's binary format.

psycopg adapts each element of a list by itself. Measured for 100 messages: 0.6 ms of processor time, 0.05 ms with this.
A `SingleStatement` takes such an array as it is. A psycopg cursor takes it after `adapt_arrays`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, repeat
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

from eventsql_orchestration.database.binary import (
    ARRAY_HEADER,
    BIGINT,
    BYTEA,
    DOUBLE,
    INTEGER,
    TEXT,
    TIMESTAMPTZ,
    encode_array,
    encode_time,
)
from eventsql_orchestration.errors import ValidationError


class EncodedArray(bytes):
    """An array in the server's format. The statement names its type, as in `%(ids)s::bigint[]`."""


class _AsItIs(Dumper):
    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


def bytes_array(values: Iterable[bytes]) -> EncodedArray:
    return EncodedArray(encode_array(values, of=BYTEA))


def text_array(values: Iterable[str | None]) -> EncodedArray:
    return EncodedArray(encode_array((None if value is None else value.encode() for value in values), of=TEXT))


def bigint_array(values: Sequence[int]) -> EncodedArray:
    return _numbers(BIGINT, "iq", 8, values)


def integer_array(values: Sequence[int]) -> EncodedArray:
    return _numbers(INTEGER, "ii", 4, values)


def float_array(values: Sequence[float]) -> EncodedArray:
    return _numbers(DOUBLE, "id", 8, values)


def time_array(values: Iterable[datetime | None]) -> EncodedArray:
    encoded = (None if value is None else encode_time(value) for value in values)
    return EncodedArray(encode_array(encoded, of=TIMESTAMPTZ))


def decode_bigints(array: bytes) -> list[int]:
    """The elements of a `bigint[]` without NULL."""
    # An empty array has a shorter header.
    return [number for _, number in struct.iter_unpack(">iq", array[ARRAY_HEADER.size :])]


def _numbers(oid: int, element: str, size: int, values: Sequence[float]) -> EncodedArray:
    flat = chain.from_iterable(zip(repeat(size), values, strict=False))
    try:
        elements = struct.pack(f">{element * len(values)}", *flat)
    except struct.error:
        raise ValidationError("a message has an id or a receipt that no queue has given out") from None
    return EncodedArray(ARRAY_HEADER.pack(1, 0, oid, len(values), 1) + elements)


def adapt_arrays(cursor: psycopg.Cursor[Any]) -> None:
    """Let a cursor take such arrays as parameters; the caller's connection does not change."""
    cursor.adapters.register_dumper(EncodedArray, _AsItIs)
