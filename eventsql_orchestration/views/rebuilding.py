"""Rebuilding views: computing them anew from the events of a topic, beside the live table, and switching."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeAlias
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from eventsql_orchestration.consuming.handlers import call_handler
from eventsql_orchestration.database import Connection, Database, Queries, replaced_tables, role_statements
from eventsql_orchestration.database.migrations import SYSTEM_PATH
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError, EventSQLError, ViewConflictError, ViewNotFoundError
from eventsql_orchestration.model import NOT_PARTITIONED, Event
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.registry import Registry
from eventsql_orchestration.validation import check_name
from eventsql_orchestration.views.comparison import ViewComparison, comparison, sketch_comparison, sketches_differ
from eventsql_orchestration.views.consumed import Consumed, check_history
from eventsql_orchestration.views.definitions import Definition, Rollup, define
from eventsql_orchestration.views.feeds import ViewFeed, ViewFill, ViewFilling
from eventsql_orchestration.views.logs import LogsView
from eventsql_orchestration.views.rollups import RollupView
from eventsql_orchestration.views.switching import Shadow, Switch, sequence_of
from eventsql_orchestration.views.tables import differences, row_of, statements_of
from eventsql_orchestration.views.timelines import TimelineView
from eventsql_orchestration.views.view_table import ViewTable

logger = logging.getLogger(__name__)

AnyView: TypeAlias = TimelineView | RollupView | LogsView

LOCK_SECONDS: Final = 1.0
"""How long one try of a switch waits for transactions that use the view, and makes later transactions wait."""

_AHEAD: Final = 2**40
"""The distance from the newest id of the live table to the first id of a new table. Handlers draw fewer ids during a
rebuild."""

_EXAMPLES: Final = 10
"""The most entries of each kind that a comparison shows."""


def drop_rebuilds(connection: Connection, schema: str, name: str) -> None:
    """Drop the tables of a view's rebuilds. The caller's transaction has locked the views, as their owner."""
    queries = Queries("views", schema)
    for (shadow,) in fetch_all(connection, queries("rebuilds"), {"name": name}):
        # Drop the tables in the order in which parts of a fill lock them.
        for table in (_ledger_of(shadow), f"view_{shadow}"):
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(schema, table)))
        connection.execute(queries("forget_view"), {"name": shadow})


def _ledger_of(shadow: str) -> str:
    return f"view_{shadow}_filled"


class Rebuilding:
    """One rebuild of a view, or a comparison with one."""

    def __init__(
        self, database: Database, feed: ViewFeed, open_view: Callable[[Definition], AnyView], batch: int
    ) -> None:
        self._database = database
        self._schema = database.schema
        self._feed = feed
        self._open = open_view
        self._batch = batch
        self._queries = Queries("views", database.schema)
        self._log = LogReader(database.schema)
        self._tables = Switch(database.schema)
        self._partial = False
        self._layout = 1
        self._name = getattr(feed.view, "name", "")
        check_name("consumer of a feed", feed.consumer)

    def run(self, fill: ViewFill | None, *, partial: bool, tries: int, on_progress: Callable[[int], object]) -> int:
        """See `Views.rebuild`."""
        applied = 0
        with self._shadow(partial=partial) as shadow:
            with self._database.transaction() as connection:
                self._hold(connection, shadow)
                self._tables.check_kept(connection, shadow)
            done = self._fill(shadow, fill)
            for attempt in range(tries):
                if attempt:
                    # The transactions that waited behind the last try go first.
                    time.sleep(LOCK_SECONDS)
                done, applied = self._catch_up(shadow, done, applied, on_progress)
                if (rest := self._switch(shadow, done)) is not None:
                    on_progress(applied + rest)
                    return applied + rest
        raise DatabaseBusyError(
            f"view {self._name!r} was not switched: at each of {tries} tries, transactions used it for longer than "
            f"{LOCK_SECONDS:g} s; end them, and rebuild again"
        )

    def compare(self, fill: ViewFill | None, *, partial: bool) -> ViewComparison:
        """See `Views.compare`."""
        with self._shadow(partial=partial) as shadow:
            done = self._fill(shadow, fill)
            done, _ = self._catch_up(shadow, done, 0, lambda _events: None)
            with self._database.connection() as connection, connection.transaction(force_rollback=True):
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                self._hold(connection, shadow)
                self._apply_rest(shadow, done, connection)
                oldest = ViewTable(self._database, shadow.held).kept_after(connection)
                values = {"oldest": oldest, "most": _EXAMPLES}
                statement = comparison(shadow.held, self._schema, shadow.definition.table)
                row = connection.execute(statement, values, prepare=False).fetchone()
                assert row is not None, "the statement gives a row"
                missing, surplus, examples = row
                others = self._differing_sketches(connection, shadow, values)
        missing, surplus, examples = missing + len(others), surplus + len(others), [*examples, *others[:_EXAMPLES]]
        return ViewComparison(shadow.held.name, missing, surplus, tuple(examples))

    def _differing_sketches(self, connection: Connection, shadow: Shadow, values: Mapping[str, Any]) -> list[str]:
        """The buckets of a rollup whose sketches alone differ, as JSON."""
        view = shadow.held
        if not isinstance(view, Rollup) or not view.sketches:
            return []
        statement = sketch_comparison(view, self._schema, shadow.definition.table)
        # A named cursor reads the buckets in parts.
        with psycopg.ServerCursor(connection, "eventsql_sketches") as cursor:
            cursor.execute(statement, values, binary=True)
            return [key for key, *sketches in cursor if sketches_differ(view, sketches)]

    def _hold(self, connection: Connection, shadow: Shadow) -> None:
        """Keep both tables as they are. Call it before the snapshot: a later lock misses a switch and dropped
        partitions.

        Raises `ViewConflictError` if one of them is gone.
        """
        tables = sql.SQL(", ").join(self._table(each.table) for each in (shadow.held, shadow.definition))
        try:
            connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(tables))
        except psycopg.errors.UndefinedTable as error:
            raise self._lost() from error

    # The new table

    @contextmanager
    def _shadow(self, *, partial: bool) -> Iterator[Shadow]:
        """A new table, which is dropped if it does not replace the live table."""
        shadow = self._begin(partial=partial)
        try:
            yield shadow
        except ViewNotFoundError as error:
            raise self._lost() from error
        finally:
            try:
                self._drop(shadow)
            except EventSQLError as error:
                # The rebuild has switched, or its own error says why not.
                logger.warning("the next rebuild of view %r drops what this one has left: %s", self._name, error)

    def _drop(self, shadow: Shadow) -> None:
        """Drop the new table, unless it has replaced the live table."""
        with self._database.transaction() as connection:
            role_statements.act_as_owner(connection, self._schema)
            connection.execute(self._queries("lock_views"))
            found = fetch_first(connection, self._queries("views"), {"name": shadow.definition.name})
            if found is not None:
                drop_rebuilds(connection, self._schema, shadow.held.name)

    def _begin(self, *, partial: bool) -> Shadow:
        topic = Registry(self._database).topic(self._feed.topic)
        if topic.retention is not None and not partial:
            raise ViewConflictError(
                f"view {self._name!r} is not recomputed: topic {topic.name!r} has a retention, so entries that follow "
                "from dropped events would be lost; give partial=True if that is right"
            )
        self._partial = partial
        self._layout = topic.layout
        with self._database.transaction() as connection:
            self._consumed(connection)
            role_statements.act_as_owner(connection, self._schema)
            connection.execute(SYSTEM_PATH)
            connection.execute(self._queries("lock_views"))
            held = self._held(connection)
            drop_rebuilds(connection, self._schema, held.name)

            name = f"rebuild_{uuid4().hex[:24]}"
            after_id = self._last_id(connection, held) + _AHEAD
            shadow = Shadow(held, replace(held, name=name), _ledger_of(name), after_id)
            for statement in statements_of(shadow.definition, self._table(shadow.definition.table)):
                connection.execute(statement)
            marked = {"definition": Jsonb(held.described() | {"rebuilds": held.name})}
            connection.execute(self._queries("add_view"), row_of(shadow.definition) | marked)
            replaced_tables.make_ledger(connection, self._table(shadow.ledger))
            self._go_on_behind(connection, shadow)
        return shadow

    def _held(self, connection: Connection) -> Definition:
        """The view's definition in the database. Raises `ViewNotFoundError` and `ViewConflictError`."""
        row = fetch_first(connection, self._queries("views"), {"name": self._name})
        if row is None:
            raise ViewNotFoundError(f"view {self._name!r} does not exist: `Views.declare` makes it")
        held = define(*row)
        if different := differences(held, self._feed.view):
            raise ViewConflictError(
                f"view {held.name!r} exists with {', '.join(different)}: a rebuild computes its entries again, and "
                "cannot change its form"
            )
        return held

    def _fill(self, shadow: Shadow, fill: ViewFill | None) -> Consumed | None:
        """Write the entries of the events so far, and give the consumer's state; do nothing without a fill."""
        done = None
        if fill is not None:
            with self._database.connection() as connection:
                done = self._consumed(connection)
                oldest = ViewTable(self._database, shadow.held).kept_after(connection)
            fill(
                ViewFilling(
                    self._feed, self._database, shadow.definition, shadow.ledger, done.offsets.by_partition,
                    done.filter, oldest, shadow.after_id,
                )
            )  # fmt: skip
        with self._database.transaction() as connection:
            role_statements.act_as_owner(connection, self._schema)
            # The DROP waits for parts that are being written. Later parts fail.
            try:
                connection.execute(sql.SQL("DROP TABLE {}").format(self._table(shadow.ledger)))
            except psycopg.errors.UndefinedTable as error:
                raise self._lost() from error
            self._go_on_behind(connection, shadow)
        return done

    def _go_on_behind(self, connection: Connection, shadow: Shadow) -> None:
        """Let the new table's ids go on after all ids of the live table and of the new table."""
        if isinstance(shadow.held, Rollup):
            return
        table = shadow.definition.table
        values = {"sequence": self._table(sequence_of(table)).as_string(connection), "after": shadow.after_id}
        connection.execute(self._queries("go_on_behind", table=table), values)

    def _last_id(self, connection: Connection, view: Definition) -> int:
        if isinstance(view, Rollup):
            return 0
        values = {"sequence": self._table(sequence_of(view.table)).as_string(connection)}
        (last,) = fetch_one(connection, self._queries("last_id"), values)
        return int(last)

    def _lost(self) -> ViewConflictError:
        return ViewConflictError(
            f"another process has begun to rebuild view {self._name!r}, or has dropped it: this rebuild has switched "
            "nothing"
        )

    # Events

    def _consumed(self, connection: Connection, since: Consumed | None = None) -> Consumed:
        """How far the consumer has consumed. Raises `ViewConflictError` if the view follows from other events, too."""
        found = Consumed.read(connection, self._schema, self._feed)
        found.check(self._layout, since)
        if not self._partial:
            check_history(connection, self._schema, self._feed)
        return found

    def _catch_up(
        self, shadow: Shadow, done: Consumed | None, applied: int, on_progress: Callable[[int], object]
    ) -> tuple[Consumed, int]:
        """Apply the events up to the consumer's offsets. Gives its state, and the number of events applied in all.

        Then applies the events that the consumer consumed meanwhile: otherwise, handlers would wait while the switch
        applies them.
        """
        before: int | None = None
        while True:
            with self._database.connection() as connection:
                upto = self._consumed(connection, done)
            events_of_round = 0
            for events in self._between(done, upto):
                with self._database.transaction() as connection:
                    events_of_round += self._apply(shadow, upto, events, connection)
                on_progress(applied + events_of_round)
            done, applied = upto, applied + events_of_round

            # The rebuild never catches up with a consumer that is faster: the switch has to let it wait.
            too_fast = before is not None and events_of_round >= before
            if events_of_round <= self._batch or too_fast:
                return done, applied
            before = events_of_round

    def _between(
        self, done: Consumed | None, upto: Consumed, connection: Connection | None = None
    ) -> Iterator[list[Event]]:
        """The events that were consumed between two states, in batches."""
        ranges = [(NOT_PARTITIONED, 0, upto.offsets.most)]
        if done is not None:
            # Go by partition: if one is far behind, the events of the others need not be read again.
            ranges = [(each, offset, upto.offsets.of(each)) for each, offset in done.offsets.by_partition.items()]
        for partition, begin, last in ranges:
            after = begin
            while after < last:
                with self._database.connection() if connection is None else nullcontext(connection) as reading:
                    read, _ = self._log.read_batch(
                        reading, self._feed.topic, partition=partition, after=after, upto=last, limit=self._batch
                    )
                if not read:
                    break
                after = read[-1].id
                if events := [each for each in read if each.id <= upto.offsets.of(each.partition) and upto.takes(each)]:
                    yield events

    def _apply(self, shadow: Shadow, state: Consumed, events: Sequence[Event], connection: Connection) -> int:
        view = self._open(shadow.definition)
        for group in state.groups(events):
            call_handler(connection, group, lambda given, on: self._feed.apply(given, view, on))
        return len(events)

    # The switch

    def _apply_rest(self, shadow: Shadow, done: Consumed, connection: Connection) -> int:
        """Apply the events that were consumed since `done`, in the caller's transaction."""
        upto = self._consumed(connection, done)
        return sum(self._apply(shadow, upto, events, connection) for events in self._between(done, upto, connection))

    def _switch(self, shadow: Shadow, done: Consumed) -> int | None:
        """Put the new table in the place of the live table.

        Gives the number of events that were applied, or None if the view is in use.
        """
        with self._database.connection() as connection:
            try:
                with connection.transaction():
                    role_statements.act_as_owner(connection, self._schema)
                    wait_at_most(connection, LOCK_SECONDS)
                    connection.execute(self._queries("lock_views"))
                    if fetch_first(connection, self._queries("views"), {"name": shadow.definition.name}) is None:
                        raise self._lost()
                    if self._held(connection) != shadow.held:
                        raise ViewConflictError(f"view {self._name!r} was declared again meanwhile: rebuild it again")
                    live = self._table(shadow.held.table)
                    connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(live))

                    # Handlers commit entries and offset together, and the lock has waited for all of them.
                    applied = self._apply_rest(shadow, done, connection)
                    self._tables.replace(connection, shadow)
                    return applied
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                return None

    def _table(self, name: str) -> sql.Identifier:
        return sql.Identifier(self._schema, name)
