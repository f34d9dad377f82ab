"""Stops a write over shards at a step of its commits: a trigger there waits for a lock that the test holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg import sql

from tests.waiting import wait_until

LOCK = 7


class Stop:
    """Makes a transaction wait at a step in a database, until it is released or its session is ended."""

    def __init__(self, dsn: str, step: str, *, at_commit: bool = False) -> None:
        self._dsn = dsn
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("SELECT pg_advisory_lock(%s)", [LOCK])
        self._connection.execute(
            f"CREATE FUNCTION stop_here() RETURNS trigger LANGUAGE plpgsql AS "
            f"'BEGIN PERFORM pg_advisory_xact_lock({LOCK}); RETURN NULL; END'"
        )
        self._connection.execute(
            sql.SQL(
                "CREATE CONSTRAINT TRIGGER stopping AFTER {} DEFERRABLE INITIALLY {} "
                "FOR EACH ROW EXECUTE FUNCTION stop_here()"
            ).format(sql.SQL(step), sql.SQL("DEFERRED" if at_commit else "IMMEDIATE"))
        )

    def reached(self) -> bool:
        row = self._connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        ).fetchone()
        return row is not None and row[0] > 0

    def await_reached(self) -> None:
        wait_until(self.reached, "the write has come to the step")

    def end_session(self) -> None:
        """End the session that waits, so that its transaction is rolled back."""
        self._connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event = 'advisory'"
        )

    def let_go(self) -> None:
        self._connection.close()


@contextmanager
def stopping(dsn: str, step: str, *, at_commit: bool = False) -> Iterator[Stop]:
    stop = Stop(dsn, step, at_commit=at_commit)
    try:
        yield stop
    finally:
        stop.let_go()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("DROP FUNCTION stop_here CASCADE")


def await_end_of_transactions(dsns: Sequence[str]) -> None:
    """Wait until the servers have taken note that a process was killed, and have ended what it had open."""
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            wait_until(lambda: no_transactions(connection), "the transactions of the process have ended")


def no_transactions(connection: psycopg.Connection) -> bool:
    row = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    ).fetchone()
    return row == (0,)
