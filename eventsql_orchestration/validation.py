"""Rules for values that can be stored. Each raises an error of this package before anything is written."""

from __future__ import annotations

import json
import operator
import re
import reprlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Final, NoReturn, TypeAlias, get_args

from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.redaction import HIDDEN

DEFAULT_SCHEMA: Final = "eventsql"
"""The default schema of the platform's tables."""

MAX_NAME_LENGTH: Final = 200

MAX_VALUE_BYTES: Final = 64 * 1024 * 1024
"""A row of COPY, with the key and metadata beside the value, must stay far below PostgreSQL's limit of 1 GiB."""

MAX_METADATA_BYTES: Final = 16 * 1024 * 1024
"""All names and texts of one event's metadata together. As JSON, each byte may take six."""

MAX_ADDED_BYTES: Final = 64 * 1024
"""What an event that was given up may have beyond that, for the metadata that the platform adds: 30 KB at most."""

UNREADABLE: Final = "eventsql_unreadable"
"""If an event's metadata are not a JSON object, the event has their text under this name."""

MAX_SECONDS: Final = 31_536_000.0
"""A year: the longest delay, lease or timeout."""

MAX_INTEGER: Final = 2**31 - 1
MAX_BIGINT: Final = 2**63 - 1
"""The largest numbers of PostgreSQL's types."""

Duration: TypeAlias = float | timedelta
"""A length of time; a number is of seconds."""

_BETWEEN_URLS: Final = re.compile(r"\s+(?=[a-zA-Z0-9+]+://)")
"""A URL may hold spaces itself."""


# A number with a positive exponent in JSON text; strings are skipped.
_LARGE_NUMBER: Final = re.compile(r'"(?:[^"\\]|\\.)*"|(-?\d(?:\.\d+)?e\+\d+)')

_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

# An escape of NUL in JSON text: its backslash is not itself escaped by another backslash.
_ESCAPED_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def shown(value: object) -> str:
    """A wrong value in a few characters, for an error message."""
    if isinstance(value, str) and ("://" in value or "password" in value.lower()):
        # A URL or a connection string in the wrong place may hold a password.
        value = HIDDEN
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - an int of 5,000 digits has no text, and a caller's `__repr__` may do anything
        return f"this {type(value).__name__}"


def counted(number: int, noun: str) -> str:
    """`1 event`, `2 events`: for messages."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def age(duration: Duration) -> str:
    """`30 d`, `1 h 30 min`, `2.5 s`, `-1 min`: a duration, for messages, commands and pages."""
    parts, seconds = [], in_seconds(duration)
    left = abs(seconds)
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        whole, left = divmod(left, length)
        if whole:
            parts.append(f"{whole:,.0f} {unit}")
    return "-" * (seconds < 0) + " ".join([*parts, f"{left:g} s"] if left or not parts else parts)


def advised(words: str, *names: str) -> str:
    """The command `eventsql` that a message advises, as a shell takes it: its words and options, then the names."""
    end = "-- " if any(name.startswith("-") for name in names) else ""
    return f"eventsql {words} {end}{shlex.join(names)}"


def split_urls(text: str) -> tuple[str, ...]:
    """The URLs in a text: the URL of one database, or the URLs of all shards with white space between them."""
    return tuple(_BETWEEN_URLS.split(text.strip()))


def check_name(what: str, name: object) -> str:
    """Return `name`, or raise `InvalidNameError`: 1 to 200 printable characters, no space at either end."""
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise InvalidNameError(
            f"{what} {shown(name)} is not usable: use printable characters, and no space at either end"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidNameError(f"{what} {name[:40]!r}… has {len(name)} characters; {MAX_NAME_LENGTH} are allowed")
    return name


def check_text(
    what: str, text: object, *, most: int = MAX_VALUE_BYTES, error: type[ValidationError] = ValidationError
) -> str:
    """Return `text`, or raise `error`: valid Unicode without NUL, up to `most` bytes."""
    if not isinstance(text, str):
        raise error(f"{what} must be text, not {type(text).__name__}")
    if "\x00" in text:
        raise error(f"{what} holds a NUL character, which PostgreSQL text cannot store")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise error(f"{what} is not valid Unicode text (a lone surrogate)") from None
    if size > most:
        raise error(f"{what} has {size} bytes; {most} are allowed")
    return text


def in_seconds(duration: Duration) -> float:
    """`duration` in seconds, unchecked: for the body of a method whose class is `checked`."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration


def check_seconds(what: str, duration: Duration, *, zero: bool) -> float:
    """Return `duration` in seconds, or raise `ValidationError`: finite, positive (or `zero`), a year at most."""
    seconds: object = in_seconds(duration)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:  # noqa: PLR0124 - NaN
        raise ValidationError(f"{what} must be a number of seconds, not {shown(duration)}")
    if seconds < 0 or (seconds == 0 and not zero) or seconds > MAX_SECONDS:
        # An int may be too large for a float.
        given = f"{seconds:g}" if isinstance(seconds, float) else shown(seconds)
        least = "at least 0" if zero else "more than 0"
        raise ValidationError(f"{what} of {given} seconds is not possible: use {least}, at most {MAX_SECONDS:.0f}")
    return float(seconds)


def check_time(what: str, time: datetime) -> datetime:
    """Return `time` in UTC, or raise `ValidationError` unless it has a time zone.

    In UTC because Python takes the two times of a repeated local hour for equal.
    """
    if not isinstance(time, datetime):
        raise ValidationError(f"{what} must be a datetime, not {type(time).__name__}")
    if time.utcoffset() is None:
        raise ValidationError(f"{what} {time} has no time zone: say which, such as datetime.now(UTC)")
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValidationError(f"{what} {time} lies outside of the years 1 to 9999 in UTC") from None


def check_range(since: datetime | None, until: datetime | None) -> None:
    """Raise `ValidationError` unless both ends, where given, have a time zone."""
    if since is not None:
        check_time("since", since)
    if until is not None:
        check_time("until", until)


def check_whole(
    what: str, number: object, *, least: int = -MAX_BIGINT - 1, most: int = MAX_BIGINT,
    error: type[ValidationError] = ValidationError,
) -> int:  # fmt: skip
    """Return `number` as an int, or raise `error`: a whole number within bounds, those of bigint by default.

    Whole numbers of other libraries, such as NumPy's, are taken too.
    """
    try:
        whole = None if isinstance(number, bool) else operator.index(number)  # type: ignore[arg-type]  # what fails is caught
    except TypeError:
        whole = None
    if whole is None or not least <= whole <= most:
        raise error(f"{what} must be a whole number from {least} to {most}, not {shown(number)}")
    return whole


def check_batch(min_events: int, max_events: int) -> None:
    """Raise `ValidationError` unless a batch may have from `min_events` to `max_events` events."""
    if not 1 <= min_events <= max_events:
        raise ValidationError(f"1 <= min_events <= max_events is needed, not {min_events} and {max_events}")


def check_kind(what: str, value: object, kind: type | UnionType) -> None:
    """Raise `ValidationError` unless `value` is of a class, or of one of several."""
    if not isinstance(value, kind):
        kinds, given = get_args(kind) or (kind,), type(value)
        # Two classes of one name are told apart by their modules.
        named = _full_name if given.__name__ in [each.__name__ for each in kinds] else operator.attrgetter("__name__")
        wanted = " or ".join("None" if each is NoneType else named(each) for each in kinds)
        raise ValidationError(f"{what} must be {wanted}, not {named(given)}")


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def check_several(what: str, values: object, kind: type = Iterable) -> None:
    """Raise `ValidationError` unless `values` is iterable and not a string. A `Collection` can be iterated again."""
    if isinstance(values, str | bytes) or not isinstance(values, kind):
        raise ValidationError(f"{what} must be several values, as in a list, not {type(values).__name__}")


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ValidationError` unless `value` is one of some texts."""
    if not isinstance(value, str) or value not in choices:
        raise ValidationError(f"{what} must be {' or '.join(map(repr, choices))}, not {shown(value)}")


def json_object(text: str) -> dict[str, Any] | None:
    """The object of JSON text; None for other JSON, and for JSON that Python cannot read: a number of 5,000 digits, or
    1,000 to 10,000 levels, by Python's version.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def decode_metadata(text: str) -> dict[str, Any]:
    """The metadata of JSON text, which any program may have written; see `Event`."""
    found = json_object(text)
    return {UNREADABLE: text} if found is None else found


def storable_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of any JSON as texts that can be stored."""
    return {
        storable(name): storable(value) if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
    }


def storable(text: str) -> str:
    """The text with a replacement for each NUL and each half of a character: PostgreSQL can store neither."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


class Metadata(dict[str, str]):
    """Metadata that was checked, and so cannot be changed any more."""

    __slots__ = ()

    def _refuse(self, *_arguments: object, **_named: object) -> NoReturn:
        raise TypeError("metadata cannot be changed: make another mapping, as with dict(metadata)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Metadata], tuple[dict[str, str]]]:
        return Metadata, (dict(self),)


NO_METADATA: Final = Metadata()


def check_metadata(
    metadata: object, *, of: str = "", most: int = MAX_METADATA_BYTES, error: type[ValidationError] = ValidationError,
    added: tuple[str, ...] = (),
) -> Metadata:  # fmt: skip
    """A copy of `metadata` that cannot be changed, or `error`: text by text without NUL, up to `most` bytes in all.

    If a name begins with one of `added`, there may be `MAX_ADDED_BYTES` more.
    """
    if metadata is NO_METADATA:
        return NO_METADATA
    if not isinstance(metadata, Mapping):
        raise error(f"metadata{of} must be a mapping, not {type(metadata).__name__}")
    # Check the copy: the caller's mapping may change between two looks.
    copied = Metadata(metadata)
    try:
        texts = "".join([*copied, *copied.values()])
        size = len(texts.encode())
    except (TypeError, UnicodeEncodeError):
        texts, size = "\x00", 0
    if "\x00" in texts:
        # One of them cannot be stored: say which.
        for name, text in copied.items():
            check_text(f"a metadata name{of}", name, error=error)
            check_text(f"metadata {shown(name)}{of}", text, error=error)
    if size > most and any(name.startswith(added) for name in copied):
        most += MAX_ADDED_BYTES
    if size > most:
        raise error(f"metadata{of} has {size} bytes; {most} are allowed")
    return copied


def encode_json(what: str, data: Mapping[str, Any]) -> str:
    """`data` as JSON text, or `ValidationError` where PostgreSQL cannot store it.

    A float of 1e16 and more is written without an exponent and with one decimal: jsonb would make a whole number of it.
    """
    # `isinstance` with an abstract class takes 0.25 µs.
    if type(data) is not dict and not isinstance(data, Mapping):
        raise ValidationError(f"{what} must be a mapping, not {type(data).__name__}")
    try:
        text = _JSON.encode(dict(data))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(f"{what} cannot be written as JSON: {error}") from None
    if "e+" in text:
        text = _LARGE_NUMBER.sub(lambda found: f"{Decimal(found[1]):f}.0" if found[1] else found[0], text)
    if "\\u0000" in text and _ESCAPED_NUL.search(text):
        raise ValidationError(f"{what} holds a NUL character, which PostgreSQL cannot store")
    return check_text(what, text)
