"""Sorting closed partitions of logs by resource and time, beside readers and writers.

A partition has its lines in the order in which they came: each line of a resource is on a page of its own. A copy in
the order of resources replaces the partition, and has these lines on few pages. If a writer comes meanwhile, it waits
for a moment, its line goes into the partition, and a later run copies anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database import Connection, Database, Queries, replaced_tables, role_statements
from eventsql_orchestration.database.migrations import SYSTEM_PATH
from eventsql_orchestration.database.rows import fetch_all, fetch_one
from eventsql_orchestration.storage import exchanging, segments
from eventsql_orchestration.storage.exchanging import Exchange, attempt
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.views.definitions import Logs, start_of_partition

logger = logging.getLogger(__name__)

RUN_SECONDS: Final = 300.0
"""Seconds for which one run sorts partitions of a view. The next run goes on."""

LOOK_SECONDS: Final = 0.1
"""How often a copy looks whether a writer waits for it."""

_ORDER: Final = sql.SQL("eql_tenant, eql_resource, eql_written_at, eql_id")


@dataclass(frozen=True, slots=True)
class Sorted:
    """The partitions of logs that `sort` sorted, and the partitions in use, which it left for the next run."""

    view: str
    partitions: int
    busy: int


class _InUseError(Exception):
    """Other transactions use the partition."""


class LogSorting:
    """Sorts the partitions of one log."""

    def __init__(self, database: Database, logs: Logs) -> None:
        self._database = database
        self._schema = database.schema
        self._logs = logs
        self._queries = Queries("views", database.schema)

    def run(self, now: datetime) -> Sorted:
        """Sort the partitions that are closed at a time."""
        until, done, busy = time.monotonic() + RUN_SECONDS, 0, 0
        with self._database.connection() as connection:
            due = self._due(connection, now)
        if due:
            dedicated = self._database.dedicated
            with self._database.errors(), dedicated() as connection, dedicated() as source, dedicated() as watch:
                for partition in due:
                    if time.monotonic() >= until:
                        break
                    if self._sort(connection, source, watch, partition):
                        done += 1
                    else:
                        busy += 1
        return Sorted(self._logs.name, done, busy)

    def _due(self, connection: Connection, now: datetime) -> list[str]:
        """The closed partitions that are not sorted yet, the oldest first. Those beyond the retention are left out."""
        if self._logs.sort_after is None:
            return []
        closed = now - self._logs.period - self._logs.sort_after
        kept = None if self._logs.retention is None else now - self._logs.period - self._logs.retention
        table = sql.Identifier(self._schema, self._logs.table).as_string(connection)
        rows = fetch_all(connection, self._queries("unsorted_partitions"), {"table": table})
        starts = {partition: start_of_partition(partition) for (partition,) in rows}
        return [name for name, start in starts.items() if start <= closed and (kept is None or start > kept)]

    def _sort(self, connection: Connection, source: Connection, watch: Connection, partition: str) -> bool:
        """Sort a partition. False if other transactions use it, or if it has something that the exchange would lose."""
        exchange = Exchange(self._schema, self._logs.table, partition)
        try:
            with connection.transaction():
                self._begin(connection, source, exchange, partition)
                self._replace(connection, source, watch, exchange, partition)
        except (
            _InUseError, psycopg.errors.UndefinedTable, psycopg.errors.DependentObjectsStillExist,
            psycopg.errors.LockNotAvailable,
        ) as error:  # fmt: skip
            logger.info("partition %r of logs %r is not sorted yet: %s", partition, self._logs.name, error)
            return False
        return True

    def _begin(self, connection: Connection, source: Connection, exchange: Exchange, partition: str) -> None:
        """Keep other programs from sorting a partition in this transaction, and vacuum it. Raises `_InUseError`."""
        exchanging.begin(connection)
        # The bounds are read as texts, and written again: in one form.
        for setting in (SYSTEM_PATH, "SET LOCAL timezone TO 'UTC'", "SET LOCAL datestyle TO 'ISO'"):
            connection.execute(setting)
        if fetch_one(connection, self._queries("try_sort"), {"table": f"{self._schema}.{partition}"}) != (True,):
            raise _InUseError("another process sorts it")
        if not exchange.vacuum(source) or exchange.is_published(source):
            raise _InUseError("it cannot be vacuumed just now, or it may be replicated")

    def _replace(
        self, connection: Connection, source: Connection, watch: Connection, exchange: Exchange, partition: str
    ) -> None:
        """Let a sorted copy take the place of a partition, in the caller's transaction. Raises `_InUseError`."""
        has_roles = role_statements.act_as_owner(connection, self._schema)
        # A long reader would make the copy useless.
        if not attempt(connection, exchange.probe) or not attempt(connection, exchange.keep_writers_away):
            raise _InUseError("transactions use it")
        found = exchange.partition(connection)
        if found is None or not exchange.is_seen_by_all(connection):
            raise _InUseError(
                "an open transaction does not see all lines of the partition, or wrote some of them just now"
            )

        bounds, condition = found
        with _giving_way(watch, (source, connection), exchange):
            new = exchange.copy(
                connection, source, f"{partition}_new", order=_ORDER, check=sql.SQL("({})").format(sql.SQL(condition))
            )
        self._keep(connection, partition, new, has_roles=has_roles)

        def replace(connection: Connection) -> None:
            if exchange.is_awaited(connection):
                raise _InUseError("a writer waits for it")
            exchange.replace(connection, new=new, bounds=bounds)

        if not attempt(connection, replace, seconds=exchanging.EXCHANGE_SECONDS):
            raise _InUseError("transactions use it")
        table = exchange.table.as_string(connection)
        (index,) = fetch_one(connection, self._queries("sorting_index"), {"table": table})
        connection.execute(sql.SQL("ALTER TABLE {} CLUSTER ON {}").format(exchange.table, sql.Identifier(index)))

    def _keep(self, connection: Connection, partition: str, new: sql.Identifier, *, has_roles: bool) -> None:
        """Give the copy the owner and the rights of a partition. Raises `_InUseError` if it would lose anything."""
        live, made = (self._schema, partition), (self._schema, f"{partition}_new")
        if lost := replaced_tables.lost(connection, live, made):
            raise _InUseError(f"it would lose {', '.join(lost)}")
        replaced_tables.revoke_all(connection, new)
        replaced_tables.grant_as_on(connection, sql.Identifier(*live), new)
        if not has_roles:
            segments.pass_on_owner(connection, self._schema, sql.Identifier(*live), new)


@contextmanager
def _giving_way(watch: Connection, copying: Iterable[Connection], exchange: Exchange) -> Iterator[None]:
    """Cancel what connections do in the block as soon as a writer waits for the partition. Raises `_InUseError`."""
    ended, given_way = threading.Event(), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            if exchange.is_awaited(watch):
                given_way.set()
                for each in copying:
                    each.cancel_safe()
                return

    looking = start_thread("sorting", look)
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        if given_way.is_set():
            raise _InUseError("a writer came") from error
        raise
    finally:
        ended.set()
        looking.join()
    if given_way.is_set():
        raise _InUseError("a writer came")
