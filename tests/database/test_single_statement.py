"""A single statement commits by itself in one round trip, and fails as any other statement does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from psycopg import sql

from eventsql_orchestration.database import Database, single_statement
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.database.single_statement import SingleStatement
from eventsql_orchestration.errors import DatabaseError, DatabaseUnavailableError
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.fixtures import Said, SaidBy, Sessions

INSERT = sql.SQL("INSERT INTO public.numbers SELECT %(number)s::integer, %(text)s::text WHERE 7 %% 4 = 3")


@pytest.fixture
def statement(database: Database) -> SingleStatement:
    with database.connection() as connection:
        connection.execute("CREATE TABLE public.numbers (number integer PRIMARY KEY, text text)")
    return SingleStatement("number", INSERT)


def insert(database: Database, statement: SingleStatement, number: int, text: bytes | None = None) -> int:
    return database.execute(statement, {"text": text, "number": number.to_bytes(4, "big")})


@pytest.fixture
def stored(sessions: Sessions) -> Callable[[], list[tuple[int, str | None]]]:
    """The rows that another session sees."""
    other = sessions()
    other.autocommit = True
    return lambda: other.execute("SELECT number, text FROM public.numbers ORDER BY number").fetchall()


def test_it_is_committed_when_it_returns_and_tells_how_many_rows_it_wrote(
    database: Database, statement: SingleStatement, stored: Callable[[], object]
) -> None:
    assert insert(database, statement, 1, "ä".encode()) == 1
    assert insert(database, statement, 2) == 1
    assert stored() == [(1, "ä"), (2, None)]


def test_a_connection_prepares_it_once(
    database: Database, statement: SingleStatement, said_by: Callable[[Database], Said]
) -> None:
    said = said_by(database)
    insert(database, statement, 1)
    first = said.round_trips()
    insert(database, statement, 2)
    insert(database, statement, 3)
    assert (first, said.round_trips()) == (2, 2)


@pytest.mark.parametrize("lost", ["DEALLOCATE ALL", "DISCARD ALL"])
def test_it_is_prepared_again_where_the_server_has_forgotten_it(
    database: Database, statement: SingleStatement, stored: Callable[[], object], lost: str
) -> None:
    insert(database, statement, 1)
    with database.connection() as connection:
        connection.execute(lost)
    insert(database, statement, 2)
    assert stored() == [(1, None), (2, None)]


def test_a_refused_statement_raises_an_error_of_the_package_and_leaves_the_connection_usable(
    database: Database, statement: SingleStatement, stored: Callable[[], object], said_by: Callable[[Database], Said]
) -> None:
    insert(database, statement, 1)
    said = said_by(database)
    with pytest.raises(DatabaseError) as refused:
        insert(database, statement, 1)
    assert getattr(refused.value.__cause__, "sqlstate", None) == "23505"
    insert(database, statement, 2)
    assert said.round_trips() == 2
    assert stored() == [(1, None), (2, None)]


@pytest.mark.parametrize(("prepare", "briefly"), [(True, False), (False, False), (True, True)])
def test_rows_of_a_statement_whose_commit_fails_are_no_result(database: Database, prepare: bool, briefly: bool) -> None:
    """The server sends the rows before it commits."""
    with database.connection() as connection:
        connection.execute("CREATE TABLE public.late (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    query = sql.SQL("INSERT INTO public.late SELECT %(number)s::integer RETURNING number")
    late = SingleStatement("late", query, prepare=prepare, briefly=briefly)
    number = {"number": b"\0\0\0\1"}
    assert database.fetch(late, number) == [(b"\0\0\0\1",)]
    for fetch in (database.fetch, database.fetch_values):
        with pytest.raises(DatabaseError) as refused:
            fetch(late, number)
        assert getattr(refused.value.__cause__, "sqlstate", None) == "23505"


def test_a_statement_that_cannot_be_prepared_raises_an_error_of_the_package_each_time(database: Database) -> None:
    statement = SingleStatement("missing", sql.SQL("INSERT INTO public.missing SELECT %(number)s::integer"))
    for _ in range(2):
        with pytest.raises(DatabaseError):
            database.execute(statement, {"number": b"\0\0\0\1"})


def test_a_connection_that_is_lost_meanwhile_raises_an_error_of_the_package_and_the_next_one_works(
    database: Database, statement: SingleStatement, sessions: Sessions, until_blocked: Callable[[], None],
    stored: Callable[[], object],
) -> None:  # fmt: skip
    locking, failed = sessions(), list[BaseException]()
    locking.execute("LOCK TABLE public.numbers")

    def blocked() -> None:
        try:
            insert(database, statement, 1)
        except DatabaseError as error:
            failed.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    until_blocked()
    locking.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    thread.join()
    locking.rollback()

    assert [type(error) for error in failed] == [DatabaseUnavailableError]
    insert(database, statement, 2)
    assert stored() == [(2, None)]


@pytest.fixture
def interrupting(sessions: Sessions, until_blocked: Callable[[], None]) -> Iterator[None]:
    """Keeps the table locked, and interrupts this process once a statement waits for it."""
    locking = sessions()
    locking.execute("LOCK TABLE public.numbers")

    def interrupt() -> None:
        until_blocked()
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def test_ctrl_c_cancels_a_statement_that_waits(
    database: Database, statement: SingleStatement, interrupting: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        insert(database, statement, 1)
    wait_until(lambda: waiting(database) == 0, "the end of the statement")


def test_ctrl_c_right_after_a_statement_was_sent_cancels_it(
    database: Database, statement: SingleStatement, sessions: Sessions, until_blocked: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    locking = sessions()
    locking.execute("LOCK TABLE public.numbers")

    def interrupt(_: object) -> None:
        until_blocked()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(single_statement, "generators", SimpleNamespace(execute=interrupt))
        with pytest.raises(KeyboardInterrupt):
            insert(database, statement, 1)
    wait_until(lambda: waiting(database) == 0, "the end of the statement")
    locking.rollback()
    assert insert(database, statement, 1) == 1


def waiting(database: Database) -> int:
    """The number of locks that sessions wait for."""
    with database.connection() as connection:
        return int(fetch_one(connection, sql.SQL("SELECT count(*) FROM pg_locks WHERE NOT granted"))[0])


@pytest.mark.parametrize(("seconds", "plans"), [(0.0, 0), (3_600.0, 1)])
def test_a_plan_of_a_briefly_prepared_statement_stays_for_its_time(
    database: Database, monkeypatch: pytest.MonkeyPatch, seconds: float, plans: int
) -> None:
    monkeypatch.setattr(single_statement, "BRIEF_SECONDS", seconds)
    with database.connection() as connection:
        connection.execute("CREATE TABLE public.numbers (number integer PRIMARY KEY)")
        connection.execute("INSERT INTO public.numbers SELECT generate_series(1, 20)")
    query = sql.SQL("SELECT number FROM public.numbers WHERE number = %(n)s::integer")
    brief = SingleStatement("brief", query, briefly=True)
    for number in range(1, 13):
        value = number.to_bytes(4)
        assert database.fetch(brief, {"n": value}) == [(value,)]
    with database.connection() as connection:
        found = connection.execute(
            "SELECT count(*) FILTER (WHERE generic_plans > 0), count(*) FROM pg_prepared_statements "
            "WHERE name LIKE 'eventsql_brief%'"
        ).fetchone()
    assert found == (plans, plans)


def test_a_brief_statement_is_prepared_while_it_is_executed_again_and_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, said_by: SaidBy
) -> None:
    said = said_by(database)
    now = 0.0
    monkeypatch.setattr(single_statement, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(single_statement, "BRIEF_SECONDS", 1.0)
    brief = SingleStatement("brief", sql.SQL("SELECT %(n)s::integer"), briefly=True)
    for at, trips, prepared in (
        # Alone, twice within a second, and again at once.
        (0.0, 1, 0), (5.0, 1, 0), (5.9, 2, 1), (6.8, 1, 1),
        # The plan is old, and then the last execution too.
        (7.0, 3, 1), (9.0, 2, 0), (9.5, 2, 1),
    ):  # fmt: skip
        now = at
        assert database.fetch(brief, {"n": b"\0\0\0\1"}) == [(b"\0\0\0\1",)]
        assert said.round_trips() == trips
        with database.connection() as connection:
            found = connection.execute("SELECT FROM pg_prepared_statements WHERE name LIKE 'eventsql_brief%'")
            assert found.rowcount == prepared
        said.statements()


def test_a_connection_keeps_the_plans_of_a_number_of_brief_statements(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(single_statement, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(single_statement, "MOST_NOTED", 4)
    query = sql.SQL("SELECT %(text)s::text")
    # Two at a time are kept, and those that are not used any more make room.
    for now, texts in ((0.0, "abcd"), (5.0, "ef")):  # noqa: B007 - the clock reads it
        for text in texts:
            each = SingleStatement("brief", query, briefly=True, constants={"text": text})
            for _ in range(3):
                assert database.fetch_values(each, {}) == [(text,)]
        with database.connection() as connection:
            found = connection.execute(
                "SELECT right(statement, 8) FROM pg_prepared_statements WHERE name LIKE 'eventsql_brief%' ORDER BY 1"
            ).fetchall()
        assert found == [(f"'{text}'::text"[-8:],) for text in texts[:2]]


def test_a_briefly_prepared_statement_that_is_lost_is_prepared_anew(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(single_statement, "time", SimpleNamespace(monotonic=lambda: now))
    brief = SingleStatement("brief", sql.SQL("SELECT %(n)s::integer"), briefly=True)
    for now in (0.0, 0.2, 0.4, 1.3):  # noqa: B007 - the clock reads it
        assert database.fetch(brief, {"n": b"\0\0\0\1"}) == [(b"\0\0\0\1",)]
        with database.connection() as connection:
            connection.execute("DEALLOCATE ALL", prepare=False)


def test_constants_stand_in_the_text_and_a_statement_without_values_keeps_its_first_plan(database: Database) -> None:
    text = "it's 7 %% of \\ %(a)s"
    query = sql.SQL("SELECT %(text)s::text || %(none)s::text IS NULL, %(text)s::text, 7 %% 4, %(n)s::integer")
    values = SingleStatement("mixed", query, constants={"text": text, "none": None})
    assert database.fetch_values(values, {"n": b"\0\0\0\1"}) == [(True, text, 3, 1)]
    alone = SingleStatement("alone", sql.SQL("SELECT %(text)s::text, 0.5::float8"), constants={"text": text})
    for _ in range(3):
        assert database.fetch_values(alone, {}) == [(text, 0.5)]
    with database.connection() as connection:
        found = connection.execute(
            "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE name LIKE 'eventsql_alone%'"
        ).fetchone()
    assert found == (3, 0)
