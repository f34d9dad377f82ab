"""The event store: appends changes of aggregates with optimistic concurrency control, and reads them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID
from weakref import WeakSet

from psycopg.errors import SerializationFailure, UniqueViolation

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Connection, Database, Queries
from eventsql_orchestration.database.notifications import STORE, Listener, Notifier
from eventsql_orchestration.database.rows import fetch_first, query_all
from eventsql_orchestration.database.single_statement import RawRow, SingleStatement, encode_array
from eventsql_orchestration.errors import (
    AggregateClosedError,
    ConcurrentAppendError,
    DatabaseError,
    ValidationError,
)
from eventsql_orchestration.store.change import (
    Change,
    RecordedChange,
    Snapshot,
    StoreCheckpoint,
    check_schema_version,
    encode,
    encode_metadata,
    read_snapshot,
)
from eventsql_orchestration.store.home import Adopted
from eventsql_orchestration.store.lag import SubscriptionLag, SubscriptionLagReader
from eventsql_orchestration.store.order import GlobalOrder, fetch_raw, filters
from eventsql_orchestration.store.subscription import (
    ChangeHandler,
    Start,
    StoreDeadLetter,
    Subscription,
    SubscriptionOptions,
    delete,
    letters,
    move,
)
from eventsql_orchestration.validation import check_name, check_whole, shown

ExpectedVersion: TypeAlias = int | Literal["any", "exists", "none"]
"""The version that an aggregate must have for an append; `none` is 0, `exists` is any after the first change."""

_EXPECTED: Final[Mapping[str, int]] = {"none": 0, "any": -1, "exists": -2}

_UNBOUNDED: Final = 2**63 - 1

_ATTEMPTS: Final = 3
"""How often an append at any version is tried: another writer may create the aggregate meanwhile."""

_DEFAULT_OPTIONS: Final = SubscriptionOptions()

_TEXT, _INTEGER, _UUID = 25, 23, 2950
"""OIDs of types."""


@dataclass(frozen=True, slots=True)
class AggregateInfo:
    """An aggregate's id and version, when its first change was stored, and when it was closed, if it was."""

    id: str
    version: int
    created_at: datetime
    closed_at: datetime | None


@checked
class Store:
    """Changes and snapshots of all aggregates in one database.

    Type and id identify an aggregate. Its version is the number of its changes, 0 before the first. Appended changes
    are never altered. All changes have a global order, which `read_all` follows.

    With a `notifier`, subscriptions in all processes learn of an append at once; with a `listener`, those of this store
    do. `EventSQL.store` has both. Without them, subscriptions poll.

    A caller's `connection`, of psycopg or SQLAlchemy, leads to the same database; `ValidationError` for any other.
    """

    def __init__(
        self, database: Database, *, notifier: Notifier | None = None, listener: Listener | None = None
    ) -> None:
        self.database = database
        self.listener = listener
        self._notifier = notifier
        self._queries = Queries("store", database.schema)
        self._append = SingleStatement("append", self._queries("append"), prepare=False)
        self._load = SingleStatement("load", self._queries("load"), prepare=False)
        self._snapshot = SingleStatement("snapshot", self._queries("snapshot"), prepare=False)
        self.order = GlobalOrder(database)
        self._at_home = False
        # A subscription that runs is kept by its thread.
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self._subscribing = threading.Lock()

    def append(
        self, aggregate_type: str, aggregate_id: str, changes: Sequence[Change],
        *, expected_version: ExpectedVersion, connection: CallersConnection | None = None,
    ) -> int:  # fmt: skip
        """Append `changes`, all or none, and return the aggregate's new version.

        `expected_version` is the version that the decision was based on, 0 or "none" for a new aggregate; "exists" is
        any version but 0, "any" is every version. Without `connection`, the append is a transaction of its own, in one
        round trip. With `connection`, it joins the caller's transaction.

        If the aggregate has all of these changes already, by their ids, nothing is appended, and the version after them
        is returned. Raises `ConcurrentAppendError`, with nothing appended, if the aggregate has another version. The
        caller's transaction can go on then, unless it is stricter than READ COMMITTED. Raises `AggregateClosedError`
        after `close_stream`, and `ValidationError` if another aggregate has one of the ids. Waits for another writer's
        uncommitted append.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        expected = _expected(expected_version)
        if not changes:
            raise ValidationError(f"there are no changes to append to {aggregate_type} {aggregate_id!r}")
        ids = [change.id for change in changes if change.id is not None]
        if len(set(ids)) < len(ids):
            raise ValidationError("two of the changes have one id: give each its own")

        appending = _Appending(aggregate_type, aggregate_id, changes, expected)
        if not self._at_home:
            with self.database.joined(connection) as joined:
                self.order.home.era(joined)
            self._at_home = True
        if connection is not None and ids:
            # A change that is there would abort the caller's transaction.
            with self.database.callers(connection) as joined:
                stored = self._already_stored(joined, appending, ids)
            if stored is not None:
                return stored
        for _ in range(_ATTEMPTS):
            version = (
                self._append_alone(appending) if connection is None else self._append_joined(appending, connection)
            )
            if version is not None:
                if connection is None:
                    self.announce()
                return version
            with self.database.joined(connection) as joined:
                stored = self._already_stored(joined, appending, ids)
            if stored is not None:
                return stored
            if expected >= 0:
                break
        raise ConcurrentAppendError(
            f"{aggregate_type} {aggregate_id!r} {_not_any_more(expected)}: load it again and decide anew"
        )

    def _append_alone(self, appending: _Appending) -> int | None:
        """The new version; None if the aggregate is not as expected, or has one of the changes."""
        try:
            rows = self.database.fetch(self._append, appending.raw_values)
        except DatabaseError as error:
            if not isinstance(error.__cause__, UniqueViolation):
                raise
            return None
        return _last_version(rows)

    def _append_joined(self, appending: _Appending, connection: CallersConnection) -> int | None:
        """As `_append_alone`, in the caller's transaction."""
        with self.database.callers(connection) as joined:
            try:
                rows = fetch_raw(joined, self._queries("append"), appending.values)
            except (SerializationFailure, UniqueViolation) as error:
                raise ConcurrentAppendError(
                    f"another writer has appended to {appending.type} {appending.id!r} at the same time: roll back, "
                    "load it again and decide anew"
                ) from error
        return _last_version(rows)

    def announce(self) -> None:
        """Tell the subscriptions that changes were committed, if this store has a notifier.

        Call it after the commit of a transaction with appends. Subscriptions find the changes without it, too, when
        they poll.
        """
        if self._notifier is not None:
            self._notifier.notify(STORE, None)

    def _already_stored(self, connection: Connection, appending: _Appending, ids: Sequence[UUID]) -> int | None:
        """The aggregate's version after these changes if all are stored already; None if none of them is.

        If the changes cannot be appended for another reason, raises the error that says why.
        """
        of = f"{appending.type} {appending.id!r}"
        values = {"type": appending.type, "id": appending.id, "change_ids": list(ids)}
        row = fetch_first(connection, self._queries("standing"), values, prepare=False)
        version, closed, stored, last = row or (0, False, 0, None)
        if ids and stored == len(appending.changes):
            return int(last)
        if stored:
            raise ValidationError(
                f"{of} has {stored} of these {len(appending.changes)} changes already, by their ids: repeat an append "
                "with the changes that it had, or give new changes new ids"
            )
        if ids and (other := fetch_first(connection, self._queries("stored_elsewhere"), values, prepare=False)):
            raise ValidationError(
                f"{other[0]} {other[1]!r} has a change with one of these ids: give new changes new ids"
            )
        if closed:
            raise AggregateClosedError(f"{of} was closed at version {version}, and takes no more changes")
        if appending.expected == _EXPECTED["exists"] and not version:
            raise ConcurrentAppendError(f"{of} does not exist yet: append with expected_version='none' or 'any'")
        return None

    def close_stream(
        self, aggregate_type: str, aggregate_id: str, *, connection: CallersConnection | None = None
    ) -> None:
        """Let an aggregate take no more changes; it can be read as before.

        Raises `ValidationError` for an aggregate without changes.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        values = {"type": aggregate_type, "id": aggregate_id}
        with self.database.joined(connection) as joined:
            closed = joined.execute(self._queries("close_stream"), values, prepare=False).rowcount
        if not closed:
            raise ValidationError(f"{aggregate_type} {aggregate_id!r} has no changes: there is nothing to close")

    def load(
        self, aggregate_type: str, aggregate_id: str, *, after_version: int = 0,
        upto_version: int | None = None, connection: CallersConnection | None = None,
    ) -> list[RecordedChange]:  # fmt: skip
        """The changes with `after_version < version <= upto_version`, in order; empty for an unknown aggregate.

        With `connection`, the caller's transaction reads and sees its own appends.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        after = check_whole("after_version", after_version, least=0)
        upto = _UNBOUNDED if upto_version is None else check_whole("upto_version", upto_version, least=0)
        if connection is None:
            raw = {
                "type": aggregate_type.encode(), "id": aggregate_id.encode(),
                "after_version": after.to_bytes(8), "upto_version": upto.to_bytes(8),
            }  # fmt: skip
            rows = self.database.fetch(self._load, raw)
        else:
            values = {"type": aggregate_type, "id": aggregate_id, "after_version": after, "upto_version": upto}
            with self.database.callers(connection) as joined:
                rows = fetch_raw(joined, self._queries("load"), values)
        return [RecordedChange(aggregate_type, aggregate_id, row) for row in rows]

    # In the global order

    def read_all(
        self, after: StoreCheckpoint | None = None, *, types: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None, limit: int = 1_000, connection: CallersConnection | None = None,
    ) -> list[RecordedChange]:  # fmt: skip
        """The next changes of all aggregates after a checkpoint, at most `limit`, in the global order.

        `types` and `kinds` name the types of aggregates and the kinds of changes to read; None is all. Go on with the
        `checkpoint` of the last change. Reading on misses no change: a change is read only when every transaction
        that could write an earlier one has ended. So a long transaction anywhere on the server delays reading. The
        changes of one aggregate are in the order of their versions.

        With `connection`, the caller's transaction reads. Raises `ValidationError` for a limit below 1, and
        `DatabaseError` for a checkpoint of another server or era, and while a restored dump is not adopted.
        """
        check_whole("limit", limit, least=1)
        only = filters(types, kinds)
        with self.database.joined(connection) as joined:
            return self.order.read(joined, self.order.home.place(joined, after), only, limit)

    def stream(
        self, after: StoreCheckpoint | None = None, *, types: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None, batch: int = 1_000,
    ) -> Iterator[RecordedChange]:  # fmt: skip
        """The changes as `read_all` gives them, up to the newest that can be read; `batch` are read at a time."""
        while found := self.read_all(after, types=types, kinds=kinds, limit=batch):
            yield from found
            after = found[-1].checkpoint

    def newest(self, connection: CallersConnection | None = None) -> StoreCheckpoint:
        """The place of the newest change that `read_all` can read; the place before the first if there is none."""
        with self.database.joined(connection) as joined:
            return self.order.newest(joined)

    def checkpoint_of(
        self, aggregate_type: str, aggregate_id: str, version: int, *, connection: CallersConnection | None = None
    ) -> StoreCheckpoint:
        """The place of a change in the global order, to go on after it. Raises `ValidationError` for an unknown change.

        A change beyond the horizon has a place as well: others may still precede it, so read on from it only after
        `read_all` has given it.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        values = {"type": aggregate_type, "id": aggregate_id, "version": check_whole("version", version, least=1)}
        with self.database.joined(connection) as joined:
            era = self.order.home.era(joined)
            row = fetch_first(joined, self._queries("place"), values, prepare=False)
        if row is None:
            raise ValidationError(f"{aggregate_type} {aggregate_id!r} has no change of version {version}")
        return StoreCheckpoint(era, int(row[0]), row[1])

    # Subscriptions

    def subscribe(
        self, name: str, handler: ChangeHandler, *, types: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None, start: Start = "beginning",
        options: SubscriptionOptions = _DEFAULT_OPTIONS, background: bool = True,
    ) -> Subscription:  # fmt: skip
        """Hand each change of these types and kinds to `handler(change, connection)` once, in the global order.

        What the handler writes through `connection` is committed together with the subscription's place. A new
        subscription begins at `start`; one that exists goes on where it stands. It runs in a thread until
        `subscription.stop()`, the end of its `with` block, or `close`. Without `background`, call its `run` or
        `run_once`.

        Raises `ValidationError`, and `DatabaseError` for a checkpoint of another server.
        """
        subscription = Subscription(
            self.database, name, handler, only=filters(types, kinds), options=options, listener=self.listener
        )
        subscription.register(start)
        with self._subscribing:
            self._subscriptions.add(subscription)
        return subscription.start() if background else subscription

    def close(self, timeout: float = 10.0) -> bool:
        """Stop the subscriptions that run in threads of this store, within `timeout` seconds.

        Each may finish its current transaction; gives False if one has not ended by then. `EventSQL.close` does this
        for its store. The store can be used afterwards.
        """
        deadline = time.monotonic() + timeout
        self._at_home = False
        with self._subscribing:
            subscriptions = list(self._subscriptions)
        for each in subscriptions:
            each.stop(0.0)
        ended = [each.stop(max(0.0, deadline - time.monotonic())) for each in subscriptions]
        return all(ended)

    def subscriptions(self) -> list[SubscriptionLag]:
        """The lag of every subscription, by name, with its cause. Raises `RestoredStoreError`."""
        with self.database.connection() as connection:
            # Refuse a restored dump even if it has no subscriptions.
            self.order.home.era(connection)
            return SubscriptionLagReader(self.database).read(connection)

    def replay(self, name: str, start: Start = "beginning") -> StoreCheckpoint:
        """Move a subscription to another place, after its current transaction; gives the place.

        Its handler gets the changes behind that place again, or is not given those before it. Dead letters of changes
        behind that place are dropped. Raises `SubscriptionNotFoundError`, and `DatabaseError` for a checkpoint of
        another server.
        """
        return move(self.database, name, start)

    def unsubscribe(self, name: str) -> None:
        """Delete a subscription, with its dead letters. Raises `SubscriptionNotFoundError`."""
        delete(self.database, name)

    def dead_letters(self, name: str) -> list[StoreDeadLetter]:
        """The changes that a subscription has given up, in that order."""
        return letters(self.database, name)

    def adopt(self) -> Adopted:
        """Give the changes of a dump that was restored into this server places in its order, in one transaction.

        Subscriptions go on exactly where they stood. Other checkpoints are refused from then on: see `checkpoint_of`.
        Writers wait meanwhile. In a store of this server, nothing is done.
        """
        return self.order.home.adopt()

    # Snapshots

    def save_snapshot(
        self, aggregate_type: str, aggregate_id: str, version: int, state: Mapping[str, Any],
        *, schema_version: int = 1, connection: CallersConnection | None = None,
    ) -> None:  # fmt: skip
        """Store the aggregate's `state` at `version`, and replace an earlier snapshot of that version.

        `schema_version` is the version of the state's form, 1 or more; snapshots of earlier forms are dropped. Raises
        `ValidationError` for a version that the aggregate has not reached.
        """
        _check_aggregate(aggregate_type, aggregate_id)
        values = {
            "type": aggregate_type, "id": aggregate_id, "version": check_whole("version", version, least=1),
            "state": encode(f"the state of {aggregate_type} {aggregate_id!r}", state),
            "schema_version": check_schema_version("schema_version", schema_version),
        }  # fmt: skip
        with self.database.joined(connection) as joined:
            saved = joined.execute(self._queries("save_snapshot"), values, prepare=False).rowcount
        if not saved:
            raise ValidationError(
                f"{aggregate_type} {aggregate_id!r} has not reached version {version}: no snapshot was saved"
            )

    def snapshot(
        self, aggregate_type: str, aggregate_id: str, *, upto_version: int | None = None,
        schema_version: int | None = None, connection: CallersConnection | None = None,
    ) -> Snapshot | None:  # fmt: skip
        """The newest snapshot, or the newest up to `upto_version` or of `schema_version`; None without one."""
        _check_aggregate(aggregate_type, aggregate_id)
        if upto_version is not None:
            check_whole("upto_version", upto_version, least=0)
        if schema_version is not None:
            check_schema_version("schema_version", schema_version)
        upto = _UNBOUNDED if upto_version is None else upto_version
        if connection is None:
            raw = {
                "type": aggregate_type.encode(), "id": aggregate_id.encode(), "upto_version": upto.to_bytes(8),
                "schema_version": None if schema_version is None else schema_version.to_bytes(4),
            }  # fmt: skip
            rows = self.database.fetch(self._snapshot, raw)
        else:
            values = {
                "type": aggregate_type, "id": aggregate_id, "upto_version": upto, "schema_version": schema_version
            }  # fmt: skip
            with self.database.callers(connection) as joined:
                rows = fetch_raw(joined, self._queries("snapshot"), values)
        return read_snapshot(rows[0]) if rows else None

    def types(self) -> dict[str, int]:
        """The types of aggregates, with the number of aggregates of each. This takes longer the more there are."""
        return dict(query_all(self.database, self._queries("types"), prepare=False))

    def aggregates(self, aggregate_type: str, *, after_id: str = "", limit: int = 1_000) -> list[AggregateInfo]:
        """Aggregates of a type, by id, at most `limit`; go on after the last id."""
        check_name("aggregate type", aggregate_type)
        values = {"type": aggregate_type, "after": after_id, "limit": check_whole("limit", limit, least=1)}
        rows = query_all(self.database, self._queries("aggregates"), values, prepare=False)
        return [AggregateInfo(*row) for row in rows]

    def count(self, aggregate_type: str) -> int:
        """Count the aggregates of a type. This takes longer the more there are."""
        check_name("aggregate type", aggregate_type)
        with self.database.connection() as connection:
            row = connection.execute(self._queries("count"), {"type": aggregate_type}, prepare=False).fetchone()
            assert row is not None, "an aggregate without GROUP BY has one row"
            return int(row[0])


class _Appending:
    """The values of one append."""

    def __init__(self, aggregate_type: str, aggregate_id: str, changes: Sequence[Change], expected: int) -> None:
        self.type = aggregate_type
        self.id = aggregate_id
        self.changes = changes
        self.expected = expected

    @property
    def values(self) -> dict[str, object]:
        """The values for psycopg."""
        changes = self.changes
        return {
            "type": self.type, "id": self.id, "expected": self.expected, "count": len(changes),
            "kinds": [change.kind for change in changes], "data": [change.encoded for change in changes],
            "schema_versions": [change.schema_version for change in changes],
            "change_ids": [change.id for change in changes],
            "metadata": [encode_metadata(change) for change in changes],
        }  # fmt: skip

    @property
    def raw_values(self) -> dict[str, bytes]:
        """The values in PostgreSQL's binary format."""
        changes = self.changes
        ids = [None if change.id is None else change.id.bytes for change in changes]
        return {
            "type": self.type.encode(), "id": self.id.encode(),
            "expected": self.expected.to_bytes(8, signed=True), "count": len(changes).to_bytes(8),
            "kinds": encode_array([change.kind.encode() for change in changes], of=_TEXT),
            "data": encode_array([change.encoded.encode() for change in changes], of=_TEXT),
            "schema_versions": encode_array([change.schema_version.to_bytes(4) for change in changes], of=_INTEGER),
            "change_ids": encode_array(ids, of=_UUID),
            "metadata": encode_array([encode_metadata(change).encode() for change in changes], of=_TEXT),
        }  # fmt: skip


def _last_version(rows: Sequence[RawRow]) -> int | None:
    return int.from_bytes(rows[-1][0] or b"") if rows else None


def _check_aggregate(aggregate_type: str, aggregate_id: str) -> None:
    check_name("aggregate type", aggregate_type)
    check_name("aggregate id", aggregate_id)


def _expected(version: object) -> int:
    if isinstance(version, str):
        if version not in _EXPECTED:
            raise ValidationError(
                f"expected_version must be a version, 'any', 'exists' or 'none', not {shown(version)}"
            )
        return _EXPECTED[version]
    return check_whole("expected_version", version, least=0)


def _not_any_more(expected: int) -> str:
    if expected < 0:
        return "changes all the time"
    return f"is not at version {expected} any more" if expected else "is not new any more"
