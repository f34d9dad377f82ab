"""The event store: appends changes of aggregates with optimistic concurrency control, and reads them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import CallersConnection, Database, Platform, Queries, database_of
from eventsql_orchestration.database.notifications import STORE, Listener
from eventsql_orchestration.database.notifier import Notifier
from eventsql_orchestration.database.rows import fetch_first, fetch_one, query_all
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.forks import ProcessSet
from eventsql_orchestration.store.appending import Appender, Appending, ExpectedVersion
from eventsql_orchestration.store.archive import Archive, Archived
from eventsql_orchestration.store.change import (
    Change,
    RecordedChange,
    Snapshot,
    StoreCheckpoint,
    check_schema_version,
    encode,
    read_snapshot,
)
from eventsql_orchestration.store.dead_letters import StoreDeadLetter, letters
from eventsql_orchestration.store.home import Adopted
from eventsql_orchestration.store.lag import SubscriptionLag, SubscriptionLagReader
from eventsql_orchestration.store.loading import Loader, check_aggregate, checked_values
from eventsql_orchestration.store.order import GlobalOrder, filters
from eventsql_orchestration.store.subscription import ChangeHandler, Subscription, SubscriptionOptions
from eventsql_orchestration.store.subscription_rows import Start, delete, dismiss, move, register
from eventsql_orchestration.threads import after_commit
from eventsql_orchestration.validation import (
    Duration,
    check_name,
    check_several,
    check_time,
    check_whole,
    in_seconds,
)

_DEFAULT_OPTIONS: Final = SubscriptionOptions()


@dataclass(frozen=True, slots=True)
class AggregateInfo:
    """An aggregate's id and version, and the times of its first change, of its closing, and of its archiving."""

    id: str
    version: int
    created_at: datetime
    closed_at: datetime | None
    archived_at: datetime | None


@checked
class Store:
    """Changes and snapshots of all aggregates in one database: of a platform, one of its shards, or a `Database`.

    Type and id identify an aggregate. Its version is the number of its changes, 0 before the first. Appended changes
    are never altered. All changes have a global order, which `read_all` follows.

    With a `notifier`, subscriptions in all processes learn of an append at once; with a `listener`, the subscriptions
    of this store do. `EventSQL.store` has both. Without them, subscriptions poll.

    A caller's `connection`, of psycopg or SQLAlchemy, leads to the same database; `ValidationError` for any other.
    """

    def __init__(
        self, database: Database | Platform, *, notifier: Notifier | None = None, listener: Listener | None = None
    ) -> None:
        self.database = database = database_of(database)
        self.listener = listener
        self._notifier = notifier
        self._queries = Queries("store", database.schema)
        self._appender = Appender(database)
        self._loader = Loader(database)
        self._archive = Archive(database)
        self.order = GlobalOrder(database)
        self._at_home = False
        self._subscriptions: ProcessSet[Subscription] = ProcessSet()
        """A subscription that runs is kept by its thread."""

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
        check_aggregate(aggregate_type, aggregate_id)
        appending = Appending(aggregate_type, aggregate_id, changes, expected_version)
        if not self._at_home:
            with self.database.joined(connection) as joined:
                self.order.home.era(joined)
            self._at_home = True
        version = self._appender.append(appending, connection)
        if connection is None:
            self.announce()
        return version

    def announce(self) -> None:
        """Tell the subscriptions that changes were committed, if this store has a notifier.

        Call it after the commit of a transaction with appends. Subscriptions find the changes without it, too, when
        they poll.
        """
        if self._notifier is not None:
            after_commit(self._notifier.notify)(STORE, None)

    def close_stream(
        self, aggregate_type: str, aggregate_id: str, *, connection: CallersConnection | None = None
    ) -> None:
        """Let an aggregate take no more changes; it can be read as before, and archived.

        Raises `ValidationError` for an aggregate without changes.
        """
        check_aggregate(aggregate_type, aggregate_id)
        values = {"type": aggregate_type, "id": aggregate_id}
        with self.database.joined(connection) as joined:
            closed = joined.execute(self._queries("close_stream"), values, prepare=False).rowcount
        if not closed:
            raise ValidationError(
                f"aggregate {aggregate_type} {aggregate_id!r} has no changes: there is nothing to close"
            )

    def archive_stream(self, aggregate_type: str, aggregate_id: str) -> int:
        """Move the changes of a closed aggregate into the archive. Gives their number; 0 if they are there already.

        Everything reads them there as before: `load`, `read_all`, subscriptions and rebuilds. Raises `ValidationError`
        for an aggregate that is not closed.
        """
        check_aggregate(aggregate_type, aggregate_id)
        return self._archive.move(aggregate_type, aggregate_id)

    def unarchive_stream(self, aggregate_type: str, aggregate_id: str) -> int:
        """Move the changes of an aggregate out of the archive again; it stays closed. Gives their number.

        Raises `ValidationError`, with nothing moved, if another aggregate has a change with the id of one of them.
        """
        check_aggregate(aggregate_type, aggregate_id)
        return self._archive.move_back(aggregate_type, aggregate_id)

    def archive_closed(self, aggregate_type: str, *, before: datetime, limit: int = 1_000) -> Archived:
        """Archive aggregates of a type that were closed before a time, the first closed first, `limit` at most.

        Each 100 are a transaction. Leaves out aggregates that another transaction has locked.
        """
        check_name("aggregate type", aggregate_type)
        check_whole("limit", limit, least=1)
        return self._archive.move_closed(aggregate_type, check_time("before", before), limit)

    def load(
        self, aggregate_type: str, aggregate_id: str, *, after_version: int = 0,
        upto_version: int | None = None, connection: CallersConnection | None = None,
    ) -> list[RecordedChange]:  # fmt: skip
        """The changes with `after_version < version <= upto_version`, in order; empty for an unknown aggregate.

        With `connection`, the caller's transaction reads and sees its own appends.
        """
        after = check_whole("after_version", after_version, least=0)
        values = checked_values(aggregate_type, aggregate_id, upto_version) | {"after_version": after}
        rows = self._loader.rows("load", values, connection)
        return [RecordedChange(aggregate_type, aggregate_id, row) for row in rows]

    def load_from_snapshot(
        self, aggregate_type: str, aggregate_id: str, *, schema_version: int,
        upto_version: int | None = None, connection: CallersConnection | None = None,
    ) -> tuple[Snapshot | None, list[RecordedChange]]:  # fmt: skip
        """The newest snapshot of `schema_version`, up to `upto_version`, and the changes after it, in one round trip.

        Without such a snapshot, these are all changes. See `load`.
        """
        values = checked_values(aggregate_type, aggregate_id, upto_version, schema_version)
        rows = self._loader.rows("load_from_snapshot", values, connection)
        snapshot = read_snapshot(rows.pop(0)) if rows and rows[0][1] is None else None
        return snapshot, [RecordedChange(aggregate_type, aggregate_id, row) for row in rows]

    # In the global order

    def read_all(
        self, after: StoreCheckpoint | None = None, *, types: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None, limit: int = 1_000, connection: CallersConnection | None = None,
    ) -> list[RecordedChange]:  # fmt: skip
        """The next changes of all aggregates after a checkpoint, at most `limit`, in the global order.

        `types` and `kinds` name the types of aggregates and the kinds of changes to read; None is all. Go on with the
        `checkpoint` of the last change. A reader that does so misses no change: a change is read only when every
        transaction that could write an earlier change has ended. So a long transaction anywhere on the server delays
        reading. The changes of one aggregate are in the order of their versions.

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
        check_aggregate(aggregate_type, aggregate_id)
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
        kinds: Sequence[str] | None = None, start: Start = "earliest",
        options: SubscriptionOptions = _DEFAULT_OPTIONS, background: bool = True,
    ) -> Subscription:  # fmt: skip
        """Hand each change of these types and kinds to `handler(change, connection)` once, in the global order.

        The handler's writes through `connection` are committed together with the subscription's place. A new
        subscription begins at `start`; one that exists goes on where it stands. It runs in a thread until
        `subscription.stop()`, the end of its `with` block, or `close`. Without `background`, call its `run` or
        `run_once`.

        Raises `ValidationError`, also in the subscription's own handler, and `DatabaseError` for a checkpoint of
        another server.
        """
        only = filters(types, kinds)
        subscription = Subscription(self.database, name, handler, only=only, options=options, listener=self.listener)
        register(self.database, name, start, only)
        self._subscriptions.add(subscription)
        return subscription.start() if background else subscription

    def close(self, timeout: Duration = 10.0) -> bool:
        """Stop the subscriptions that run in threads of this store, within `timeout` seconds.

        Each may finish its current transaction; gives False if one has not ended by then. `EventSQL.close` does this
        for its store. The store can be used afterwards.
        """
        deadline = time.monotonic() + in_seconds(timeout)
        self._at_home = False
        subscriptions = self._subscriptions.all()
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

    def replay(self, name: str, start: Start = "earliest") -> StoreCheckpoint:
        """Move a subscription to another place, after its current transaction; gives the place.

        Backwards, its handler gets the changes after that place again; forwards, it does not get the changes before it.
        Dead letters of changes after that place are dropped. Raises `SubscriptionNotFoundError`, `DatabaseError` for a
        checkpoint of another server, and `ValidationError` in the subscription's own handler.
        """
        return move(self.database, name, start)

    def unsubscribe(self, name: str) -> None:
        """Delete a subscription, with its dead letters.

        Raises `SubscriptionNotFoundError`, and `ValidationError` in the subscription's own handler.
        """
        delete(self.database, name)

    def dead_letters(self, name: str) -> list[StoreDeadLetter]:
        """The changes that a subscription has given up, in that order."""
        return letters(self.database, name)

    def dismiss(self, name: str, ids: Collection[int] | None = None) -> int:
        """Delete dead letters of a subscription whose changes need no handling any more; gives their number.

        All of them, or those with the given ids, which `dead_letters` shows. Raises `SubscriptionNotFoundError`, and
        `ValidationError` in the subscription's own handler.
        """
        if ids is not None:
            check_several("ids", ids)
            ids = [check_whole("the id of a dead letter", each, least=1) for each in ids]
        return dismiss(self.database, name, ids)

    def adopt(self) -> Adopted:
        """Give places in this server's order to the changes of a dump that was restored here, in one transaction.

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
        check_aggregate(aggregate_type, aggregate_id)
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
        values = checked_values(aggregate_type, aggregate_id, upto_version, schema_version)
        rows = self._loader.rows("snapshot", values, connection)
        return read_snapshot(rows[0]) if rows else None

    def types(self) -> dict[str, int]:
        """The types of aggregates, with the number of aggregates of each. The time grows with their number."""
        return dict(query_all(self.database, self._queries("types"), prepare=False))

    def aggregates(self, aggregate_type: str, *, after_id: str = "", limit: int = 1_000) -> list[AggregateInfo]:
        """Aggregates of a type, by id, at most `limit`; go on after the last id."""
        check_name("aggregate type", aggregate_type)
        values = {"type": aggregate_type, "after": after_id, "limit": check_whole("limit", limit, least=1)}
        rows = query_all(self.database, self._queries("aggregates"), values, prepare=False)
        return [AggregateInfo(*row) for row in rows]

    def count(self, aggregate_type: str) -> int:
        """Count the aggregates of a type. The time grows with their number."""
        check_name("aggregate type", aggregate_type)
        with self.database.connection() as connection:
            return int(fetch_one(connection, self._queries("count"), {"type": aggregate_type}, prepare=False)[0])
