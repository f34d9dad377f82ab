"""Appending to aggregates: one append with its values, and the statement's outcomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, methodcaller
from typing import Any, Final, Literal, TypeAlias

from psycopg.errors import SerializationFailure, UniqueViolation

from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.binary import INTEGER, TEXT, UUID, decode_bigint, encode_array, encode_bigint
from eventsql_orchestration.database.rows import fetch_first
from eventsql_orchestration.database.single_statement import RawRow, SingleStatement, fetch_raw
from eventsql_orchestration.errors import AggregateClosedError, ConcurrentAppendError, DatabaseError, ValidationError
from eventsql_orchestration.store.change import Change
from eventsql_orchestration.validation import check_whole, shown

ExpectedVersion: TypeAlias = int | Literal["any", "exists", "none"]
"""The version that an aggregate must have for an append; `none` is 0, `exists` is any after the first change."""

_EXPECTED: Final[Mapping[str, int]] = {"none": 0, "any": -1, "exists": -2}


class Appending:
    """One append: its changes, their ids and its values. Raises `ValidationError`."""

    def __init__(self, aggregate_type: str, aggregate_id: str, changes: Sequence[Change], expected: object) -> None:
        self.type = aggregate_type
        self.id = aggregate_id
        self.changes = changes
        self.expected = _expected(expected)
        if not changes:
            raise ValidationError(f"there are no changes to append to {self}")
        self.ids = [change.id for change in changes if change.id is not None]
        if len(set(self.ids)) < len(self.ids):
            raise ValidationError("two of the changes have one id: give each its own")

    def __str__(self) -> str:
        return f"{self.type} {self.id!r}"

    @property
    def values(self) -> dict[str, Any]:
        """The values for psycopg. An array is None if every change has the default."""
        changes = self.changes
        versions, described = [change.schema_version for change in changes], any(change.metadata for change in changes)
        return {
            "type": self.type, "id": self.id, "expected": self.expected, "count": len(changes),
            "kinds": [change.kind for change in changes], "data": [change.encoded for change in changes],
            "schema_versions": versions if max(versions) > 1 else None,
            "change_ids": [change.id for change in changes] if self.ids else None,
            "metadata": [json.dumps(change.metadata, ensure_ascii=False) for change in changes] if described else None,
        }  # fmt: skip

    @property
    def raw_values(self) -> dict[str, bytes | None]:
        """The values in PostgreSQL's binary format."""
        values = self.values
        return {
            "type": self.type.encode(), "id": self.id.encode(),
            "expected": encode_bigint(self.expected), "count": encode_bigint(values["count"]),
            "kinds": _array(values["kinds"], str.encode, of=TEXT),
            "data": _array(values["data"], str.encode, of=TEXT),
            "schema_versions": _array(values["schema_versions"], methodcaller("to_bytes", 4), of=INTEGER),
            "change_ids": _array(values["change_ids"], attrgetter("bytes"), of=UUID),
            "metadata": _array(values["metadata"], str.encode, of=TEXT),
        }  # fmt: skip


class Appender:
    """Appends to aggregates of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("store", database.schema)
        self._append = SingleStatement("append", self._queries("append"), briefly=True)

    def append(self, appending: Appending, connection: CallersConnection | None) -> int:
        """The aggregate's version after these changes. See `Store.append`."""
        version = self._append_alone(appending) if connection is None else self._append_joined(appending, connection)
        if version is not None:
            return version
        with self._database.joined(connection) as joined:
            return self._already_stored(joined, appending)

    def _append_alone(self, appending: Appending) -> int | None:
        """The new version; None if the aggregate is not as expected, or has one of the changes."""
        try:
            rows = self._database.fetch(self._append, appending.raw_values)
        except DatabaseError as error:
            if not isinstance(error.__cause__, UniqueViolation):
                raise
            return None
        return _last_version(rows)

    def _append_joined(self, appending: Appending, connection: CallersConnection) -> int | None:
        """As `_append_alone`, in the caller's transaction."""
        with self._database.callers(connection) as joined:
            try:
                rows = fetch_raw(joined, self._queries("append"), appending.values)
            except (SerializationFailure, UniqueViolation) as error:
                raise ConcurrentAppendError(
                    f"another writer has appended to {appending} at the same time: roll back, load it again and "
                    "decide again"
                ) from error
        return _last_version(rows)

    def _already_stored(self, connection: Connection, appending: Appending) -> int:
        """The aggregate's version after these changes, if all are stored already. Otherwise, raises the error that says
        why they were not appended.
        """
        ids = appending.ids
        values = {"type": appending.type, "id": appending.id, "change_ids": ids}
        row = fetch_first(connection, self._queries("standing"), values, prepare=False)
        version, closed, stored, last = row or (0, False, 0, None)
        if stored == len(appending.changes):
            return int(last)
        if stored:
            raise ValidationError(
                f"{appending} already has {stored} changes with the ids of these {len(appending.changes)}: repeat an "
                "append with exactly its changes, or give new changes new ids"
            )
        if ids and (other := fetch_first(connection, self._queries("stored_elsewhere"), values, prepare=False)):
            raise ValidationError(
                f"{other[0]} {other[1]!r} has a change with one of these ids: give new changes new ids"
            )
        if closed:
            raise AggregateClosedError(f"{appending} was closed at version {version}, and takes no more changes")
        if appending.expected < 0:
            # Another writer may have made it meanwhile.
            raise ConcurrentAppendError(f"{appending} did not exist: use expected_version='any' if it may be new")
        now = f"at version {appending.expected}" if appending.expected else "new"
        raise ConcurrentAppendError(f"{appending} is not {now} any more: load it again and decide again")


def _last_version(rows: Sequence[RawRow]) -> int | None:
    return decode_bigint(rows[0][0]) if rows else None


def _array(items: Sequence[Any] | None, encode: Callable[[Any], bytes], *, of: int) -> bytes | None:
    return None if items is None else encode_array([None if item is None else encode(item) for item in items], of=of)


def _expected(version: object) -> int:
    if isinstance(version, str):
        if version not in _EXPECTED:
            raise ValidationError(
                f"expected_version must be a version, 'any', 'exists' or 'none', not {shown(version)}"
            )
        return _EXPECTED[version]
    return check_whole("expected_version", version, least=0)
