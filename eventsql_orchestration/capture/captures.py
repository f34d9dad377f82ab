"""Captures: triggers on a table write an event for each change of a row, in the transaction that changes it.

The functions in the database do the work (`capture_changes` and `capture_page`, migration 0018). This module makes the
triggers, drives the first snapshot page by page, and removes both.
"""

from __future__ import annotations

import logging
import re
from builtins import list as list_of
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from eventsql_orchestration.boundary import checked
from eventsql_orchestration.capture.values import (
    TRIGGERS,
    Capture,
    Columns,
    Table,
    as_capture,
    bypass_of,
    drop_command,
    grant_of,
    grants_to_read,
    known_as,
    trigger_name,
)
from eventsql_orchestration.database import Connection, Database, Platform, Queries, database_of, driver_connection
from eventsql_orchestration.database.role_statements import owned_tables
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, query_all
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import (
    CaptureError,
    DatabaseBusyError,
    InvalidNameError,
    RedefinitionError,
    ShardError,
    ValidationError,
)
from eventsql_orchestration.retry import Backoff, while_busy
from eventsql_orchestration.topics.catalog import existing_topic, lock_registry
from eventsql_orchestration.validation import check_text, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_ROWS: Final = 2_000
"""The most rows in a page of a snapshot. Writers of these rows wait while the page is published: some 50 ms."""

LOCK_SECONDS: Final = 0.5
"""The most seconds for which one attempt makes the writers of a table wait, if a transaction does not end."""

RETRY_SECONDS: Final = 30.0
"""Seconds for which an attempt to get a lock is repeated."""

_PART: Final = r'("(?:[^"]|"")+"|[^".\s]+)'
_TABLE_NAME: Final = re.compile(rf"{_PART}(?:\.{_PART})?")


@checked
class Captures:
    """Creates, lists and drops the captures of tables of one database.

    `database` is a platform (`EventSQL`), one of its shards, or a `Database`.
    """

    def __init__(self, database: Database | Platform) -> None:
        self._database = database = database_of(database)
        self._queries = Queries("capture", database.schema)

    def create(
        self, table: str, topic: str,
        *, key: Sequence[str] | None = None, columns: Sequence[str] | None = None, snapshot: bool = True,
        on_rows: Callable[[int], None] = lambda _rows: None,
    ) -> Capture:  # fmt: skip
        """Capture the changes of `table` to `topic` from now on, and publish the rows that it has now.

        `table` is a name as in SQL; without a schema it is of `public`. `key` are the columns of a unique key, by
        default the primary key. The key tells rows apart and chooses their partition. `columns` are captured beside the
        key, by default all. With `snapshot`, the call publishes the rows that exist, and returns when it has read them
        all; `on_rows` gets their number after each page. Writers go on. If the call ends early, call it again: it
        continues the snapshot, or begins it anew if the type of the key has changed. If a capture exists without a
        snapshot, the call makes the snapshot. If the capture is `outdated`, the call notes the table and its columns as
        they are now.

        Raises `TopicNotFoundError`; `CaptureError` for a table that cannot be captured; `ValidationError` for unknown
        columns; `RedefinitionError` if the capture exists with another key or other columns; `DatabaseBusyError` if
        writers' transactions do not end.
        """
        table = _qualified_name(table)
        made = self._locking(table, lambda: self._create(table, topic, key, columns, snapshot=snapshot))
        if snapshot:
            self._snapshot(made, on_rows)
        for each in self.list():
            if each.id == made:
                return each
        raise CaptureError(f"the capture of table {table!r} to topic {topic!r} was dropped meanwhile: create it again")

    def list(self) -> list[Capture]:
        """All captures, by table and topic."""
        return [as_capture(*row) for row in query_all(self._database, self._queries("list"))]

    def idle_triggers(self) -> list_of[tuple[str, str]]:
        """Tables and topics of triggers that do nothing, because their capture was deleted with its topic."""
        return query_all(self._database, self._queries("idle_triggers"))

    def drop(self, table: str, topic: str) -> None:
        """Stop capturing the changes of `table` to `topic`. The events stay.

        Removes triggers that stayed after their topic was deleted, too. Raises `CaptureError` if there is no such
        capture, and `DatabaseBusyError` if transactions on the table do not end.
        """
        table = _qualified_name(table)
        self._locking(table, lambda: self._drop(table, topic))

    def check_captured(self, table: str, topic: str) -> None:
        """Raise `CaptureError` if `drop` would find nothing to stop."""
        table = _qualified_name(table)
        with self._database.connection() as connection:
            found = fetch_first(connection, self._queries("table"), {"table": table})
            own = {"relation": None if found is None else found[0], "topic": topic}
            triggers = None if found is None else fetch_first(connection, self._queries("triggers_of"), own)
        if triggers is None and (table, topic) not in {(each.table, each.topic) for each in self.list()}:
            raise _not_captured(table, topic)

    def _locking(self, table: str, attempt: Callable[[], T]) -> T:
        """Try to change a table's triggers until the table's lock is free. Later writers wait behind each attempt."""
        message = f"transactions that use table {table!r} did not end in time, and nothing was changed: try again later"
        return while_busy(attempt, seconds=RETRY_SECONDS, message=lambda _: message)

    def _create(
        self, table: str, topic: str, key: Sequence[str] | None, columns: Sequence[str] | None, *, snapshot: bool
    ) -> int:
        with self._database.core() as connection:
            driver = driver_connection(connection)
            lock_registry(connection)
            wait_at_most(driver, LOCK_SECONDS)
            if existing_topic(connection, topic).shards is not None:
                raise ShardError(
                    f"table {table!r} cannot be captured: this database is a shard, and a row's key may belong to "
                    "another shard. Capture the table to a topic of a platform on one database"
                )
            found = self._capturable(driver, table)
            _lock(driver, found, "SHARE ROW EXCLUSIVE")
            # Before the lock, the table may have been altered or dropped, or another table may have taken its name.
            found = self._capturable(driver, table)
            chosen_key, chosen = self._chosen(driver, found, key, columns)

            own = {"relation": found.relation, "topic": topic}
            existing = fetch_first(driver, self._queries("existing"), own)
            if existing is not None:
                capture, same_table, key_names, key_numbers, column_names, column_numbers, dropped = existing
                if same_table:
                    # Columns may have been renamed since the capture was made, and dropped columns may have been added
                    # again.
                    kept = chosen and [
                        number
                        for name, number in zip(*chosen, strict=True)
                        if name not in dropped or number in column_numbers
                    ]
                    same = (key_numbers, _in_any_order(column_numbers)) == (chosen_key.numbers, _in_any_order(kept))
                else:
                    names = chosen and chosen.names
                    same = (key_names, _in_any_order(column_names)) == (chosen_key.names, _in_any_order(names))
                if not same:
                    raise RedefinitionError(
                        f"table {str(found)!r} is captured to topic {topic!r} with another key or other columns: drop "
                        f"it first with `{drop_command(str(found), topic)}`"
                    )
                values = known_as(found, chosen_key, chosen) | {"capture": capture}
                driver.execute(self._queries("note_columns"), values)
                if snapshot:
                    driver.execute(self._queries("start_snapshot"), {"capture": capture})
                return int(capture)
            return self._insert(driver, found, topic, chosen_key, chosen, snapshot=snapshot)

    def _table(self, driver: psycopg.Connection[Any], table: str) -> Table | None:
        row = fetch_first(driver, self._queries("table"), {"table": table})
        return None if row is None else Table(*row)

    def _capturable(self, driver: psycopg.Connection[Any], table: str) -> Table:
        """The table of this name. Raises `CaptureError` if it cannot be captured."""
        found = self._table(driver, table)
        if found is None:
            raise CaptureError(f"table {table!r} does not exist: name it as in SQL, with its schema")
        of_platform = found.schema == self._database.schema and any(
            name == found.name for _, name, *_ in owned_tables(driver, found.schema)
        )
        if found.of_system or of_platform:
            reason = "it is a table of the system or of the platform"
        elif found.kind == "p" or found.inherits:
            reason = "it has partitions or is a partition, and changes of a partition can bypass its triggers"
        elif found.kind != "r":
            reason = "it is not a table"
        elif found.persistence != "p":
            reason = "it is temporary or unlogged, and a crash empties it without a change"
        elif not found.trusted:
            reason = (
                f"its triggers would run as role {found.platform_owner}, and its owner {found.owner} is not a "
                "member of that role: " + grant_of(found.platform_owner, found.owner)
            )
        elif not found.readable:
            reason = f"role {found.platform_owner} may not read it: {grants_to_read(str(found), found.platform_owner)}"
        elif found.hidden:
            reason = f"its row security hides rows from role {found.platform_owner}: {bypass_of(found.platform_owner)}"
        else:
            return found
        raise CaptureError(f"table {table!r} cannot be captured: {reason}")

    def _chosen(
        self, driver: psycopg.Connection[Any], table: Table, key: Sequence[str] | None, columns: Sequence[str] | None
    ) -> tuple[Columns, Columns | None]:
        """The columns of the key, and the captured columns; None for all."""
        described = {
            name: (number, virtual, ambiguous)
            for name, number, virtual, ambiguous in fetch_all(
                driver, self._queries("columns"), {"relation": table.relation}
            )
        }

        def numbered(what: str, names: Sequence[str]) -> Columns:
            if isinstance(names, str) or not names or len(set(names)) < len(names):
                raise ValidationError(f"{what} must name one column or several, each of them once, not {shown(names)}")
            for name in names:
                check_text(what, name)
                if name not in described:
                    raise ValidationError(f"table {str(table)!r} has no column {name!r}")
                if described[name][1]:
                    raise ValidationError(
                        f"column {name!r} of table {str(table)!r} is computed when it is read, and cannot be captured: "
                        "leave it out"
                    )
            return Columns(list(names), [described[name][0] for name in names])

        if key is None and not table.primary_key:
            raise CaptureError(
                f"table {str(table)!r} has no primary key: name the columns of a unique key (--key), none of them NULL"
            )
        chosen = numbered("key", table.primary_key if key is None else key)
        if ambiguous := [name for name in chosen.names if described[name][2]]:
            raise CaptureError(
                f"column {ambiguous[0]!r} of table {str(table)!r} cannot be a key: its type is not one of "
                "PostgreSQL's own, or its collation treats different texts as equal"
            )
        return chosen, None if columns is None else numbered("columns", columns)

    def _insert(
        self, driver: psycopg.Connection[Any], table: Table, topic: str, key: Columns, columns: Columns | None,
        *, snapshot: bool,
    ) -> int:  # fmt: skip
        values = {**known_as(table, key, columns), "topic": topic, "snapshot": "running" if snapshot else "none"}
        while True:
            capture, transaction = fetch_one(driver, self._queries("insert_capture"), values)
            named = {"relation": table.relation, "trigger": trigger_name(capture, "insert")}
            if fetch_one(driver, self._queries("taken"), named) == (False,):
                break
            # The trigger belongs to another installation in this database, which numbers its own captures.
            driver.execute(self._queries("give_number_back"), {"capture": capture})
        missing = fetch_first(driver, self._queries("missing"), {"capture": capture})
        if missing is not None and missing[0] is not None:
            raise CaptureError(
                f"table {str(table)!r} {missing[0]}: name the columns of a primary key, or of a unique index that is "
                "not deferrable and whose columns are NOT NULL"
            )
        for operation, rows in TRIGGERS.items():
            driver.execute(
                sql.SQL(
                    "CREATE TRIGGER {name} AFTER {operation} ON {table} {rows} FOR EACH STATEMENT "
                    "EXECUTE FUNCTION {function}({capture}, {transaction}, {topic})"
                ).format(
                    name=sql.Identifier(trigger_name(capture, operation)), operation=sql.SQL(operation),
                    table=sql.Identifier(table.schema, table.name), rows=sql.SQL(rows),
                    function=sql.Identifier(self._database.schema, "capture_changes"),
                    capture=sql.Literal(str(capture)), transaction=sql.Literal(transaction), topic=sql.Literal(topic),
                )
            )  # fmt: skip
        logger.info("table %s is captured to topic %r", table, topic)
        return int(capture)

    def _snapshot(self, capture: int, on_rows: Callable[[int], None]) -> None:
        """Publish the pages of a first snapshot that are left.

        A page locks its rows without waiting. If another transaction has one of them, the page gets smaller. A page of
        one row waits.
        """
        rows, size, retry = 0, PAGE_ROWS, Backoff(RETRY_SECONDS)
        while True:
            try:
                with self._database.transaction() as connection:
                    wait_at_most(connection, LOCK_SECONDS)
                    page = self._page(connection, capture, size)
            except DatabaseBusyError as error:
                if size == 1 and not retry.lasts():
                    raise DatabaseBusyError(
                        f"another transaction holds a row of the captured table, and the snapshot stopped after {rows} "
                        "rows: create the capture again to go on"
                    ) from error
                size = max(1, size // 8)
                continue
            if page is None:
                return
            rows, size, retry = rows + page, min(PAGE_ROWS, size * 2), Backoff(RETRY_SECONDS)
            on_rows(rows)

    def _page(self, connection: Connection, capture: int, size: int) -> int | None:
        """Publish the next page of a first snapshot; gives the number of its rows, None after the last page."""
        own = {"capture": capture}
        noted = fetch_first(connection, self._queries("page_types"), own)
        page = fetch_one(connection, self._queries("page"), {**own, "most": size, "waiting": size == 1})[0]
        if noted is None:
            return None
        # The page has locked the table, so no type changes any more.
        if fetch_first(connection, self._queries("note_types"), {**own, "types": noted[0]}) == (True,):
            logger.info(
                "a snapshot begins again from the first row: the type of its table's key has changed, and with "
                "it the order of rows"
            )
            return page or 0
        return None if page is None else int(page)

    def _drop(self, table: str, topic: str) -> None:
        with self._database.core() as connection:
            driver = driver_connection(connection)
            wait_at_most(driver, LOCK_SECONDS)
            found = self._table(driver, table)
            if found is not None:
                # Lock the table before the capture's row, as a writer does.
                _lock(driver, found, "ACCESS EXCLUSIVE")
                # Before the lock, the table may have been dropped, or another table may have taken its name.
                found = self._table(driver, table)
            own = {"relation": None if found is None else found.relation, "topic": topic, "name": table}
            # Do this before the triggers go, because they name the capture's table.
            deleted = driver.execute(self._queries("delete_capture"), own).rowcount
            triggers = []
            if found is not None:
                triggers = fetch_all(driver, self._queries("triggers_of"), own)
                name = sql.Identifier(found.schema, found.name)
                for (trigger,) in triggers:
                    driver.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.Identifier(trigger), name))
            if not deleted and not triggers:
                raise _not_captured(table, topic)


def _lock(driver: psycopg.Connection[Any], table: Table, mode: str) -> None:
    """Lock a table, unless it, or its schema, is dropped or renamed meanwhile."""
    name = sql.Identifier(table.schema, table.name)
    with suppress(psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName), driver.transaction():
        driver.execute(sql.SQL("LOCK TABLE {} IN {} MODE").format(name, sql.SQL(mode)))


def _in_any_order(columns: Iterable[str | int] | None) -> set[str | int] | None:
    return None if columns is None else set(columns)


def _not_captured(table: str, topic: str) -> CaptureError:
    return CaptureError(
        f"table {table!r} is not captured to topic {topic!r}: `eventsql capture list` shows the captures"
    )


def _qualified_name(table: str) -> str:
    """The name of a table with its schema; a name without a schema is of `public`."""
    found = _TABLE_NAME.fullmatch(check_text("table", table))
    if found is None:
        raise InvalidNameError(
            f"table {shown(table)} is not usable: use its name as in SQL, with its schema, such as public.orders"
        )
    return table if found[2] else f"public.{table}"
