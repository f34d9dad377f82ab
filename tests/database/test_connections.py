"""A connection that a caller hands in takes part where its transaction can, and is refused with a reason elsewhere."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from eventsql_orchestration.database import Database
from eventsql_orchestration.database.connections import Home, identity
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import DatabaseUnavailableError, ValidationError


@pytest.fixture
def other(server: EmbeddedPostgres) -> Iterator[str]:
    """Another database of the same server."""
    yield server.create_database("another")
    server.drop_database("another")


def by_another_name(dsn: str) -> str:
    """The same database, by a host that is called otherwise."""
    named = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo(dsn, host="an-alias.invalid", hostaddr=str(named["host"]))


# Which database


def test_a_connection_to_another_database_is_refused_with_both_names_and_goes_on(
    database: Database, other: str
) -> None:
    with psycopg.connect(other) as mine:
        mine.execute("CREATE TABLE accounts (id int)")
        with (
            pytest.raises(ValidationError, match=f"'another' at .* not to the platform's .*{database.url.database}"),
            database.callers(mine),
        ):
            pytest.fail("the block ran")
        assert mine.info.transaction_status is TransactionStatus.INTRANS
        assert mine.execute("SELECT count(*) FROM accounts").fetchone() == (0,)


def test_a_role_that_may_not_ask_who_the_server_is_is_not_refused(database: Database, dsn: str) -> None:
    with database.connection() as connection:
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        connection.execute("CREATE ROLE restricted")
    try:
        with psycopg.connect(by_another_name(dsn)) as mine:
            mine.execute("CREATE TABLE accounts (id int)")
            mine.execute("SET LOCAL ROLE restricted")
            with database.callers(mine) as joined:
                # The transaction has survived the refusal.
                assert joined.execute("SELECT to_regclass('accounts') IS NOT NULL").fetchone() == (True,)
    finally:
        with database.connection() as connection:
            connection.execute("DROP ROLE restricted")


def test_a_database_that_another_server_has_taken_over_is_known_again(dsn: str, other: str) -> None:
    with psycopg.connect(dsn) as before, psycopg.connect(other) as after:
        answers = iter([identity(before), identity(after)])
        home = Home()
        home.check(before, "the platform's", lambda: next(answers))
        home.check(after, "the platform's", lambda: next(answers))
        home.check(after, "the platform's", lambda: next(answers))


def test_a_connection_that_was_told_apart_is_not_kept(database: Database, dsn: str) -> None:
    mine = psycopg.connect(dsn)
    with database.callers(mine):
        pass
    mine.close()
    known = weakref.ref(mine)
    del mine
    gc.collect()
    assert known() is None


def test_a_closed_connection_raises_an_error_of_the_package(database: Database, dsn: str) -> None:
    mine = psycopg.connect(dsn)
    mine.close()
    with pytest.raises(DatabaseUnavailableError, match="closed"), database.callers(mine):
        pytest.fail("the block ran")


# What kind


def test_statements_on_a_connection_of_sqlalchemy_are_part_of_its_transaction(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as mine:
        with database.joined(mine) as joined:
            joined.execute("CREATE TABLE accounts (id int)")
        assert mine.in_transaction()
        mine.rollback()
        assert mine.scalar(sqlalchemy.text("SELECT to_regclass('accounts')")) is None


def test_a_connection_of_sqlalchemy_in_autocommit_is_refused_and_unchanged(
    database: Database, engine: sqlalchemy.Engine
) -> None:
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as mine:
        with pytest.raises(ValidationError, match="AUTOCOMMIT"), database.callers(mine):
            pytest.fail("the block ran")
        assert not mine.in_transaction()
        with mine.begin(), pytest.raises(ValidationError, match="AUTOCOMMIT"), database.callers(mine):
            pytest.fail("the block ran")


def test_the_error_for_a_session_says_to_pass_its_connection(database: Database, engine: sqlalchemy.Engine) -> None:
    session: Any
    for session in (Session(engine), scoped_session(sessionmaker(engine))):
        with pytest.raises(ValidationError, match=r"pass `session\.connection\(\)`"), database.callers(session):
            pytest.fail("the block ran")
        with database.callers(session.connection()) as joined:
            assert joined.execute("SELECT 1").fetchone() == (1,)
        session.close()


def test_the_error_for_a_connection_of_asyncio_says_what_sends_an_event_or_a_message(database: Database) -> None:
    engine = create_async_engine("postgresql+psycopg://")
    given: Any
    for given in (AsyncSession(engine), AsyncConnection(engine)):
        with pytest.raises(ValidationError, match=r"statement.*event.*`queue_send`.*message"), database.callers(given):
            pytest.fail("the block ran")


@pytest.mark.parametrize("given", [None, "postgresql://", 7])
def test_an_object_that_is_no_connection_is_refused(database: Database, given: Any) -> None:
    with pytest.raises(ValidationError, match="a psycopg or SQLAlchemy"), database.callers(given):
        pytest.fail("the block ran")
