"""Idle connections in front of the pool are used again, keep nobody waiting, and stay within the pool's bounds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
import sqlalchemy

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database import sessions as session_room
from tests.fixtures import Said, Sessions, Until


@pytest.fixture
def small(dsn: str) -> Iterator[Database]:
    """A database with at most two connections."""
    with Database(dsn, pool_size=2, max_overflow=0, application_name="small") as database:
        database.ensure_schema()
        yield database


def answering(connection: Connection | sqlalchemy.Connection) -> int:
    query = "SELECT pg_backend_pid()"
    if isinstance(connection, sqlalchemy.Connection):
        return int(connection.exec_driver_sql(query).scalar_one())
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def opened(session: psycopg.Connection, name: str) -> int:
    """The number of sessions of an application."""
    row = session.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
    assert row is not None
    return int(row[0])


def test_the_connection_that_was_used_last_is_used_next(database: Database) -> None:
    with database.connection() as first, database.connection() as last:
        wanted = answering(first)
        assert answering(last) != wanted
    with database.connection() as connection:
        assert answering(connection) == wanted


def test_an_idle_connection_does_not_keep_sqlalchemy_waiting(small: Database) -> None:
    with small.connection() as connection:
        kept = answering(connection)
    with small.core() as one, small.core() as other:
        assert kept in {answering(one), answering(other)}


def test_a_thread_that_waits_for_the_pool_gets_a_connection_that_is_given_back(small: Database) -> None:
    waiting, gone = threading.Event(), threading.Event()

    def wait() -> int:
        waiting.set()
        with small.core() as connection:
            gone.set()
            return answering(connection)

    with ThreadPoolExecutor(1) as threads, ExitStack() as using:
        first, last = (using.enter_context(small.connection()) for _ in range(2))
        pids = {answering(first), answering(last)}
        waiter = threads.submit(wait)
        assert waiting.wait(60)
        assert not gone.is_set()
        using.close()
        assert waiter.result(60) in pids


def test_no_more_connections_are_kept_than_the_pool_keeps(dsn: str, session: Connection, until: Until) -> None:
    with Database(dsn, pool_size=2, max_overflow=8, application_name="many") as database, ExitStack() as using:
        for _ in range(8):
            using.enter_context(database.connection())
        assert opened(session, "many") == 8
        using.close()
        until(lambda: opened(session, "many") == 2)


def test_closing_ends_idle_connections_and_the_database_can_be_used_again(
    small: Database, session: Connection, until: Until
) -> None:
    with small.connection() as connection:
        answering(connection)
    small.close()
    until(lambda: opened(session, "small") == 0)
    with small.connection() as connection:
        answering(connection)


def test_a_connection_in_use_while_the_database_is_closed_ends_with_its_use(
    small: Database, session: Connection, until: Until
) -> None:
    with small.connection() as connection:
        small.close()
        answering(connection)
    until(lambda: opened(session, "small") == 0)


def test_a_session_that_the_server_ended_costs_no_error(small: Database, session: Connection, until: Until) -> None:
    with small.connection() as connection:
        ended = answering(connection)
    session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'small'")
    until(lambda: opened(session, "small") == 0)
    with small.connection() as connection:
        assert answering(connection) != ended


def test_a_connection_that_was_idle_for_long_is_pinged(
    database: Database, said_by: Callable[[Database], Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = said_by(database)
    with database.connection() as connection:
        connection.execute("SELECT 1")
    assert said.verbs() == ["SELECT"]
    monkeypatch.setattr(session_room, "ASKED_AFTER", 0.0)
    with database.connection() as connection:
        connection.execute("SELECT 1")
    assert said.verbs() == [";", "SELECT"]


def test_a_transaction_that_is_left_open_does_not_reach_the_next_user(database: Database, sessions: Sessions) -> None:
    with database.connection() as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE public.left_open (id integer)")
    with database.connection() as connection:
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert sessions().execute("SELECT to_regclass('public.left_open')").fetchone() == (None,)
