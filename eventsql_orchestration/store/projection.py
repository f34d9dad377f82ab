"""Projections: tables that follow from the changes of the store, and can be computed anew from all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from psycopg import sql

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.consuming.handlers import call_handler
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_first, query_all
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.store.change import RecordedChange
from eventsql_orchestration.store.comparison import Comparison, compare
from eventsql_orchestration.store.projection_definition import CheckedProjection, Fill, Projection
from eventsql_orchestration.store.projection_rebuild import ProjectionRebuild
from eventsql_orchestration.store.projection_tables import ProjectionTables
from eventsql_orchestration.store.store import Store
from eventsql_orchestration.store.subscription import Subscription, SubscriptionOptions
from eventsql_orchestration.validation import check_whole, shown


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A rebuild under way: its projection, the number of changes that it has applied, and when it began."""

    projection: str
    applied: int
    started_at: datetime


@checked
class Projections:
    """The projections of one store, by name.

    A projection follows in one of two ways, and not in both: in the transaction of each save, if a `Repository` has it;
    or soon after, if `subscribe` runs. Raises `ValidationError` for names that cannot be used.
    """

    def __init__(self, store: Store, projections: Sequence[Projection]) -> None:
        self._store = store
        self._projections: Mapping[str, CheckedProjection] = {
            each.name: each for each in (CheckedProjection(given, store.database.schema) for given in projections)
        }
        if len(self._projections) < len(projections):
            raise ValidationError("two projections have one name: give each its own")
        self._queries = Queries("projections", store.database.schema)
        self._tables = ProjectionTables(store.database.schema)
        self._steps = ProjectionRebuild(store)

    def install(self) -> None:
        """Make the tables of projections that have none yet. A new table holds nothing of the past: see `rebuild`.

        Any number of processes may do so at once.
        """
        for each in self._projections.values():
            with self._store.database.transaction() as connection:
                connection.execute(self._queries("hold_install"), {"in_schema": each.schema})
                if self._tables.existing(connection, each, each.schema):
                    continue
                with self._tables.in_schema(connection, each.schema):
                    each.projection.create(connection)
                self._tables.check(connection, each, each.schema)

    @checks_itself
    def follow(self, changes: Iterable[RecordedChange], connection: Connection) -> None:
        """Apply new changes in the transaction that has appended them, as `Repository.save` does.

        Raises `DatabaseBusyError` if a projection was rebuilt after a transaction above READ COMMITTED had begun.
        """
        stored = list(changes)
        for each in self._projections.values():
            wanted = [change for change in stored if each.wants(change)]
            if wanted:
                with self._tables.in_schema(connection, each.schema, each.tables):
                    for change in wanted:
                        call_handler(connection, change, each.projection.apply)

    def subscribe(
        self, name: str, *, start: Literal["earliest", "latest"] = "earliest",
        options: SubscriptionOptions | None = None, background: bool = True,
    ) -> Subscription:  # fmt: skip
        """Let a projection follow the store by a subscription, `projection NAME`; see `Store.subscribe`.

        Make it before the first rebuild, which moves it behind the changes that the rebuilt tables hold.
        """
        each = self._named(name)

        def apply(change: RecordedChange, connection: Connection) -> None:
            # The subscription's own statements name their schema, so the path stays for the rest of its transaction.
            self._tables.look_in(connection, each.schema)
            call_handler(connection, change, each.projection.apply)

        return self._store.subscribe(
            each.subscription, apply, types=each.only["types"], kinds=each.only["kinds"], start=start,
            options=options or SubscriptionOptions(), background=background,
        )  # fmt: skip

    def rebuilds(self) -> list[Rebuild]:
        """The rebuilds under way."""
        rows = query_all(self._store.database, self._queries("progress"), prepare=False)
        return [Rebuild(*row) for row in rows]

    def rebuild(
        self, name: str, *, batch: int = 1_000, on_progress: Callable[[int], object] = lambda _applied: None,
        fill: Fill | None = None,
    ) -> int:  # fmt: skip
        """Compute a projection anew from all changes, beside the live tables, and swap the tables in one transaction.

        The projection goes on following meanwhile. Writers and readers wait only for the swap, which applies the
        changes since the last batch. Roles keep their rights on the tables. Raises `ProjectionError` for views, foreign
        keys, triggers and policies that the swap would lose. Dead letters of the projection's subscription are dropped,
        because the new tables hold their changes. A rebuild that was interrupted goes on where it was.
        `on_progress` gets the number of changes applied. Gives that number.

        With `fill`, the rows of all earlier changes are written in bulk, and `apply` gets only later changes. An
        interrupted fill begins anew. If another process still fills the tables, its fill fails.

        Raises `ProjectionError` if another process is rebuilding the projection, and the projection's errors.
        """
        each = self._named(name)
        check_whole("batch", batch, least=1)
        self._steps.begin(each)
        if fill is not None:
            self._steps.fill(each, fill, on_progress)
        while True:
            applied, more = self._steps.apply_batch(each, batch)
            on_progress(applied)
            if not more:
                break
        return self._steps.swap(each, batch)

    def compare(self, name: str, id_columns: Mapping[str, str], *, sample: int = 20) -> Comparison:
        """Compare the rows of `sample` random aggregates with a replay of their changes, in one snapshot.

        `id_columns` names, for each table to compare, the column that has the aggregate's id: a row has to follow from
        the changes of that aggregate alone. Columns with a default are not compared. If the projection follows by a
        subscription, the replay ends at the subscription's place. Nothing is changed; the time for choosing the sample
        grows with the number of aggregates.

        Raises `ValidationError` for a table that the projection does not have, and `ProjectionError` for a column.
        """
        each = self._named(name)
        if not id_columns or not set(id_columns) <= set(each.tables):
            raise ValidationError(
                f"id_columns {shown(id_columns)} of projection {name!r} are not usable: name a column of some of "
                f"{', '.join(each.tables)}"
            )
        return compare(self._store, each, id_columns, check_whole("sample", sample, least=1, most=100_000))

    def give_up(self, name: str) -> None:
        """Drop what an interrupted rebuild has made. The live tables stay."""
        each = self._named(name)
        with self._store.database.transaction() as connection:
            if fetch_first(connection, self._queries("exists"), {"name": each.name}) is not None:
                self._steps.lock(connection, each)
            connection.execute(self._queries("finish"), {"name": each.name})
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(each.shadow)))

    def _named(self, name: str) -> CheckedProjection:
        if name not in self._projections:
            known = ", ".join(sorted(self._projections)) or "none"
            raise ValidationError(f"there is no projection named {name!r}: these are {known}")
        return self._projections[name]
