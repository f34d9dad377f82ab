"""Changes and snapshots of aggregates, and the rules for their data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import NoneType
from typing import Any, Final
from uuid import UUID

from eventsql_orchestration.consuming.snapshot_reader import MAX_TRANSACTION
from eventsql_orchestration.database.binary import decode_jsonb, decode_time
from eventsql_orchestration.database.single_statement import RawRow
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import (
    MAX_INTEGER,
    NO_METADATA,
    check_kind,
    check_metadata,
    check_name,
    check_text,
    check_whole,
    encode_json,
    shown,
)

CORRELATION: Final = "correlation_id"
"""Name of a change's metadata. All changes of one business process have the same value."""

CAUSATION: Final = "causation_id"
"""Name of a change's metadata. The value is the reference of the change that caused it."""

_TEXT: Final = frozenset({str})

_SAME: Final = frozenset({str, int, bool, NoneType})
"""Types whose values JSON always gives back. Decoding to compare would be a fifth of the time of making a change."""


def encode(what: str, data: Mapping[str, Any]) -> str:
    """`data` as JSON text. Raises `ValidationError` unless JSON gives the same data back.

    So it refuses tuples and keys that are not text: a replay would get lists and text instead.
    """
    text = encode_json(what, data)
    same = _SAME.issuperset(map(type, data.values())) and _TEXT.issuperset(map(type, data))
    if not same and json.loads(text) != dict(data):
        raise ValidationError(
            f"{what} would come back from JSON as another value: use lists instead of tuples, and only text as keys"
        )
    return text


def check_schema_version(what: str, version: object) -> int:
    """Return the version of a schema, or raise `ValidationError`: 1 to 2**31 - 1."""
    return check_whole(what, version, least=1, most=MAX_INTEGER)


@dataclass(frozen=True, slots=True, order=True)
class StoreCheckpoint:
    """A place in the store's global order: all changes up to here were read.

    Checkpoints of one era compare as the changes are ordered. A restored dump begins another era with `eventsql store
    adopt`. Store a checkpoint as `str()`, and read it with `parse`. Raises `ValidationError`.
    """

    era: str
    transaction: int
    position: int

    def __post_init__(self) -> None:
        check_name("era of a checkpoint", self.era)
        if ":" in self.era:
            raise ValidationError(f"the era of a checkpoint has no colon: {self.era!r}")
        check_whole("the transaction of a checkpoint", self.transaction, least=0, most=MAX_TRANSACTION)
        check_whole("the position of a checkpoint", self.position, least=0)

    def parameters(self) -> dict[str, object]:
        """The place for a statement. PostgreSQL takes the number of a transaction as text."""
        return {"transaction": str(self.transaction), "position": self.position}

    def __str__(self) -> str:
        return f"{self.era}:{self.transaction}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> StoreCheckpoint:
        """The checkpoint that `str()` wrote. Raises `ValidationError` for anything else."""
        era, _, place = check_text("text", text).partition(":")
        transaction, _, position = place.partition(":")
        try:
            return cls(era, int(transaction), int(position))
        except ValueError as error:
            raise ValidationError(f"a checkpoint is written as era:transaction:position, not {shown(text)}") from error


@dataclass(frozen=True, slots=True)
class Change:
    """Something that happened to an aggregate: its kind, such as `price_raised`, and the data to replay it.

    An append with a change whose `id` the aggregate has already stores nothing, so it can be repeated. `metadata` maps
    text to text. `schema_version` is the version of the data's form, 1 or more; see `Events`.

    The change encodes `data` as JSON at once; later changes of the mapping have no effect. Raises `InvalidNameError`
    for the kind and `ValidationError` for data that JSON would not give back.
    """

    kind: str
    data: Mapping[str, Any]
    id: UUID | None = field(default=None, kw_only=True)
    metadata: Mapping[str, str] = field(default_factory=lambda: NO_METADATA, kw_only=True)
    schema_version: int = field(default=1, kw_only=True)
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("kind of change", self.kind)
        if self.id is not None:
            check_kind("id of a change", self.id, UUID | None)
        version = check_schema_version("schema_version of a change", self.schema_version)
        if version is not self.schema_version:
            object.__setattr__(self, "schema_version", version)
        if self.metadata is not NO_METADATA:
            object.__setattr__(self, "metadata", check_metadata(self.metadata, of=f" of change {self.kind!r}"))
        object.__setattr__(self, "encoded", encode(f"data of change {self.kind!r}", self.data))

    def caused_by(self, cause: RecordedChange) -> Change:
        """A copy of this change. Its metadata names the stored change `cause`, and has the correlation of `cause`."""
        check_kind("cause", cause, RecordedChange)
        links = {CORRELATION: cause.metadata.get(CORRELATION, cause.reference), CAUSATION: cause.reference}
        return replace(self, metadata={**self.metadata, **links})


class RecordedChange:
    """A stored change. An aggregate's first change has version 1.

    `checkpoint` is the change's place in the global order, or None if it was not read in that order. The data is
    decoded when it is first used.
    """

    __slots__ = ("_data", "_metadata", "_row", "aggregate_id", "aggregate_type", "checkpoint")

    def __init__(
        self, aggregate_type: str, aggregate_id: str, row: RawRow, checkpoint: StoreCheckpoint | None = None
    ) -> None:
        """`row` has version, kind, data, time, schema version, id and metadata, in PostgreSQL's binary format."""
        self.aggregate_type = aggregate_type
        self.aggregate_id = aggregate_id
        self.checkpoint = checkpoint
        self._row = row
        self._data: dict[str, Any] | None = None
        self._metadata: dict[str, str] | None = None

    @property
    def version(self) -> int:
        """The number of changes of the aggregate up to this one."""
        return int.from_bytes(self._row[0] or b"")

    @property
    def kind(self) -> str:
        return (self._row[1] or b"").decode()

    @property
    def data(self) -> dict[str, Any]:
        if self._data is None:
            self._data = decode_jsonb(self._row[2])
        return self._data

    @property
    def created_at(self) -> datetime:
        """When the transaction that appended it began, in UTC."""
        return decode_time(self._row[3])

    @property
    def schema_version(self) -> int:
        """The version of the data's form."""
        return int.from_bytes(self._row[4] or b"")

    @property
    def id(self) -> UUID | None:
        """The id that the change was given, if any."""
        return None if self._row[5] is None else UUID(bytes=self._row[5])

    @property
    def metadata(self) -> dict[str, str]:
        if self._metadata is None:
            self._metadata = decode_jsonb(self._row[6])
        return self._metadata

    @property
    def correlation_id(self) -> str | None:
        return self.metadata.get(CORRELATION)

    @property
    def causation_id(self) -> str | None:
        return self.metadata.get(CAUSATION)

    @property
    def reference(self) -> str:
        """The id of the change; without an id, its aggregate and version, as `order/42@7`."""
        return str(self.id or f"{self.aggregate_type}/{self.aggregate_id}@{self.version}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RecordedChange):
            return NotImplemented
        return self._key == other._key and self._row == other._row

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, str, int]:
        return self.aggregate_type, self.aggregate_id, self.version

    def __repr__(self) -> str:
        return f"<RecordedChange {self.kind} {self.aggregate_type}/{self.aggregate_id}@{self.version}>"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an aggregate at `version`. `schema_version` is the version of the state's form."""

    version: int
    state: dict[str, Any]
    created_at: datetime
    schema_version: int


def read_snapshot(row: RawRow) -> Snapshot:
    """The snapshot of a row. The row is like a change's row, but has no kind, no id and no metadata."""
    version, _, state, created_at, schema_version, *_ = row
    return Snapshot(
        int.from_bytes(version or b""),
        decode_jsonb(state),
        decode_time(created_at),
        int.from_bytes(schema_version or b""),
    )
