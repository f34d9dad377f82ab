"""Projections: tables that follow from the changes of the store, and can be computed anew from all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final, Literal, TypeAlias
from uuid import uuid4

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked, checks_itself
from eventsql_orchestration.database import Connection, Database, Queries, replaced_tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.errors import ProjectionError, ValidationError
from eventsql_orchestration.store.change import RecordedChange, StoreCheckpoint
from eventsql_orchestration.store.comparison import Compared, Comparison, compare
from eventsql_orchestration.store.order import Filters, filters
from eventsql_orchestration.store.store import Store
from eventsql_orchestration.store.subscription import Subscription, SubscriptionOptions
from eventsql_orchestration.validation import check_name, check_whole, shown

SHADOW: Final = "eventsql_shadow_"
"""The schemas of rebuilds begin with it, and end with the name of the projection."""

LEDGER: Final = "eventsql_filled_"
"""The tables that note which parts of a fill were written begin with it."""

_MAKE_LEDGER: Final = sql.SQL(
    "CREATE TABLE {} (eql_table pg_catalog.text, eql_part pg_catalog.int4, PRIMARY KEY (eql_table, eql_part))"
)

_MAX_IDENTIFIER: Final = 63


class Projection(ABC):
    """Tables that follow from changes: how they are made, and what each change does to them.

    `name` is a lower-case identifier. `tables` names all tables that `create` makes and `apply` writes, in the order in
    which `apply` writes them; they live in `schema`. `types` and `kinds` choose the changes; None is all. Both methods
    name their tables without a schema: during a rebuild, the same SQL works on the new tables::

        class OrdersByStatus(Projection):
            name = "orders_by_status"
            tables = ("order_status",)
            types = ("order",)

            def create(self, connection: Connection) -> None:
                connection.execute("CREATE TABLE order_status (id text PRIMARY KEY, status text)")

            def apply(self, change: RecordedChange, connection: Connection) -> None:
                connection.execute(
                    "INSERT INTO order_status VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET status = excluded.status",
                    [change.aggregate_id, change.kind],
                )
    """

    name: ClassVar[str]
    tables: ClassVar[Sequence[str]]
    schema: ClassVar[str] = "public"
    types: ClassVar[Sequence[str] | None] = None
    kinds: ClassVar[Sequence[str] | None] = None

    @abstractmethod
    def create(self, connection: Connection) -> None:
        """Make the tables, with their indexes, in the first schema of the search_path."""

    @abstractmethod
    def apply(self, change: RecordedChange, connection: Connection) -> None:
        """Write what follows from one change."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A rebuild under way: its projection, the number of changes that it has applied, and when it began."""

    projection: str
    applied: int
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Filling:
    """The task of a fill: write the rows of `projection`'s new tables that follow from all changes up to `upto`.

    The tables are in `schema` of `database`. The rows of each table are written in numbered parts, each part in one
    transaction. The transaction first adds the table's name and the part's number to table `ledger` of that schema. If
    they are there already, it writes nothing. So a part that is written twice takes effect once. A part that is written
    after its fill has ended fails, because the ledger is gone.
    """

    projection: Projection
    database: Database
    schema: str
    ledger: str
    upto: StoreCheckpoint


Fill: TypeAlias = Callable[[Filling], object]
"""Writes the rows of a projection's new tables in bulk. `spark.projections.SparkFill` is one."""


def subscription_of(projection: str) -> str:
    """The subscription by which a projection follows the store."""
    return f"projection {projection}"


class _Checked:
    """A projection with valid names."""

    def __init__(self, projection: Projection) -> None:
        kind = type(projection).__name__
        self.projection = projection
        self.name = check_name(f"name of {kind}", getattr(projection, "name", None))
        self.schema = check_name(f"schema of {kind}", projection.schema)
        self.tables = [check_name(f"a table of {kind}", each) for each in getattr(projection, "tables", ())]
        if isinstance(projection.tables, str) or not self.tables:
            raise ValidationError(f"{kind} has no tables: name those that `create` makes, as in tables = ('orders',)")
        self.shadow = f"{SHADOW}{self.name}"
        if len(self.shadow.encode()) > _MAX_IDENTIFIER:
            raise ValidationError(f"the name of {kind} has more than {_MAX_IDENTIFIER - len(SHADOW)} bytes: shorten it")
        self.only: Filters = filters(projection.types, projection.kinds)
        self.subscription = subscription_of(self.name)

    def wants(self, change: RecordedChange) -> bool:
        types, kinds = self.only["types"], self.only["kinds"]
        return (types is None or change.aggregate_type in types) and (kinds is None or change.kind in kinds)


@checked
class Projections:
    """The projections of one store, by name.

    A projection follows in one of two ways, and not in both: in the transaction of each save, if a `Repository` has it;
    or soon after, if `subscribe` runs. Raises `ValidationError` for names that cannot be used.
    """

    def __init__(self, store: Store, projections: Sequence[Projection]) -> None:
        self._store = store
        self._projections: Mapping[str, _Checked] = {each.name: each for each in map(_Checked, projections)}
        if len(self._projections) < len(projections):
            raise ValidationError("two projections have one name: give each its own")
        self._queries = Queries("projections", store.database.schema)

    def install(self) -> None:
        """Make the tables of projections that have none yet. A new table holds nothing of the past: see `rebuild`.

        Any number of processes may do so at once.
        """
        for each in self._projections.values():
            with self._store.database.transaction() as connection:
                connection.execute(self._queries("hold_install"), {"in_schema": each.schema})
                if self._existing(connection, each, each.schema):
                    continue
                with self._in_schema(connection, each.schema):
                    each.projection.create(connection)
                self._check_tables(connection, each, each.schema)

    @checks_itself
    def follow(self, changes: Iterable[RecordedChange], connection: Connection) -> None:
        """Apply new changes in the transaction that has appended them, as `Repository.save` does."""
        stored = list(changes)
        for each in self._projections.values():
            wanted = [change for change in stored if each.wants(change)]
            if wanted:
                with self._in_schema(connection, each.schema):
                    for change in wanted:
                        each.projection.apply(change, connection)

    def subscribe(
        self, name: str, *, start: Literal["beginning", "now"] = "beginning",
        options: SubscriptionOptions | None = None, background: bool = True,
    ) -> Subscription:  # fmt: skip
        """Let a projection follow the store by a subscription, `projection NAME`; see `Store.subscribe`."""
        each = self._named(name)

        def apply(change: RecordedChange, connection: Connection) -> None:
            # The subscription's own statements name their schema, so the path stays for the rest of its transaction.
            self._look_in(connection, each.schema)
            each.projection.apply(change, connection)

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
        changes since the last batch. Roles keep their rights on the tables. Views, foreign keys, triggers and policies
        that the swap would lose are a `ProjectionError`. Dead letters of the projection's subscription are dropped,
        because the new tables hold their changes. A rebuild that was interrupted goes on where it was.
        `on_progress` gets the number of changes applied. Gives that number.

        With `fill`, the new tables get what follows from the changes so far in bulk, and `apply` gets only later ones.
        An interrupted fill begins anew. If another process still fills the tables, its fill fails.

        Raises `ProjectionError` if another process is rebuilding the projection, and the projection's errors.
        """
        each = self._named(name)
        check_whole("batch", batch, least=1)
        self._begin(each, filling=fill is not None)
        if fill is not None:
            self._fill(each, fill, on_progress)
        while True:
            applied, more = self._apply_batch(each, batch)
            on_progress(applied)
            if not more:
                break
        return self._swap(each, batch)

    def compare(self, name: str, id_columns: Mapping[str, str], *, sample: int = 20) -> Comparison:
        """Compare the rows of `sample` random aggregates with a replay of their changes, in one snapshot.

        `id_columns` names, for each table to compare, the column that has the aggregate's id: a row has to follow from
        the changes of that aggregate alone. Columns with a default are not compared. If the projection follows by a
        subscription, the replay ends at the subscription's place. Nothing is changed; choosing the sample takes longer
        the more aggregates there are.

        Raises `ValidationError` for a table that the projection does not have, and `ProjectionError` for a column.
        """
        each = self._named(name)
        if not id_columns or not set(id_columns) <= set(each.tables):
            raise ValidationError(
                f"id_columns {shown(id_columns)} of projection {name!r} are not usable: name a column of some of "
                f"{', '.join(each.tables)}"
            )
        compared = Compared(
            each.name,
            each.schema,
            id_columns,
            each.only,
            each.subscription,
            each.projection.create,
            each.projection.apply,
        )
        return compare(self._store, self._queries, compared, check_whole("sample", sample, least=1, most=100_000))

    def give_up(self, name: str) -> None:
        """Drop what an interrupted rebuild has made. The live tables stay."""
        each = self._named(name)
        with self._store.database.transaction() as connection:
            if fetch_first(connection, self._queries("exists"), {"name": each.name}) is not None:
                self._lock(connection, each)
            connection.execute(self._queries("finish"), {"name": each.name})
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(each.shadow)))

    # The steps of a rebuild

    def _begin(self, each: _Checked, *, filling: bool) -> None:
        """Make the new tables, unless a rebuild has already applied changes to them."""
        values = {"name": each.name, "shadow": each.shadow}
        with self._store.database.transaction() as connection:
            if not connection.execute(self._queries("begin"), values).rowcount:
                _, applied = self._lock(connection, each)
                if applied or not (filling or self._ledgers(connection, each)):
                    return
            shadow = sql.Identifier(each.shadow)
            connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(shadow))
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(shadow))
            with self._in_schema(connection, each.shadow):
                each.projection.create(connection)
            self._check_tables(connection, each, each.shadow)

    def _fill(self, each: _Checked, fill: Fill, on_progress: Callable[[int], object]) -> None:
        """Fill new tables in bulk, if no change was applied to them."""
        ledger = f"{LEDGER}{uuid4().hex}"
        with self._store.database.transaction() as connection:
            if self._lock(connection, each)[1]:
                return
            upto = self._store.order.newest(connection)
            connection.execute(_MAKE_LEDGER.format(sql.Identifier(each.shadow, ledger)))

        fill(Filling(each.projection, self._store.database, each.shadow, ledger, upto))
        with self._store.database.transaction() as connection:
            self._lock(connection, each)
            if self._ledgers(connection, each) != [ledger]:
                raise ProjectionError(
                    f"another process has begun to fill projection {each.name!r} anew, or has given the rebuild up: "
                    "this rebuild has swapped nothing"
                )
            # The DROP waits for parts that are being written. Later parts fail.
            connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(each.shadow, ledger)))
            values = {"transaction": str(upto.transaction), "position": upto.position, **each.only}
            (applied,) = fetch_one(connection, self._queries("count_upto"), values)
            self._advance(connection, each, upto, applied)
        on_progress(applied)

    def _ledgers(self, connection: Connection, each: _Checked) -> list[str]:
        """The ledgers of fills that have not ended."""
        values = {"in_schema": each.shadow, "ledger": LEDGER}
        return [name for (name,) in fetch_all(connection, self._queries("ledgers"), values)]

    def _advance(self, connection: Connection, each: _Checked, place: StoreCheckpoint, applied: int) -> None:
        values = {"transaction": str(place.transaction), "position": place.position, "applied": applied}
        connection.execute(self._queries("advance"), {**values, "name": each.name})

    def _apply_batch(self, each: _Checked, batch: int) -> tuple[int, bool]:
        """The number of changes that were applied so far, and whether there may be more below the horizon."""
        with self._store.database.transaction() as connection:
            after, applied = self._lock_filled(connection, each)
            changes = self._store.order.read(connection, after, each.only, batch)
            self._apply_to_shadow(connection, each, changes)
            return applied + len(changes), len(changes) == batch

    def _swap(self, each: _Checked, batch: int) -> int:
        with self._store.database.transaction() as connection:
            after, applied = self._lock_filled(connection, each)
            by_subscription = (
                fetch_first(connection, self._queries("hold_subscription"), {"subscription": each.subscription})
                is not None
            )
            # Before the tables are locked: a redrive has locked its letter, and then writes the tables.
            connection.execute(self._queries("drop_letters"), {"subscription": each.subscription})
            live = self._existing(connection, each, each.schema)
            if live:
                names = sql.SQL(", ").join(sql.Identifier(each.schema, table) for table in each.tables if table in live)
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(names))

            # Nobody writes the live tables now. A subscription has applied the changes below the horizon. A save
            # applies its changes before it commits, so the live tables have all committed changes, also beyond it.
            while True:
                changes = self._store.order.read(
                    connection, after, each.only, batch, beyond_horizon=not by_subscription
                )
                self._apply_to_shadow(connection, each, changes)
                applied += len(changes)
                if changes and changes[-1].checkpoint is not None:
                    after = changes[-1].checkpoint
                if len(changes) < batch:
                    break

            if by_subscription:
                place = {"transaction": str(after.transaction), "position": after.position}
                connection.execute(self._queries("place_subscription"), {**place, "subscription": each.subscription})
            self._replace(connection, each, [table for table in each.tables if table in live])
            connection.execute(self._queries("finish"), {"name": each.name})
        return applied

    def _replace(self, connection: Connection, each: _Checked, live: Sequence[str]) -> None:
        """Put the rebuilt tables in the place of the live ones."""
        for table in live:
            self._keep_rights(connection, each, table)
        try:
            if live:
                # In one statement, because foreign keys may lead from one to another.
                names = sql.SQL(", ").join(sql.Identifier(each.schema, table) for table in live)
                connection.execute(sql.SQL("DROP TABLE {}").format(names))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise ProjectionError(
                f"a table of projection {each.name!r} has views or foreign keys on it, which the swap would lose: drop "
                f"these, rebuild again (it goes on where it is), and make them anew ({_detail(error)})"
            ) from error

        for table in each.tables:
            connection.execute(
                sql.SQL("ALTER TABLE {} SET SCHEMA {}").format(
                    sql.Identifier(each.shadow, table), sql.Identifier(each.schema)
                )
            )
        try:
            # Without CASCADE: partitions, types and functions that are left belong to the rebuilt tables.
            connection.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(each.shadow)))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise ProjectionError(
                f"projection {each.name!r} makes more than its tables, and the swap would lose it: let `create` make "
                f"only what `tables` names, give the rebuild up, and rebuild again ({_detail(error)})"
            ) from error

    def _keep_rights(self, connection: Connection, each: _Checked, table: str) -> None:
        """Grant the rights on a live table on the rebuilt one, too."""
        live, new = (each.schema, table), (each.shadow, table)
        lost = replaced_tables.lost(connection, live, new)
        if lost:
            raise ProjectionError(
                f"the swap would lose {', '.join(lost)} of table {table!r} of projection {each.name!r}: let `create` "
                "make them, too, give the rebuild up, and rebuild again"
            )
        replaced_tables.grant_as_on(connection, live, new)

    def _lock(self, connection: Connection, each: _Checked) -> tuple[StoreCheckpoint, int]:
        start = self._store.order.home.place(connection, None)
        row = fetch_first(connection, self._queries("lock"), {"name": each.name})
        if row is None:
            raise ProjectionError(
                f"another process is rebuilding projection {each.name!r}, or has finished its rebuild: this rebuild "
                "has changed nothing"
            )
        transaction, position, applied = row
        return StoreCheckpoint(start.era, int(transaction), position), applied

    def _lock_filled(self, connection: Connection, each: _Checked) -> tuple[StoreCheckpoint, int]:
        """As `_lock`. Raises `ProjectionError` while the tables are filled in bulk."""
        locked = self._lock(connection, each)
        if self._ledgers(connection, each):
            raise ProjectionError(
                f"another process fills projection {each.name!r} in bulk: wait for its end, or begin a new rebuild, "
                "which stops it"
            )
        return locked

    def _apply_to_shadow(self, connection: Connection, each: _Checked, changes: Sequence[RecordedChange]) -> None:
        if not changes:
            return
        with self._in_schema(connection, each.shadow):
            for change in changes:
                each.projection.apply(change, connection)
        place = changes[-1].checkpoint
        assert place is not None, "a change that was read in the global order has a place"
        self._advance(connection, each, place, len(changes))

    # Tables

    @contextmanager
    def _in_schema(self, connection: Connection, schema: str) -> Iterator[None]:
        """Have names without a schema mean tables of `schema`, in the caller's transaction."""
        (before,) = fetch_one(connection, self._queries("path"))
        self._look_in(connection, schema)
        # After an error, the transaction is rolled back, and the path with it.
        yield
        connection.execute(self._queries("set_path"), {"path": before})

    def _look_in(self, connection: Connection, schema: str) -> None:
        path = sql.SQL("{}, public").format(sql.Identifier(schema)).as_string(connection)
        connection.execute(self._queries("set_path"), {"path": path})

    def _existing(self, connection: Connection, each: _Checked, schema: str) -> set[str]:
        values = {"in_schema": schema, "tables": each.tables}
        return {table for (table,) in fetch_all(connection, self._queries("tables"), values)}

    def _check_tables(self, connection: Connection, each: _Checked, schema: str) -> None:
        if missing := set(each.tables) - self._existing(connection, each, schema):
            raise ProjectionError(
                f"projection {each.name!r} did not make {', '.join(sorted(missing))} in schema {schema!r}: name its "
                "tables in `create` without a schema"
            )

    def _named(self, name: str) -> _Checked:
        if name not in self._projections:
            known = ", ".join(sorted(self._projections)) or "none"
            raise ValidationError(f"there is no projection named {name!r}: these are {known}")
        return self._projections[name]


def _detail(error: psycopg.Error) -> str:
    return (error.diag.message_detail or str(error)).replace("\n", "; ")
