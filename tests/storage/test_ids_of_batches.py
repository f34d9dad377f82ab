"""The ids of a batch of a log in blocks: consecutive, above all before, and never given out twice."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.storage.appending import ForeignIdsError, LogAppender
from eventsql_orchestration.storage.log_form import FORMS, form_now
from eventsql_orchestration.storage.log_queries import LogQueries

if TYPE_CHECKING:
    from tests.fixtures import Sessions, Until

SEQUENCE = "eventsql.orders_block_eql_id_seq"


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))


pytestmark = pytest.mark.prepared.with_args(prepare)


def draw(session: psycopg.Connection, *batches: int, after: int = 0) -> list[int]:
    form_now(session, "eventsql", "orders")
    return [LogAppender("eventsql").draw(session, "orders", events, after=after) for events in batches]


@pytest.fixture(params=["owns the sequence", "may only draw"])
def drawing(request: pytest.FixtureRequest, sessions: Sessions) -> Iterator[psycopg.Connection]:
    """A session of a role that may set the log's sequence, or of one that may only draw from it."""
    session = sessions()
    session.autocommit = True
    if request.param == "owns the sequence":
        yield session
        return
    role = f"drawer_{uuid.uuid4().hex[:8]}"
    session.execute(f"CREATE ROLE {role}")
    try:
        session.execute(f"GRANT USAGE ON SCHEMA eventsql TO {role}")
        session.execute(f"GRANT SELECT ON eventsql.topic, eventsql.orders_block TO {role}")
        session.execute(f"GRANT USAGE ON SEQUENCE {SEQUENCE} TO {role}")
        session.execute(f"SET ROLE {role}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute(f"SELECT setval('{SEQUENCE}', 99)")
        yield session
    finally:
        session.execute("RESET ROLE")
        session.execute(f"DROP OWNED BY {role}")
        session.execute(f"DROP ROLE {role}")


def test_the_first_ids_of_a_log_begin_at_one(drawing: psycopg.Connection) -> None:
    assert draw(drawing, 3, 2, 1, 1) == [1, 4, 6, 7]


def test_ids_go_on_where_others_drew_one_by_one(drawing: psycopg.Connection, session: psycopg.Connection) -> None:
    draw(drawing, 2)
    assert session.execute(f"SELECT nextval('{SEQUENCE}') FROM generate_series(1, 3)").fetchall() == [(3,), (4,), (5,)]
    assert draw(drawing, 10) == [6]
    assert session.execute(f"SELECT nextval('{SEQUENCE}')").fetchone() == (16,)


def test_ids_begin_where_the_sequence_was_restarted(drawing: psycopg.Connection, session: psycopg.Connection) -> None:
    session.execute(f"ALTER SEQUENCE {SEQUENCE} RESTART WITH 1000")
    assert draw(drawing, 5, 5) == [1000, 1005]


def test_ids_that_are_not_larger_than_the_last_one_are_refused(drawing: psycopg.Connection) -> None:
    assert draw(drawing, 5) == [1]
    with pytest.raises(ForeignIdsError):
        draw(drawing, 5, after=6)
    assert draw(drawing, 5, after=10) == [11]


def test_ids_of_a_batch_that_was_rolled_back_do_not_come_again(session: psycopg.Connection) -> None:
    with pytest.raises(ZeroDivisionError), session.transaction():
        assert draw(session, 100) == [1]
        raise ZeroDivisionError
    assert draw(session, 1) == [101]


def test_a_batch_that_the_sequence_has_no_room_for_is_refused(session: psycopg.Connection) -> None:
    session.execute(f"SELECT setval('{SEQUENCE}', 9223372036854775800)")
    assert draw(session, 5) == [9223372036854775801]
    with pytest.raises(psycopg.DataError):
        draw(session, 3)


def test_no_id_is_given_to_another_program_too(drawing: psycopg.Connection, sessions: Sessions, until: Until) -> None:
    other = sessions()
    other.autocommit = True
    foreign: set[int] = set()
    done = threading.Event()

    def draw_beside() -> None:
        while not done.is_set():
            foreign.update(number for (number,) in other.execute(f"SELECT nextval('{SEQUENCE}')"))

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(draw_beside)
        try:
            until(lambda: foreign or beside.done())
            form_now(drawing, "eventsql", "orders")
            firsts, appender = list[int](), LogAppender("eventsql")
            for _ in range(3_000):
                with contextlib.suppress(ForeignIdsError):
                    firsts.append(appender.draw(drawing, "orders", 20, after=0))
        finally:
            done.set()
        beside.result()
    own = {first + number for first in firsts for number in range(20)}
    assert own
    assert not own & foreign


@pytest.mark.parametrize("name", ["append_state", "move"])
def test_the_driver_remembers_the_statements_of_a_batch(name: str) -> None:
    """The driver parses a statement of more than 4,096 bytes at each execution: 40 µs for each batch."""
    queries = LogQueries("append", "a schema with a long name")
    statement = queries(name, topic="a_topic_of_a_service", form=FORMS["blocks"])
    assert len(statement.as_string()) <= 4_096
