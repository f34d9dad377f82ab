"""Decodes JSON values to the struct that a read asks for, as `from_json` does.

Runs in Spark's tasks, so it imports neither pyspark nor the database floor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from functools import partial
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.errors import ValidationError

_Converter = Callable[[Any], Any]

_NOT_FINITE: Final = frozenset({"NaN", "Infinity", "+Infinity", "-Infinity", "INF", "+INF", "-INF"})

_DECIMAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)

_DATE: Final = re.compile(r"\s*(\d{4})-(\d\d?)-(\d\d?)(?:[ T].*)?", re.ASCII | re.DOTALL)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_ROUNDING: Final = Context(prec=2 * 38, rounding=ROUND_HALF_UP)
"""Spark rounds halves up. Its decimals have at most 38 digits, and Python's own context would refuse more than 28."""


class _MismatchError(Exception):
    """Internal: a JSON value has another type than the read asks for."""


@dataclass(frozen=True, slots=True)
class ValueDecoder:
    """Decodes values to `type`, an Arrow struct.

    Without `fail_fast`, a value that is not a JSON object gives nulls for all fields, and a field of another type is
    null, as is an array or a map with an element of another type. A misfit that cannot be null fails in any case. The
    value of an erased event is null, whatever `fail_fast` is. Unlike `from_json`, this reads any form of ISO 8601 that
    Python reads, and leaves the zone of a time out if the field has none.
    """

    type: pa.StructType
    fail_fast: bool

    def decode(self, values: pa.Array, topic: str, offsets: Sequence[int] | None) -> pa.Array:
        """Decode values. With `fail_fast`, which needs the offsets, raises `ValidationError` that names the event."""
        convert = self._struct(self.type)
        decoded: list[Any] = []
        for number, value in enumerate(values.to_pylist()):
            try:
                decoded.append(None if value is None else _object(value, convert))
            except _MismatchError as error:
                if self.fail_fast or not all(field.nullable for field in self.type):
                    at = "" if offsets is None else f" {offsets[number]}"
                    raise ValidationError(f"column 'value': event{at} of topic {topic!r} {error}") from None
                decoded.append({})
        return pa.array(decoded, type=self.type)

    def _converter(self, kind: pa.DataType) -> _Converter:
        if pa.types.is_struct(kind):
            return self._struct(kind)
        if pa.types.is_list(kind):
            item = self._or_null(kind.value_field)
            return lambda value: [item(each) for each in _of(list, value)]
        if pa.types.is_map(kind):
            item = self._or_null(kind.item_field)
            return lambda value: [(_string(name), item(each)) for name, each in _of(dict, value).items()]
        simple = _simple(kind)
        assert simple is not None, "check_type has refused it"
        return simple

    def _struct(self, kind: pa.StructType) -> _Converter:
        fields = [(field.name, self._field(field)) for field in kind]

        def convert(value: Any) -> dict[str, Any]:
            given = _of(dict, value)
            return {name: field(given.get(name)) for name, field in fields}

        return convert

    def _or_null(self, field: pa.Field) -> _Converter:
        convert = self._converter(field.type)

        def converted(value: Any) -> Any:
            if value is not None:
                return convert(value)
            if not field.nullable:
                raise _MismatchError("null, or nothing, is not allowed")
            return None

        return converted

    def _field(self, field: pa.Field) -> _Converter:
        convert = self._or_null(field)

        def converted(value: Any) -> Any:
            try:
                return convert(value)
            except _MismatchError as error:
                if field.nullable and not self.fail_fast:
                    return None
                raise _MismatchError(f"has another {field.name!r}: {error}") from None

        return converted


def check_type(kind: pa.DataType, name: str = "value") -> None:
    """Raise `ValidationError` for a field whose type JSON cannot be decoded to, or that occurs twice."""
    if pa.types.is_struct(kind):
        for field in kind:
            path = f"{name}.{field.name}"
            if kind.get_field_index(field.name) < 0:
                raise ValidationError(f"schema: {path!r} occurs twice: keep one of them")
            check_type(field.type, path)
    elif pa.types.is_list(kind):
        check_type(kind.value_type, f"{name}[]")
    elif pa.types.is_map(kind):
        if not pa.types.is_string(kind.key_type):
            raise ValidationError(f"schema: the keys of {name!r} must be strings, as JSON has them")
        check_type(kind.item_type, f"{name}{{}}")
    elif _simple(kind) is None:
        raise ValidationError(f"schema: {name!r} cannot be decoded from JSON to {kind}: ask for it as a string")


def _object(value: bytes, convert: _Converter) -> Any:
    try:
        parsed = json.loads(value, parse_float=_Number)
        if not isinstance(parsed, dict):
            raise _MismatchError("is not a JSON object")
        # Text of JSON that is just flat enough to be read may be too deep to be written.
        return convert(parsed)
    except RecursionError:
        raise _MismatchError("is JSON of too many levels") from None
    except ValueError as error:
        raise _MismatchError(f"is not JSON ({error})") from None


class _Number(float):
    """A JSON number that is not whole, with its original text."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _MismatchError(f"{_shown(value)} is not an {'object' if kind is dict else 'array'}")
    return value


def _simple(kind: pa.DataType) -> _Converter | None:
    return next((converter(kind) for is_kind, converter in _SIMPLE if is_kind(kind)), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _string(value: Any) -> str:
    text = _text(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _MismatchError(f"{_shown(value)} is not Unicode text") from None
    return text


def _shown(value: Any) -> str:
    return _text(value)[:80].encode(errors="backslashreplace").decode()


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _MismatchError(f"{_shown(value)} is neither true nor false")
    return value


def _whole(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -most - 1 <= value <= most:
        raise _MismatchError(f"{_shown(value)} is not a whole number up to {most}")
    return value


def _byte(value: Any) -> int:
    # from_json accepts a byte with or without a sign.
    number = _whole(value, most=255)
    return number - 256 if number > 127 else _whole(number, most=127)


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _MismatchError(f"{_shown(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise _MismatchError("a number is too large") from None


def _decimal(value: Any, precision: int, scale: int) -> Decimal:
    text = value.text if isinstance(value, _Number) else value
    if not isinstance(text, int | str) or _DECIMAL.fullmatch(str(text)) is None:
        raise _MismatchError(f"{_shown(value)} is not a number")
    try:
        number = _ROUNDING.quantize(Decimal(text), Decimal(1).scaleb(-scale))
    except InvalidOperation:
        number = None
    if number is None or number.adjusted() >= precision - scale:
        raise _MismatchError(f"{_shown(value)} is not a number of {precision} digits, {scale} of them after the point")
    return number


def _date(value: Any) -> date:
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    try:
        return date.fromisoformat(value) if found is None else date(*map(int, found.groups()))
    except (TypeError, ValueError):
        raise _MismatchError(f"{_shown(value)} is not a date") from None


def _timestamp(value: Any, *, zoned: bool) -> datetime:
    try:
        if zoned and isinstance(value, int) and not isinstance(value, bool):
            # Seconds since 1970.
            return _EPOCH + timedelta(seconds=value)
        time = datetime.fromisoformat(value.strip())
        if not zoned:
            return time.replace(tzinfo=None)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (AttributeError, ValueError):
        raise _MismatchError(f"{_shown(value)} is not a time") from None
    except OverflowError:
        raise _MismatchError(f"{_shown(value)} is out of range") from None


_SIMPLE: Final[Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], _Converter]]]] = (
    (pa.types.is_string, lambda _: _string),
    (pa.types.is_boolean, lambda _: _boolean),
    (pa.types.is_int8, lambda _: _byte),
    (pa.types.is_signed_integer, lambda kind: partial(_whole, most=2 ** (kind.bit_width - 1) - 1)),
    (pa.types.is_floating, lambda _: _float),
    (pa.types.is_decimal, lambda kind: partial(_decimal, precision=kind.precision, scale=kind.scale)),
    (pa.types.is_date32, lambda _: _date),
    (pa.types.is_timestamp, lambda kind: partial(_timestamp, zoned=kind.tz is not None)),
)
"""The converters of all types without parts."""
