"""Values in PostgreSQL's binary format, for statements that run below psycopg's cursors."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

BYTEA: Final = 17
BIGINT: Final = 20
SMALLINT: Final = 21
INTEGER: Final = 23
TEXT: Final = 25
JSON: Final = 114
DOUBLE: Final = 701
TIMESTAMPTZ: Final = 1184
UUID: Final = 2950
"""The OIDs of types, by their names in SQL."""

_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_MICROSECOND: Final = timedelta(microseconds=1)

_decoder: Final = json.JSONDecoder()

_JSONB: Final = b"\x01"
"""The version of jsonb's format."""

ARRAY_HEADER: Final = struct.Struct(">iiiii")
"""Number of dimensions, whether items may be NULL, the items' type, their number, and the first index."""

encode_integer: Final = struct.Struct(">i").pack

NULL: Final = encode_integer(-1)
"""Stands for a missing value in a row or in an array, where the length of a value would stand."""


def encode_smallint(number: int) -> bytes:
    return number.to_bytes(2, signed=True)


def encode_bigint(number: int) -> bytes:
    return number.to_bytes(8, signed=True)


def decode_bigint(raw: bytes | None) -> int:
    return int.from_bytes(raw or b"", signed=True)


def microseconds(time: datetime) -> int:
    """A time as PostgreSQL stores it: microseconds since 2000 in UTC."""
    return (time - _EPOCH) // _MICROSECOND


def encode_time(time: datetime) -> bytes:
    """A timestamptz."""
    return encode_bigint(microseconds(time))


def decode_time(raw: bytes | None) -> datetime:
    """A timestamptz, in UTC."""
    return _EPOCH + timedelta(0, 0, decode_bigint(raw))


def decode_text(raw: bytes | None) -> str:
    return (raw or b"").decode()


def encode_array(items: Iterable[bytes | None], *, of: int) -> bytes:
    """An array of one dimension. `of` is the OID of the items' type."""
    parts = [NULL if item is None else encode_integer(len(item)) + item for item in items]
    return ARRAY_HEADER.pack(1, 1, of, len(parts), 1) + b"".join(parts)


def encode_jsonb(text: str) -> bytes:
    """JSON text as jsonb."""
    return _JSONB + text.encode()


def decode_jsonb(raw: bytes | None) -> Any:
    # The server writes no blanks around it. `json.loads` of bytes would take four times as long for a small object.
    return _decoder.raw_decode((raw or b"")[1:].decode())[0]
