"""Replaces a partition by a copy of its rows, in another order or in less space, while readers go on.

A transaction keeps writers away from the partition, copies it and exchanges the two. If it is interrupted, the
partition stays. The copy's rows are frozen: each transaction sees them, whatever its snapshot. So first check with
`seen_by_all` or `is_seen_by_all` that each transaction sees all rows of the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import fetch_all, fetch_first, fetch_one, in_copy, send_copy
from eventsql_orchestration.database.sessions import let_last, wait_at_most
from eventsql_orchestration.retry import Backoff
from eventsql_orchestration.storage.log_form import ROOM
from eventsql_orchestration.storage.segments import ADOPTION_CHECK

WAIT_SECONDS: Final = 0.5
"""The longest time for which one attempt makes other transactions wait for each lock. It is shorter than the server's
`deadlock_timeout`, so that the attempt gives way, and not a reader or writer that waits for it."""

EXCHANGE_SECONDS: Final = 10.0
"""Seconds for which an exchange is tried. Then the copy is dropped, and a later run tries again."""

VACUUM_WAIT_SECONDS: Final = 5.0
"""Seconds that a vacuum waits for another vacuum of the table, or for ANALYZE or CREATE INDEX. It is longer than the
server's `deadlock_timeout`, after which an autovacuum gives way."""


def begin(connection: Connection) -> None:
    """Let the caller's transaction, which copies and exchanges, last as long as it takes."""
    let_last(connection)
    # The parent is locked during the commit, so the commit waits for no standby. A standby that lacks the copy still
    # has the former partition.
    connection.execute("SET LOCAL synchronous_commit TO local")


def attempt(connection: Connection, step: Callable[[Connection], None], seconds: float = 0.0) -> bool:
    """Try a step in a savepoint, and wait at most `WAIT_SECONDS` for each lock. False if other transactions keep the
    locks.

    Tries for `seconds`, and at least once.
    """
    wait_at_most(connection, WAIT_SECONDS)
    retry = Backoff(seconds)
    while True:
        try:
            with connection.transaction():
                step(connection)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if not retry.lasts():
                return False
        else:
            return True


def may_vacuum(connection: Connection, schema: str, table: str) -> bool:
    """Whether the current role may vacuum a table. False if the table does not exist."""
    name = {"table": sql.Identifier(schema, table).as_string(connection)}
    return fetch_first(connection, Queries("exchanging", schema, room=ROOM)("may_vacuum"), name) == (True,)


def vacuum(connection: Connection, schema: str, table: str, *, analyze: bool = False) -> bool:
    """Free the space of a table's deleted rows, and mark its all-visible pages. The connection is in autocommit mode.

    With `analyze`, the planner's statistics of the table are made anew, too.

    False if that is left to the server: the current role may not vacuum, another session keeps its lock for
    `VACUUM_WAIT_SECONDS`, or the session's own limits are too short.
    """
    queries = Queries("exchanging", schema, room=ROOM)
    with suppress(psycopg.errors.UndefinedTable, psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable):
        if not may_vacuum(connection, schema, table):
            return False
        # VACUUM runs in no transaction, and behind a pooler a limit of the session would stay with the next client. So
        # a transaction waits first.
        with connection.transaction():
            wait_at_most(connection, VACUUM_WAIT_SECONDS)
            connection.execute(queries("lock_to_vacuum", table=table))
        connection.execute(queries("vacuum_and_analyze" if analyze else "vacuum", table=table))
        return True
    return False


class Exchange:
    """The exchange of the partition `table` of the table `parent`. All connections are in autocommit mode at first."""

    def __init__(self, schema: str, parent: str, table: str) -> None:
        self.table = sql.Identifier(schema, table)
        self._name = table
        self._parent = sql.Identifier(schema, parent)
        self._schema = schema
        self._queries = Queries("exchanging", schema, room=ROOM)

    def vacuum(self, connection: Connection) -> bool:
        """Vacuum the partition. See `vacuum`."""
        return vacuum(connection, self._schema, self._name)

    def seen_by_all(self, connection: Connection) -> str | None:
        """The bounds of a partition that nobody writes to, if `vacuum` found that each transaction sees all rows."""
        found = fetch_first(connection, self._query("seen_by_all"), prepare=False)
        return str(found[1]) if found is not None and found[0] else None

    def is_seen_by_all(self, connection: Connection) -> bool:
        """As `seen_by_all`, for a partition that other transactions may have written to since `vacuum`.

        Call it with writers kept away. An index-only scan fetches rows of a page that is not all-visible any more.
        """
        # The settings end with the savepoint. With them, the server would compile later statements of the transaction.
        with connection.transaction(force_rollback=True):
            for setting in ("enable_seqscan", "enable_bitmapscan"):
                connection.execute(f"SET LOCAL {setting} TO off")
            (plans,) = fetch_one(connection, self._query("counted_by_index"), prepare=False)
        return _heap_fetches(plans[0]["Plan"]) == 0

    def is_published(self, connection: Connection) -> bool:
        """Whether a subscriber of a publication might get the rows of a new table."""
        return fetch_one(connection, self._query("is_published"), {"schema": self._schema}) == (True,)

    def is_awaited(self, connection: Connection) -> bool:
        """Whether a transaction waits for a lock on the partition."""
        return fetch_one(connection, self._query("is_awaited"), prepare=False) == (True,)

    def probe(self, connection: Connection) -> None:
        """Check that `replace` would get its locks. Raises the driver's `LockNotAvailable` otherwise."""
        locked = sql.SQL("LOCK TABLE ONLY {}, {} IN ACCESS EXCLUSIVE MODE").format(self._parent, self.table)
        connection.execute(locked)
        raise psycopg.Rollback

    def keep_writers_away(self, connection: Connection) -> None:
        """Let nobody change the partition until the caller's transaction ends: the copy would lack the change."""
        connection.execute(sql.SQL("LOCK TABLE {} IN SHARE MODE").format(self.table))

    def partition(self, connection: Connection) -> tuple[str, str] | None:
        """The bounds of the partition, and the condition that its rows meet; None if it is not a partition any more."""
        found = fetch_first(connection, self._query("partition"), prepare=False)
        return None if found is None else (found[0], found[1])

    def copy(
        self, connection: Connection, source: Connection, new: str, *, order: sql.Composable, check: sql.Composable
    ) -> sql.Identifier:
        """Copy the rows in an order into a new table, in the transaction of `connection`. `source` reads them.

        `check` is the condition that all rows meet by the partition's bounds. Raises the driver's `LockNotAvailable` if
        another transaction waits for the partition before `source` reads it.
        """
        names = {"old": self.table, "new": sql.Identifier(self._schema, new), "order": order, "check": check}
        connection.execute(sql.SQL("CREATE TABLE {new} (LIKE {old} INCLUDING ALL)").format(**names))
        values = {"old": self.table.as_string(connection), "new": names["new"].as_string(connection)}
        for (option,) in fetch_all(connection, self._query("options"), values):
            connection.execute(sql.SQL("ALTER TABLE {new} {option}").format(new=names["new"], option=sql.SQL(option)))
        read = sql.SQL("COPY (SELECT * FROM {old} ORDER BY {order}) TO STDOUT (FORMAT binary)").format(**names)
        write = sql.SQL("COPY {new} FROM STDIN (FORMAT binary, FREEZE)").format(**names)
        with source.transaction():
            let_last(source)
            # If a transaction waits for `connection`, this waits behind it, and the server finds no deadlock.
            wait_at_most(source, WAIT_SECONDS)
            in_copy(source.cursor(), read, partial(send_copy, connection.cursor(), write))

        # With this constraint, attaching the table need not read it while other transactions wait.
        constraint = sql.SQL("ALTER TABLE {new} ADD CONSTRAINT {name} CHECK {check}")
        connection.execute(constraint.format(**names, name=sql.Identifier(ADOPTION_CHECK)))
        connection.execute(sql.SQL("ANALYZE {new}").format(**names))
        return sql.Identifier(self._schema, new)

    def replace(self, connection: Connection, *, new: sql.Identifier, bounds: str) -> None:
        """Let a new table take the place of the partition, in the caller's transaction. Readers of the parent wait.

        `bounds` are those of the partition. Raises the driver's `LockNotAvailable` after its timeout.
        """
        names = {
            "parent": self._parent, "old": self.table, "name": sql.Identifier(self._name), "new": new,
            "bounds": sql.SQL(bounds), "check": sql.Identifier(ADOPTION_CHECK),
        }  # fmt: skip
        for statement in (
            "ALTER TABLE {parent} DETACH PARTITION {old}",
            "DROP TABLE {old}",
            "ALTER TABLE {new} RENAME TO {name}",
            "ALTER TABLE {parent} ATTACH PARTITION {old} {bounds}",
            "ALTER TABLE {old} DROP CONSTRAINT {check}",
        ):
            connection.execute(sql.SQL(statement).format(**names))

    def _query(self, name: str) -> sql.SQL:
        return self._queries(name, table=self._name)


def _heap_fetches(plan: dict[str, Any]) -> int:
    """The heap fetches of a plan's index-only scans; 1 for a plan without such a scan."""
    if plan["Node Type"] == "Index Only Scan":
        return int(plan["Heap Fetches"])
    if "Plans" not in plan:
        return 1
    return sum(map(_heap_fetches, plan["Plans"]))
