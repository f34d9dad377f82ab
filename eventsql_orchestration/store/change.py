"""Changes and snapshots of aggregates, and the rules for what can be stored of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.model import MAX_VALUE_BYTES

MAX_NAME_LENGTH: Final = 200

# An escape of NUL in JSON text: its backslash is not itself escaped by another one.
_ESCAPED_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def check_name(what: str, name: object) -> str:
    """Return `name`, or raise `InvalidNameError`: 1 to 200 printable characters, no space at either end."""
    if not isinstance(name, str) or not name or not name.isprintable() or name != name.strip():
        raise InvalidNameError(f"{what} {name!r} is not usable: take printable characters, no space at its ends")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidNameError(f"{what} {name[:40]!r}… has {len(name)} characters; {MAX_NAME_LENGTH} are allowed")
    return name


def check_version(what: str, version: object, *, least: int) -> int:
    """Return `version`, or raise `ValidationError` unless it is a whole number from `least` on."""
    if isinstance(version, bool) or not isinstance(version, int) or not least <= version < 2**63:
        raise ValidationError(f"{what} must be a whole number from {least} on, not {version!r}")
    return version


def encode(what: str, data: Mapping[str, Any]) -> str:
    """`data` as JSON text, or `ValidationError` unless it can be stored and comes back as it is.

    Tuples and keys that are not text are refused because a replay would meet lists and text in their place; a NUL
    character because PostgreSQL stores none.
    """
    if not isinstance(data, Mapping):
        raise ValidationError(f"{what} must be a mapping, not {type(data).__name__}")
    data = dict(data)
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValidationError(f"{what} holds text that is not valid Unicode (a lone surrogate)") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(f"{what} cannot be written as JSON: {error}") from None
    if size > MAX_VALUE_BYTES:
        raise ValidationError(f"{what} has {size} bytes of JSON; {MAX_VALUE_BYTES} are allowed")
    if _ESCAPED_NUL.search(text):
        raise ValidationError(f"{what} holds a NUL character, which PostgreSQL cannot store")
    if json.loads(text) != data:
        raise ValidationError(f"{what} would come back from JSON as another value: take text as keys and lists")
    return text


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to an aggregate: its kind, such as `price_raised`, and what is needed to replay it.

    `data` is written as JSON when the change is made; what happens to that mapping later is not stored.
    Raises `InvalidNameError` for the kind and `ValidationError` for data that JSON would not give back.
    """

    kind: str
    data: Mapping[str, Any]
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("kind of change", self.kind)
        object.__setattr__(self, "encoded", encode(f"data of change {self.kind!r}", self.data))


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """A change as the store holds it; an aggregate's first change makes its version 1."""

    version: int
    kind: str
    data: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that an aggregate had at `version`."""

    version: int
    state: dict[str, Any]
    created_at: datetime
