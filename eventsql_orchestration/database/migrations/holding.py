"""Locking the tables that consumers, publishers and receivers use, before a migration or new roles change any table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import sql

from eventsql_orchestration.database.connections import Connection
from eventsql_orchestration.database.installation import has_table
from eventsql_orchestration.errors import DatabaseBusyError
from eventsql_orchestration.retry import Backoff

TABLES: Final = ("event_buffer", "event_buffer_lock", "topic", "topic_layout", "queue_message")
"""The tables that a publication locks, and the table of messages: a receive locks it to read, and then to write."""

ATTEMPT_MILLISECONDS: Final = 400
"""How long an attempt waits. It is below the server's `deadlock_timeout`, so that the migration gives way, and not a
publisher or receiver that waits for it."""

POLITE_SECONDS: Final = 5.0
"""For how long attempts wait only `ATTEMPT_MILLISECONDS`. If transactions overlap, and each lasts longer than an
attempt waits, no such attempt succeeds."""

LAST_MILLISECONDS: Final = 5_000
"""How long each later attempt waits. If a transaction that it waits for then needs a table that the migration has
locked, the server ends one of the two, and its error says to try again."""

CONSUMERS: Final = "consumer"
"""The table that a consumer locks before its handler publishes. A handler may take long."""

SECONDS: Final = 10.0
"""For how long a migration begins further attempts."""

_IN_USE: Final = (
    psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected,
)  # fmt: skip


def hold_publishers(connection: Connection, schema: str, further: Sequence[str] = ()) -> None:
    """Lock the tables that consumers, publishers and receivers use, and `further` ones, in the caller's transaction.

    It locks all of them or none. A publisher locks several of them in one statement. If the caller locked one after the
    other, each could wait for a table that the other has, and the server would end one of them. Raises
    `DatabaseBusyError` if other transactions keep a table for `SECONDS`.
    """
    present = [name for name in (*TABLES, *further) if has_table(connection, schema, name)]
    if not present:
        return
    has_consumers = has_table(connection, schema, CONSUMERS)
    lock = sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE")
    tables = sql.SQL(", ").join(sql.Identifier(schema, name) for name in present)
    retry = Backoff(SECONDS)
    polite_until = time.monotonic() + POLITE_SECONDS
    while True:
        limit = ATTEMPT_MILLISECONDS if time.monotonic() < polite_until else LAST_MILLISECONDS
        try:
            with connection.transaction():
                if has_consumers:
                    # The attempt holds nothing yet, so `lock_timeout` alone limits it.
                    connection.execute(lock.format(sql.Identifier(schema, CONSUMERS)))
                connection.execute(f"SET LOCAL statement_timeout TO {limit}")
                connection.execute(lock.format(tables))
                connection.execute("SET LOCAL statement_timeout TO 0")
        except _IN_USE as error:
            if not retry.lasts():
                raise DatabaseBusyError(
                    f"schema {schema!r} is as before, this changed nothing: other transactions, for example of "
                    f"consumers' handlers or of outboxes, have kept its tables for {SECONDS:.0f} s. Try again, or "
                    "stop these processes first; `eventsql doctor` names transactions that have been open for a minute"
                ) from error
        else:
            return
