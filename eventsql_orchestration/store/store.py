"""The event store: appends changes of aggregates with optimistic concurrency control, and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg.errors import SerializationFailure
from psycopg.rows import class_row

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Queries
from eventsql_orchestration.errors import ConcurrentAppendError, ValidationError
from eventsql_orchestration.store.change import Change, RecordedChange, Snapshot, encode
from eventsql_orchestration.validation import check_name, check_whole


@checked
class Store:
    """Changes and snapshots of all aggregates in one database.

    Type and id identify an aggregate. Its version is the number of its changes, 0 before the first. Appended changes
    are never altered.

    A caller's `connection`, of psycopg or SQLAlchemy, leads to the same database; `ValidationError` for any other.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._queries = Queries("store", database.schema)

    def append(
        self, connection: CallersConnection, aggregate_type: str, aggregate_id: str, changes: Sequence[Change],
        *, expected_version: int,
    ) -> int:  # fmt: skip
        """Append `changes` in the caller's transaction and return the aggregate's new version.

        `expected_version` is the version that the decision was based on, 0 for a new aggregate. Raises
        `ConcurrentAppendError`, with nothing appended, if the aggregate has another version. The transaction can go on
        then, unless it is stricter than READ COMMITTED. Waits for another writer's uncommitted append.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        check_whole("expected_version", expected_version, least=0)
        if not changes:
            raise ValidationError(f"there are no changes to append to {aggregate_type} {aggregate_id!r}")
        values = {
            "type": aggregate_type, "id": aggregate_id,
            "expected_version": expected_version, "new_version": expected_version + len(changes),
            "kinds": [change.kind for change in changes], "data": [change.encoded for change in changes],
        }  # fmt: skip
        with self.database.callers(connection) as joined:
            try:
                appended = joined.execute(self._queries("append"), values, prepare=False).rowcount
            except SerializationFailure:
                appended = 0
        if not appended:
            at = f"at version {expected_version}" if expected_version else "new"
            raise ConcurrentAppendError(
                f"{aggregate_type} {aggregate_id!r} is not {at} any more: load it again and decide anew"
            )
        return expected_version + len(changes)

    def load(
        self, aggregate_type: str, aggregate_id: str, *, after_version: int = 0,
        upto_version: int | None = None, connection: CallersConnection | None = None,
    ) -> list[RecordedChange]:  # fmt: skip
        """The changes with `after_version < version <= upto_version`, in order; empty for an unknown aggregate.

        With `connection`, the caller's transaction reads and sees its own appends.
        """
        values = self._values(aggregate_type, aggregate_id, upto_version)
        values["after_version"] = check_whole("after_version", after_version, least=0)
        with self.database.joined(connection) as joined, joined.cursor(row_factory=class_row(RecordedChange)) as cursor:
            return cursor.execute(self._queries("load"), values, binary=True, prepare=False).fetchall()

    def save_snapshot(
        self, connection: CallersConnection, aggregate_type: str, aggregate_id: str, version: int,
        state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store the aggregate's `state` at `version`, and replace an earlier snapshot of that version.

        Raises `ValidationError` for a version that the aggregate has not reached.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        values = {
            "type": aggregate_type, "id": aggregate_id, "version": check_whole("version", version, least=1),
            "state": encode(f"the state of {aggregate_type} {aggregate_id!r}", state),
        }  # fmt: skip
        with self.database.callers(connection) as joined:
            saved = joined.execute(self._queries("save_snapshot"), values, prepare=False).rowcount
        if not saved:
            raise ValidationError(
                f"{aggregate_type} {aggregate_id!r} has not reached version {version}: no snapshot was saved"
            )

    def snapshot(
        self, aggregate_type: str, aggregate_id: str, *, upto_version: int | None = None,
        connection: CallersConnection | None = None,
    ) -> Snapshot | None:  # fmt: skip
        """The newest snapshot, or the newest up to `upto_version`; None without one."""
        values = self._values(aggregate_type, aggregate_id, upto_version)
        with self.database.joined(connection) as joined, joined.cursor(row_factory=class_row(Snapshot)) as cursor:
            return cursor.execute(self._queries("snapshot"), values, binary=True, prepare=False).fetchone()

    def count(self, aggregate_type: str) -> int:
        """Count the aggregates of a type. This takes longer the more there are."""
        check_name("aggregate type", aggregate_type)
        with self.database.connection() as connection:
            row = connection.execute(self._queries("count"), {"type": aggregate_type}, prepare=False).fetchone()
            assert row is not None, "an aggregate without GROUP BY has one row"
            return int(row[0])

    @staticmethod
    def _values(aggregate_type: str, aggregate_id: str, upto_version: int | None) -> dict[str, Any]:
        _check_aggregate(aggregate_type, aggregate_id)
        if upto_version is not None:
            check_whole("upto_version", upto_version, least=0)
        return {"type": aggregate_type, "id": aggregate_id, "upto_version": upto_version}


def _check_aggregate(aggregate_type: str, aggregate_id: str) -> None:
    check_name("aggregate type", aggregate_type)
    check_name("aggregate id", aggregate_id)
