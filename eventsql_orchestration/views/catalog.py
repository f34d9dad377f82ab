"""Declaring views: their tables, the partitions of the tables by time, and dropping partitions beyond the retention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Platform, Queries, database_of, role_statements
from eventsql_orchestration.database.migrations import SYSTEM_PATH
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import ValidationError, ViewConflictError, ViewNotFoundError
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.validation import age, check_kind, check_whole
from eventsql_orchestration.views.comparison import ViewComparison
from eventsql_orchestration.views.definitions import (
    Definition,
    Logs,
    Rollup,
    Timeline,
    define,
    start_of,
    start_of_partition,
)
from eventsql_orchestration.views.feeds import ViewFeed, ViewFill
from eventsql_orchestration.views.logs import LogsView
from eventsql_orchestration.views.rebuilding import AnyView, Rebuilding, drop_rebuilds
from eventsql_orchestration.views.rollups import RollupView
from eventsql_orchestration.views.sorting import LogSorting, Sorted
from eventsql_orchestration.views.tables import (
    adding_columns,
    differences,
    dimensions_index,
    row_of,
    statements_of,
    words_index,
)
from eventsql_orchestration.views.timelines import TimelineView
from eventsql_orchestration.views.view_table import make_periods

LOCK_SECONDS: Final = 1.0
"""How long dropping a partition waits for transactions that use the view, and makes later transactions wait."""


@dataclass(frozen=True, slots=True)
class Retained:
    """The partitions of a view that `retain` dropped, and the partitions in use, which it left for the next run."""

    view: str
    dropped: int
    busy: int


@checked
class Views:
    """The views of one database. A view is a table, partitioned by time, that handlers of events write to.

    `database` is a platform (`EventSQL`), one of its shards, or a `Database`.

    `declare` each view once, for example where topics are registered; then `timeline`, `rollup` and `logs` give an
    object that writes and reads it. A view stays until `drop`.
    """

    def __init__(self, database: Database | Platform) -> None:
        self._database = database = database_of(database)
        self._queries = Queries("views", database.schema)

    # Using a view

    def timeline(self, definition: Timeline) -> TimelineView:
        """The writer and reader of a declared timeline."""
        return TimelineView(self._database, definition)

    def rollup(self, definition: Rollup) -> RollupView:
        """The writer and reader of a declared rollup."""
        return RollupView(self._database, definition)

    def logs(self, definition: Logs) -> LogsView:
        """The writer and reader of declared logs."""
        return LogsView(self._database, definition)

    def open(self, name: str) -> AnyView:
        """The writer and reader of the view of this name. Raises `ViewNotFoundError`."""
        return self.opened(self.definition(name))

    def opened(self, definition: Definition) -> AnyView:
        """The writer and reader of a declared view."""
        if isinstance(definition, Timeline):
            return self.timeline(definition)
        return self.rollup(definition) if isinstance(definition, Rollup) else self.logs(definition)

    # Declaring

    def declare(self, *definitions: Definition) -> list[str]:
        """Make views, or change them to their definitions, in one transaction. Returns the names of the views that
        changed.

        A view that exists may get another `retention`, and further `values`, `distinct`, `quantiles`, a `language` or
        dimensions that are `indexed`; an index is built then, while writers wait. Raises `ViewConflictError`, with
        nothing changed, for any other difference.
        """
        changed = []
        with self._database.transaction() as connection:
            role_statements.act_as_owner(connection, self._database.schema)
            # The names of the columns' types are the system's.
            connection.execute(SYSTEM_PATH)
            connection.execute(self._queries("lock_views"))
            for definition in definitions:
                held = self._find(connection, definition.name)
                if held != definition:
                    if held is None:
                        self._create(connection, definition)
                    else:
                        self._change(connection, held, definition)
                    changed.append(definition.name)
        return changed

    def definitions(self) -> list[Definition]:
        """The definitions of all views, by name."""
        return [define(*row) for row in query_all(self._database, self._queries("views"), {"name": None})]

    def definition(self, name: str) -> Definition:
        """The definition of a view. Raises `ViewNotFoundError`."""
        with self._database.connection() as connection:
            return self._existing(connection, name)

    def drop(self, name: str) -> None:
        """Drop a view with all of its entries. Raises `ViewNotFoundError`."""
        with self._database.transaction() as connection:
            role_statements.act_as_owner(connection, self._database.schema)
            connection.execute(self._queries("lock_views"))
            view = self._existing(connection, name)
            connection.execute(sql.SQL("DROP TABLE {}").format(self._table(view.table)))
            connection.execute(self._queries("forget_view"), {"name": name})
            drop_rebuilds(connection, self._database.schema, name)

    # Rebuilding

    def rebuild(
        self, feed: ViewFeed, *, fill: ViewFill | None = None, batch: int = 5_000, partial: bool = False,
        tries: int = 30, on_progress: Callable[[int], object] = lambda _events: None,
    ) -> int:  # fmt: skip
        """Compute a view anew from the events that its consumer has consumed, beside the live table, and switch.

        The consumer goes on meanwhile. Handlers and readers wait only for the switch, which applies the events since
        the last batch. The new table has the rights of the live table, and new ids, all larger than the ids before. An
        interrupted rebuild leaves the view as it is, and the next rebuild begins anew. If another process begins a
        rebuild of the view, this one fails. The switch waits a second for transactions that use the view, and is tried
        `tries` times.

        With `fill`, the events so far are written in bulk, and `feed.apply` gets only later events, `batch` at a time.
        `on_progress` gets the number of events applied, without the events of the fill. Gives that number.

        Raises `ViewConflictError`, with nothing switched, if the rebuilt view would not follow from the events: see
        docs/views.md. `partial` allows a topic with a retention: the entries of dropped events are lost then. Raises
        `DatabaseBusyError` if the view was in use at each try.
        """
        check_whole("tries", tries, least=1)
        return self._rebuilding(feed, batch).run(fill, partial=partial, tries=tries, on_progress=on_progress)

    def compare(
        self, feed: ViewFeed, *, fill: ViewFill | None = None, batch: int = 5_000, partial: bool = False
    ) -> ViewComparison:
        """Compare a view with a rebuild of it, in one snapshot; the rebuild is dropped again.

        Entries that are older than the retention are left out, and so are slots of rollups and ids. Takes the time and
        the room of a rebuild. The arguments and errors are those of `rebuild`.
        """
        return self._rebuilding(feed, batch).compare(fill, partial=partial)

    def unfinished_rebuilds(self) -> dict[str, datetime]:
        """The views with a rebuild that has not ended, and when it began: it is under way, or was killed."""
        return dict(query_all(self._database, self._queries("unfinished_rebuilds")))

    def give_up(self, name: str) -> None:
        """Drop what a killed rebuild or comparison of a view has left. A rebuild that is under way fails.

        Raises `ViewNotFoundError`.
        """
        with self._database.transaction() as connection:
            role_statements.act_as_owner(connection, self._database.schema)
            connection.execute(self._queries("lock_views"))
            self._existing(connection, name)
            drop_rebuilds(connection, self._database.schema, name)

    def _rebuilding(self, feed: ViewFeed, batch: int) -> Rebuilding:
        check_kind("feed", feed, ViewFeed)
        return Rebuilding(self._database, feed, self.opened, check_whole("batch", batch, least=1))

    # Partitions

    def retain(self, *, now: datetime | None = None, execute: bool = True) -> list[Retained]:
        """Drop the partitions of each view whose entries are all older than its retention.

        Without `execute`, only gives the numbers of partitions that it would drop. `now` replaces the server's time,
        and is at most 100 years from it. If a transaction uses the view for longer than a second, the rest stays for
        the next run. Also makes the partition after the current one, so that no handler has to.
        """
        time = self._time(now)
        results = [self._retain(each, time, execute=execute) for each in self.definitions()]
        return [result for result in results if result is not None]

    def sort(self, *, now: datetime | None = None) -> list[Sorted]:
        """Rewrite the closed partitions of logs in the order of resources, each once: see `Logs.sort_after`.

        `now` replaces the server's time, as in `retain`. Readers go on. The writer of a line that comes late goes
        first, and its partition is left to the next run. So is a partition that a long transaction reads. One run sorts
        the partitions of a view for up to five minutes.
        """
        time = self._time(now)
        return [LogSorting(self._database, each).run(time) for each in self.definitions() if isinstance(each, Logs)]

    def _time(self, now: datetime | None) -> datetime:
        """The server's time, or `now`. Raises `ValidationError`."""
        with self._database.connection() as connection:
            (time,) = fetch_one(connection, self._queries("clock"))
        assert isinstance(time, datetime), "the statement gives a time"
        if now is not None and abs(now - time) > MAX_AGE:
            raise ValidationError(f"now must be at most 100 years from {time}, not {now}")
        return time if now is None else now

    def _retain(self, view: Definition, now: datetime, *, execute: bool) -> Retained | None:
        with self._database.connection() as connection:
            if execute:
                try:
                    self._make_periods(connection, view, now)
                except (psycopg.errors.NoDataFound, psycopg.errors.UndefinedTable):
                    # Another process dropped the view meanwhile.
                    return None
            if view.retention is None:
                return None
            due = self._due(connection, view, now)
            if not execute:
                return Retained(view.name, len(due), busy=0)
            dropped = 0
            # No waiting: it would make writers wait. Any transaction that uses the view holds up the drop.
            while dropped < len(due) and self._drop_partition(connection, due[dropped]):
                dropped += 1
        return Retained(view.name, dropped, busy=len(due) - dropped)

    def overdue(self, *, by: timedelta = timedelta(days=1)) -> dict[str, int]:
        """The number of partitions of each view that `retain` should have dropped `by` ago or earlier.

        Views without such partitions are left out. `by` is at most 100 years.
        """
        if not timedelta() <= by <= MAX_AGE:
            raise ValidationError(f"by must be a length of time of at most 100 years, not {age(by)}")
        views, until = self.definitions(), self._time(None) - by
        with self._database.connection() as connection:
            due = {view.name: len(self._due(connection, view, until)) for view in views}
        return {name: count for name, count in due.items() if count}

    def _due(self, connection: Connection, view: Definition, now: datetime) -> list[str]:
        """The partitions whose entries are all older than the retention, the oldest first."""
        if view.retention is None:
            return []
        oldest = now - view.retention - view.period
        table = self._table(view.table).as_string(connection)
        rows = fetch_all(connection, self._queries("view_partitions"), {"table": table})
        return [partition for (partition,) in rows if start_of_partition(partition) <= oldest]

    def _drop_partition(self, connection: Connection, partition: str) -> bool:
        try:
            with connection.transaction():
                role_statements.act_as_owner(connection, self._database.schema)
                wait_at_most(connection, LOCK_SECONDS)
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self._table(partition)))
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    # Making and changing tables

    def _find(self, connection: Connection, name: str) -> Definition | None:
        row = fetch_first(connection, self._queries("views"), {"name": name})
        return None if row is None else define(*row)

    def _existing(self, connection: Connection, name: str) -> Definition:
        held = self._find(connection, name)
        if held is None:
            raise ViewNotFoundError(f"view {name!r} does not exist: `eventsql view list` shows the views")
        return held

    def _table(self, name: str) -> sql.Identifier:
        return sql.Identifier(self._database.schema, name)

    def _create(self, connection: Connection, view: Definition) -> None:
        for statement in statements_of(view, self._table(view.table)):
            self._alter(connection, view, statement)
        connection.execute(self._queries("add_view"), row_of(view))
        self._make_periods(connection, view, fetch_one(connection, self._queries("clock"))[0])

    def _make_periods(self, connection: Connection, view: Definition, now: datetime) -> None:
        """Make the partition of a time and the one after it, so that no handler has to."""
        starts = [start_of(view, now), start_of(view, now + view.period)]
        make_periods(connection, self._database.schema, view, starts)

    def _change(self, connection: Connection, held: Definition, wanted: Definition) -> None:
        differing = differences(held, wanted)
        if differing:
            raise ViewConflictError(
                f"{held.kind} {held.name!r} exists with {', '.join(differing)}: declare the new form under another "
                "name, and fill it from the topic"
            )
        table = self._table(wanted.table)
        if isinstance(wanted, Rollup) and (wanted.values or wanted.sketches):
            self._alter(connection, wanted, adding_columns(table, wanted))
        if isinstance(wanted, Rollup) and isinstance(held, Rollup) and wanted.indexed != held.indexed:
            self._alter(connection, wanted, dimensions_index(table, wanted))
        if isinstance(wanted, Logs) and isinstance(held, Logs) and wanted.language != held.language:
            # `differences` lets a language only be added.
            assert wanted.language is not None, "a language is not taken away"
            self._alter(connection, wanted, words_index(table, wanted.language))
        connection.execute(self._queries("change_view"), row_of(wanted))

    def _alter(self, connection: Connection, view: Definition, statement: sql.Composed) -> None:
        try:
            connection.execute(statement)
        except psycopg.errors.DuplicateTable as error:
            raise ViewConflictError(
                f"{view.kind} {view.name!r} needs the table {view.table!r}, a name that is taken: choose another name"
            ) from error
        except psycopg.errors.UndefinedObject as error:
            language = getattr(view, "language", None)
            raise ValidationError(
                f"this server has no text search configuration {language!r}: `\\dF` in psql lists its configurations"
            ) from error
