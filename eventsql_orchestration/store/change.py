"""Changes and snapshots of aggregates, and the rules for their data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_name, encode_json


def encode(what: str, data: Mapping[str, Any]) -> str:
    """`data` as JSON text. Raises `ValidationError` unless JSON gives the same data back.

    So it refuses tuples and keys that are not text: a replay would get lists and text instead.
    """
    text = encode_json(what, data)
    if json.loads(text) != dict(data):
        raise ValidationError(f"{what} would come back from JSON as another value: take text as keys and lists")
    return text


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to an aggregate: its kind, such as `price_raised`, and the data to replay it.

    The change encodes `data` as JSON at once; later changes of the mapping have no effect. Raises `InvalidNameError`
    for the kind and `ValidationError` for data that JSON would not give back.
    """

    kind: str
    data: Mapping[str, Any]
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("kind of change", self.kind)
        object.__setattr__(self, "encoded", encode(f"data of change {self.kind!r}", self.data))


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """A stored change. An aggregate's first change has version 1."""

    version: int
    kind: str
    data: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an aggregate at `version`."""

    version: int
    state: dict[str, Any]
    created_at: datetime
