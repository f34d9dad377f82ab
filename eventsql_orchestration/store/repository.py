"""Loads and saves aggregates of one class, and publishes their integration events in the same transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.database import CallersConnection, Connection
from eventsql_orchestration.database.connections import joinable_connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import Publication
from eventsql_orchestration.publishing.batches import check_publication
from eventsql_orchestration.publishing.publisher import TransactionPublisher, check_many
from eventsql_orchestration.store.aggregate import Aggregate, SnapshottingAggregate
from eventsql_orchestration.store.change import Snapshot, check_schema_version
from eventsql_orchestration.store.events import EventAggregate, check_events
from eventsql_orchestration.store.projection import Projections
from eventsql_orchestration.store.store import Store
from eventsql_orchestration.validation import check_kind, check_name, check_whole

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Aggregate)


@checked
class Repository(Generic[A]):
    """The aggregates of one class.

    `publisher` belongs to the database of `store`. `projections` follow each save in its transaction. Raises
    `ValidationError` for a class with an invalid `aggregate_type`, `events`, `snapshot_every` or `snapshot_schema`.
    """

    def __init__(
        self, store: Store, aggregate_class: type[A], publisher: TransactionPublisher,
        *, projections: Projections | None = None,
    ) -> None:  # fmt: skip
        self._type = check_name("aggregate type", getattr(aggregate_class, "aggregate_type", ""))
        if issubclass(aggregate_class, EventAggregate):
            check_events(aggregate_class)
        if issubclass(aggregate_class, SnapshottingAggregate):
            check_whole(f"snapshot_every of {aggregate_class.__name__}", aggregate_class.snapshot_every, least=1)
            check_schema_version(f"snapshot_schema of {aggregate_class.__name__}", aggregate_class.snapshot_schema)
        self._store = store
        self._class = aggregate_class
        self._publisher = publisher
        self._projections = projections

    def load(
        self, aggregate_id: str, *, upto_version: int | None = None, connection: CallersConnection | None = None
    ) -> A:
        """Load an aggregate, up to `upto_version` if that is given.

        An unknown id gives the aggregate before its first change, at version 0. With `connection`, the caller's
        transaction reads. A snapshot that the class cannot restore is left out, with a warning: all changes are
        replayed.
        """
        aggregate = self._class(aggregate_id)
        if isinstance(aggregate, SnapshottingAggregate):
            snapshot, changes = self._store.load_from_snapshot(
                self._type, aggregate_id,
                schema_version=aggregate.snapshot_schema, upto_version=upto_version, connection=connection,
            )  # fmt: skip
            if snapshot is None or self._restore(aggregate, snapshot):
                aggregate.replay(changes)
                return aggregate
            aggregate = self._class(aggregate_id)
        changes = self._store.load(self._type, aggregate_id, upto_version=upto_version, connection=connection)
        aggregate.replay(changes)
        return aggregate

    def _restore(self, aggregate: SnapshottingAggregate, snapshot: Snapshot) -> bool:
        """Whether the class could restore a snapshot."""
        try:
            aggregate.restore_at(snapshot.version, snapshot.state)
        except Exception as error:  # noqa: BLE001 - the changes are the truth, whatever is wrong with a snapshot
            logger.warning(
                "%s %r: its snapshot at version %d cannot be restored, so all changes are replayed (%s); "
                "raise snapshot_schema of %s when its state() changes",
                self._type, aggregate.id, snapshot.version, describe(error), self._class.__name__,
            )  # fmt: skip
            return False
        return True

    def save(
        self, aggregate: A, *, publications: Iterable[Publication] = (), connection: CallersConnection | None = None
    ) -> int:
        """Append the aggregate's new changes and publish its integration events, all or nothing. Gives the new version.

        With `connection`, of psycopg or SQLAlchemy, this joins the caller's transaction; a psycopg connection in
        autocommit mode without one gets a transaction. If the caller's transaction rolls back, load the aggregate
        again. An aggregate without new changes is not saved; publications raise `ValidationError` then. Raises
        `ConcurrentAppendError` if another writer saved the aggregate first, and the publisher's and the projections'
        errors. After any error the aggregate still has its new changes.
        """
        check_kind("aggregate", aggregate, self._class)
        if connection is not None:
            joinable_connection(connection)
        check_many(publications)
        publications = tuple(map(check_publication, publications))
        before, changes = aggregate.stored_version, aggregate.new_changes
        if not changes:
            if publications:
                raise ValidationError(f"{self._type} {aggregate.id!r} has no new changes, so it can publish no events")
            return before
        with self._transaction(connection) as joined:
            version = self._store.append(self._type, aggregate.id, changes, expected_version=before, connection=joined)
            if isinstance(aggregate, SnapshottingAggregate):
                every = aggregate.snapshot_every
                if version // every > before // every:
                    self._store.save_snapshot(
                        self._type, aggregate.id, version, aggregate.state(),
                        schema_version=aggregate.snapshot_schema, connection=joined,
                    )  # fmt: skip
            if self._projections is not None:
                stored = self._store.load(self._type, aggregate.id, after_version=before, connection=joined)
                self._projections.follow(stored, joined)
            if publications:
                self._publisher.publish_all(publications, connection=joined)
        if connection is None:
            self._store.announce()
        aggregate.mark_saved()
        return version

    @contextmanager
    def _transaction(self, connection: CallersConnection | None) -> Iterator[Connection]:
        if connection is None:
            with self._store.database.transaction() as own:
                yield own
            return
        with self._store.database.joined(connection) as joined:
            if joined.autocommit or joined.info.transaction_status is not TransactionStatus.IDLE:
                # A savepoint in the caller's transaction, or a new transaction in autocommit mode.
                with joined.transaction():
                    yield joined
                return
            # The first statement begins the caller's transaction, and psycopg's block would commit it.
            try:
                yield joined
            except BaseException:
                # If the connection is lost, so is its transaction.
                with suppress(psycopg.Error):
                    joined.rollback()
                raise
