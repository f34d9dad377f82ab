"""Declaring views: their tables, the partitions of their tables by time, and dropping those beyond the retention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.database import Connection, Database, Queries, roles
from eventsql_orchestration.database.migrations import SYSTEM_PATH
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one
from eventsql_orchestration.errors import ValidationError, ViewConflictError, ViewNotFoundError
from eventsql_orchestration.views.definitions import (
    Definition,
    Logs,
    Rollup,
    Timeline,
    define,
    start_of,
    start_of_partition,
)
from eventsql_orchestration.views.logs import LogsView
from eventsql_orchestration.views.rollups import RollupView
from eventsql_orchestration.views.timelines import TimelineView

LOCK_SECONDS: Final = 1.0
"""How long dropping a partition waits for transactions that use the view, and makes later ones wait."""


@dataclass(frozen=True, slots=True)
class Retained:
    """The partitions of one view that `retain` dropped, and those left for the next run since the view is in use."""

    view: str
    dropped: int
    busy: int


@checked
class Views:
    """The views of one database. A view is a table, partitioned by time, that handlers of events write to.

    `declare` each view once, for example where topics are registered; then `timeline`, `rollup` and `logs` give what
    writes and reads it. A view stays until `drop`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queries = Queries("views", database.schema)

    # Using one

    def timeline(self, definition: Timeline) -> TimelineView:
        """The writer and reader of a declared timeline."""
        return TimelineView(self._database, definition)

    def rollup(self, definition: Rollup) -> RollupView:
        """The writer and reader of a declared rollup."""
        return RollupView(self._database, definition)

    def logs(self, definition: Logs) -> LogsView:
        """The writer and reader of declared logs."""
        return LogsView(self._database, definition)

    def open(self, name: str) -> TimelineView | RollupView | LogsView:
        """The writer and reader of the view of this name. Raises `ViewNotFoundError`."""
        definition = self.definition(name)
        if isinstance(definition, Timeline):
            return self.timeline(definition)
        return self.rollup(definition) if isinstance(definition, Rollup) else self.logs(definition)

    # Declaring

    def declare(self, *definitions: Definition) -> list[str]:
        """Make views, or change them to their definitions, in one transaction. Gives the names of those that changed.

        A view that exists may get another `retention`, and further `values` or a `language`; an index of words is built
        then, while writers wait. Raises `ViewConflictError`, with nothing changed, for any other difference.
        """
        changed = []
        with self._database.transaction() as connection:
            roles.act_as_owner(connection, self._database.schema)
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
        with self._database.connection() as connection:
            return [_definition(row) for row in fetch_all(connection, self._queries("views"), {"name": None})]

    def definition(self, name: str) -> Definition:
        """The definition of a view. Raises `ViewNotFoundError`."""
        with self._database.connection() as connection:
            return self._existing(connection, name)

    def drop(self, name: str) -> None:
        """Drop a view with all of its entries. Raises `ViewNotFoundError`."""
        with self._database.transaction() as connection:
            roles.act_as_owner(connection, self._database.schema)
            connection.execute(self._queries("lock_views"))
            view = self._existing(connection, name)
            connection.execute(sql.SQL("DROP TABLE {}").format(self._table(view.table)))
            connection.execute(self._queries("forget_view"), {"name": name})

    # Partitions

    def retain(self, *, now: datetime | None = None) -> list[Retained]:
        """Drop the partitions of each view whose entries are all older than its retention.

        `now` is the time to go by, the server's by default. Where a transaction uses the view for longer than a second,
        the rest stays for the next run. Also makes the partition after the current one, so that no handler has to.
        """
        with self._database.connection() as connection:
            (time,) = fetch_one(connection, self._queries("clock"))
        results = [self._retain(each, time if now is None else now) for each in self.definitions()]
        return [result for result in results if result is not None]

    def _retain(self, view: Definition, now: datetime) -> Retained | None:
        with self._database.connection() as connection:
            try:
                self._make_periods(connection, view, now)
            except (psycopg.errors.NoDataFound, psycopg.errors.UndefinedTable):
                # Another process dropped the view meanwhile.
                return None
            if view.retention is None:
                return None
            due = self._due(connection, view, now)
            dropped = 0
            # No waiting: it would make writers wait. Any transaction that uses the view holds up the drop.
            while dropped < len(due) and self._drop_partition(connection, due[dropped]):
                dropped += 1
        return Retained(view.name, dropped, busy=len(due) - dropped)

    def overdue(self, *, by: timedelta = timedelta(days=1)) -> dict[str, int]:
        """How many partitions of each view `retain` should have dropped for so long; views without any are left out."""
        views = self.definitions()
        with self._database.connection() as connection:
            (now,) = fetch_one(connection, self._queries("clock"))
            due = {view.name: len(self._due(connection, view, now - by)) for view in views}
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
                roles.act_as_owner(connection, self._database.schema)
                connection.execute(f"SET LOCAL lock_timeout TO '{round(LOCK_SECONDS * 1000)}ms'")
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(self._table(partition)))
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    # Making and changing tables

    def _find(self, connection: Connection, name: str) -> Definition | None:
        row = fetch_first(connection, self._queries("views"), {"name": name})
        return None if row is None else _definition(row)

    def _existing(self, connection: Connection, name: str) -> Definition:
        held = self._find(connection, name)
        if held is None:
            raise ViewNotFoundError(f"view {name!r} does not exist: `eventsql view list` shows the views")
        return held

    def _table(self, name: str) -> sql.Identifier:
        return sql.Identifier(self._database.schema, name)

    def _create(self, connection: Connection, view: Definition) -> None:
        for statement in _tables(view, self._table(view.table)):
            self._alter(connection, view, statement)
        values = {
            "name": view.name, "kind": view.kind, "definition": Jsonb(view.described()),
            "retention": _seconds(view.retention), "period": round(view.period.total_seconds()),
        }  # fmt: skip
        connection.execute(self._queries("add_view"), values)
        self._make_periods(connection, view, fetch_one(connection, self._queries("clock"))[0])

    def _make_periods(self, connection: Connection, view: Definition, now: datetime) -> None:
        """Make the partition of a time and the one after it, so that no handler has to."""
        starts = [start_of(view, now), start_of(view, now + view.period)]
        connection.execute(self._queries("make_view_periods"), {"view": view.name, "starts": starts})

    def _change(self, connection: Connection, held: Definition, wanted: Definition) -> None:
        differing = _differences(held, wanted)
        if differing:
            raise ViewConflictError(
                f"{held.kind} {held.name!r} exists with {', '.join(differing)}: declare the new form under another "
                "name, and fill it from the topic"
            )
        table = self._table(wanted.table)
        if isinstance(wanted, Rollup) and isinstance(held, Rollup):
            for name in wanted.values[len(held.values) :]:
                self._alter(connection, wanted, _adding_columns(table, name))
        if isinstance(wanted, Logs) and isinstance(held, Logs) and wanted.language != held.language:
            # `_differences` lets a language only be added.
            assert wanted.language is not None, "a language is not taken away"
            self._alter(connection, wanted, _words_index(table, wanted.language))
        values = {"name": wanted.name, "definition": Jsonb(wanted.described()), "retention": _seconds(wanted.retention)}
        connection.execute(self._queries("change_view"), values)

    def _alter(self, connection: Connection, view: Definition, statement: sql.Composed) -> None:
        try:
            connection.execute(statement)
        except psycopg.errors.DuplicateTable as error:
            raise ViewConflictError(
                f"{view.kind} {view.name!r} needs the table {view.table!r}, a name that is taken: choose another name"
            ) from error
        except psycopg.errors.UndefinedObject as error:
            language = getattr(view, "language", None)
            raise ValidationError(f"this server has no text search configuration {language!r}") from error


def _definition(row: tuple[Any, ...]) -> Definition:
    name, kind, described, retention, period = row
    kept = None if retention is None else timedelta(seconds=retention)
    return define(kind, name, described, retention=kept, period=timedelta(seconds=period))


def _seconds(length: timedelta | None) -> int | None:
    return None if length is None else round(length.total_seconds())


def _differences(held: Definition, wanted: Definition) -> Iterable[str]:
    """The parts of a view that a declaration cannot change, as texts."""
    if type(held) is not type(wanted):
        return [f"kind {held.kind}"]
    different = []
    for name in (field.name for field in fields(held)):
        before, now = getattr(held, name), getattr(wanted, name)
        grows = name == "values" and now[: len(before)] == before
        if before != now and not (name == "retention" or grows or (name == "language" and before is None)):
            different.append(f"{name} {before}")
    return different


def _tables(view: Definition, table: sql.Identifier) -> Iterable[sql.Composed]:
    """The statements that make the table of a view and its indexes."""
    if isinstance(view, Rollup):
        dimensions = [sql.Identifier(name) for name in view.dimensions]
        columns = [
            sql.SQL("eql_tenant text NOT NULL, eql_bucket timestamptz NOT NULL"),
            *(sql.SQL("{} text NOT NULL").format(name) for name in dimensions),
            sql.SQL("eql_slot smallint NOT NULL, eql_count bigint NOT NULL"),
            *(column for name in view.values for column in _value_columns(name)),
        ]
        key = [sql.SQL("eql_tenant"), sql.SQL("eql_bucket"), *dimensions, sql.SQL("eql_slot")]
        yield sql.SQL("CREATE TABLE {} ({}, PRIMARY KEY ({})) PARTITION BY RANGE (eql_bucket)").format(
            table, sql.SQL(", ").join(columns), sql.SQL(", ").join(key)
        )
        return
    if isinstance(view, Timeline):
        yield sql.SQL(
            "CREATE TABLE {} (eql_id bigserial, eql_tenant text NOT NULL, eql_resource text NOT NULL, "
            "eql_data jsonb NOT NULL, eql_occurred_at timestamptz NOT NULL) PARTITION BY RANGE (eql_occurred_at)"
        ).format(table)
        yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_resource, eql_id)").format(table)
        return
    yield sql.SQL(
        "CREATE TABLE {} (eql_id bigserial, eql_tenant text NOT NULL, eql_resource text NOT NULL, "
        "eql_level text NOT NULL, eql_line text NOT NULL, eql_attributes jsonb NOT NULL, "
        "eql_written_at timestamptz NOT NULL) PARTITION BY RANGE (eql_written_at)"
    ).format(table)
    yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_resource, eql_written_at, eql_id)").format(table)
    yield sql.SQL("CREATE INDEX ON {} (eql_tenant, eql_written_at, eql_id)").format(table)
    # For `LogsView.follow`.
    yield sql.SQL("CREATE INDEX ON {} (eql_id)").format(table)
    if view.language is not None:
        yield _words_index(table, view.language)


def _value_columns(name: str) -> list[sql.Composed]:
    return [sql.SQL("{} numeric").format(sql.Identifier(f"{what}_{name}")) for what in ("sum", "min", "max")]


def _adding_columns(table: sql.Identifier, name: str) -> sql.Composed:
    columns = sql.SQL(", ADD COLUMN ").join(_value_columns(name))
    return sql.SQL("ALTER TABLE {} ADD COLUMN {}").format(table, columns)


def _words_index(table: sql.Identifier, language: str) -> sql.Composed:
    """The index of the words of each line: the expression is that of `LogsView.search`."""
    configuration = sql.Literal(f"pg_catalog.{language}")
    index = sql.SQL("CREATE INDEX ON {} USING gin (to_tsvector({}::regconfig, eql_line))")
    return index.format(table, configuration)
