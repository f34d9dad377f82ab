"""Loads and saves aggregates of one class, and publishes what the world is to know of them in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import sqlalchemy
from psycopg.pq import TransactionStatus

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.connections import joinable_connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.publisher import Publisher, check_many, check_publication
from eventsql_orchestration.model import Publication
from eventsql_orchestration.rules import check_kind, check_name, check_whole
from eventsql_orchestration.store.aggregate import Aggregate, SnapshottingAggregate
from eventsql_orchestration.store.store import Store

A = TypeVar("A", bound=Aggregate)


@checked
class Repository(Generic[A]):
    """The aggregates of one class.

    `publisher` belongs to the database of `store`. Raises `ValidationError` for a class whose type's name or number
    of changes between snapshots cannot be used.
    """

    def __init__(self, store: Store, aggregate_class: type[A], publisher: Publisher) -> None:
        self._type = check_name("aggregate type", getattr(aggregate_class, "aggregate_type", ""))
        if issubclass(aggregate_class, SnapshottingAggregate):
            check_whole(f"snapshot_every of {aggregate_class.__name__}", aggregate_class.snapshot_every, least=1)
        self._store = store
        self._class = aggregate_class
        self._publisher = publisher

    def load(
        self,
        aggregate_id: str,
        *,
        upto_version: int | None = None,
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> A:
        """The aggregate as its changes made it, up to `upto_version` where one is given.

        An id that was never saved gives the aggregate before its first change, at version 0. With `connection` the
        caller's transaction reads.
        """
        aggregate = self._class(aggregate_id)
        if isinstance(aggregate, SnapshottingAggregate):
            snapshot = self._store.snapshot(self._type, aggregate_id, upto_version=upto_version, connection=connection)
            if snapshot is not None:
                aggregate.restore_at(snapshot.version, snapshot.state)
        aggregate.replay(
            self._store.load(
                self._type,
                aggregate_id,
                after_version=aggregate.stored_version,
                upto_version=upto_version,
                connection=connection,
            )
        )
        return aggregate

    def save(
        self,
        aggregate: A,
        *,
        publications: Iterable[Publication] = (),
        connection: Connection | sqlalchemy.Connection | None = None,
    ) -> int:
        """Append the aggregate's new changes and publish its integration events, all or nothing; the new version.

        With `connection`, of psycopg or SQLAlchemy, it happens in the caller's transaction, or, on one of psycopg in
        autocommit mode that has none, in one of its own; should the caller's roll back, load the aggregate again.
        An aggregate without new changes is left as it is, and `ValidationError` is raised for publications that
        nothing happened for. Raises `ConcurrentAppendError` when another writer saved the aggregate first, and what
        the publisher raises. After any error the aggregate still has its new changes.
        """
        check_kind("aggregate", aggregate, self._class)
        if connection is not None:
            joinable_connection(connection)
        check_many(publications)
        publications = tuple(map(check_publication, publications))
        before, changes = aggregate.stored_version, aggregate.new_changes
        if not changes:
            if publications:
                raise ValidationError(f"{self._type} {aggregate.id!r} has no new changes to publish events of")
            return before
        with self._transaction(connection) as joined:
            version = self._store.append(joined, self._type, aggregate.id, changes, expected_version=before)
            if isinstance(aggregate, SnapshottingAggregate):
                every = aggregate.snapshot_every
                if version // every > before // every:
                    self._store.save_snapshot(joined, self._type, aggregate.id, version, aggregate.state())
            if publications:
                self._publisher.publish_all(publications, connection=joined)
        aggregate.mark_saved()
        return version

    @contextmanager
    def _transaction(self, connection: Connection | sqlalchemy.Connection | None) -> Iterator[Connection]:
        if connection is None:
            with self._store.database.transaction() as own:
                yield own
            return
        with self._store.database.joined(connection) as joined:
            if joined.autocommit or joined.info.transaction_status is not TransactionStatus.IDLE:
                # A savepoint inside the caller's transaction; a transaction of its own where none begins by itself.
                with joined.transaction():
                    yield joined
                return
            # The caller's transaction begins with the first statement, and psycopg's block would commit it.
            try:
                yield joined
            except BaseException:
                joined.rollback()
                raise
