"""An outbox is published in the transaction that its caller means, or refused before anything is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from psycopg import conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection, connections
from eventsql_orchestration.database.notifications import BUFFER, UNCOMMITTED
from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.publishing import batches
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.store import Change
from tests.conftest import TEMPLATE, Administrator

if TYPE_CHECKING:
    from tests.fixtures import SaidBy, Sessions, Until, UntilBlocked

ONE = Publication("orders", b"one")


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 3))


pytestmark = pytest.mark.prepared.with_args(prepare)


@pytest.fixture(params=["template0", TEMPLATE], ids=["without the tables", "with the tables"])
def another(administrator: Administrator, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another database, which may have the platform's tables too."""
    with administrator.copied("another", template=request.param) as dsn:
        yield dsn


def both_ways(platform: EventSQL) -> list[Callable[[Any], object]]:
    return [
        lambda connection: platform.publisher.publish(ONE, connection=connection),
        lambda connection: platform.publisher.publish_all([ONE], connection=connection),
    ]


def test_an_outbox_in_another_database_is_refused_and_names_both(platform: EventSQL, another: str) -> None:
    with psycopg.connect(another) as mine:
        for publish in both_ways(platform):
            with pytest.raises(ValidationError, match="'another'") as caught:
                publish(mine)
            assert str(platform.database) in caught.value.message
        # The caller's transaction is not spoilt, and has nothing in it.
        if mine.execute("SELECT to_regclass('eventsql.event_buffer')").fetchone() != (None,):
            assert mine.execute("SELECT count(*) FROM eventsql.event_buffer").fetchone() == (0,)
    assert platform.transfer.run_once() == {}


def test_the_server_is_asked_once_whether_another_name_is_the_same_database(
    platform: EventSQL, direct_dsn: str, said_by: SaidBy
) -> None:
    named = conninfo.conninfo_to_dict(direct_dsn)
    alias = conninfo.make_conninfo(direct_dsn, host="an-alias.invalid", hostaddr=str(named["host"]))
    with psycopg.connect(alias) as mine:
        said = said_by(mine)
        platform.publisher.publish(ONE, connection=mine)
        platform.publisher.publish(ONE, connection=mine)
        assert said.verbs() == ["BEGIN", "SELECT", "COMMIT", "BEGIN", "WITH", "WITH"]
    assert platform.transfer.run_once() == {"orders": 2}


# What is no publication


@pytest.mark.parametrize("joined", [False, True])
def test_an_object_that_is_no_publication_is_refused_and_the_error_says_what_to_pass(
    platform: EventSQL, dsn: str, joined: bool
) -> None:
    bad: Any = {"topic": "orders", "value": b"one"}
    with psycopg.connect(dsn) as connection:
        mine = connection if joined else None
        with pytest.raises(ValidationError, match="must be a Publication"):
            platform.publisher.publish(bad, connection=mine)
        with pytest.raises(ValidationError, match="must be a Publication"):
            platform.publisher.publish_all([ONE, bad], connection=mine)
        connection.rollback()
        single: Any = ONE
        with pytest.raises(ValidationError, match="use publish for one"):
            platform.publisher.publish_all(single, connection=mine)
    assert platform.transfer.run_once() == {}


@pytest.mark.parametrize(("joined", "most"), [(False, 1), (True, 1), (False, batches.STRAIGHT_BYTES)])
def test_an_iterator_that_raises_rollback_is_an_error(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, joined: bool, most: int
) -> None:
    def rolling_back() -> Iterator[Publication]:
        yield ONE
        yield ONE
        raise psycopg.Rollback

    # Of a batch that is longer than memory, the rest is read inside of the transaction.
    monkeypatch.setattr(batches, "STRAIGHT_BYTES", most)
    with psycopg.connect(dsn, autocommit=True) as mine, pytest.raises(DatabaseError):
        platform.publisher.publish_all(rolling_back(), connection=mine if joined else None)
    assert platform.transfer.run_once() == {}


def test_publications_may_roll_the_transaction_of_their_caller_back(platform: EventSQL, dsn: str) -> None:
    def rolling_back() -> Iterator[Publication]:
        yield ONE
        raise psycopg.Rollback

    with psycopg.connect(dsn, autocommit=True) as mine:
        with mine.transaction():
            platform.publisher.publish_all(rolling_back(), connection=mine)
        assert mine.info.transaction_status is TransactionStatus.IDLE
    assert platform.transfer.run_once() == {}


@pytest.mark.parametrize("joined", [False, True])
def test_an_error_of_the_code_that_gives_the_publications_is_not_taken_for_that(
    platform: EventSQL, dsn: str, joined: bool
) -> None:
    def from_a_bug() -> Iterator[Publication]:
        yield ONE
        raise AttributeError("theirs")

    with psycopg.connect(dsn) as mine, pytest.raises(AttributeError, match="theirs"):
        platform.publisher.publish_all(from_a_bug(), connection=mine if joined else None)
    assert platform.transfer.run_once() == {}


def test_a_connection_in_pipeline_mode_is_refused(platform: EventSQL, direct_dsn: str) -> None:
    """In pipeline mode, the caller would not learn that a statement has written nothing."""
    with psycopg.connect(direct_dsn) as mine:
        with mine.pipeline():
            for publish in both_ways(platform):
                with pytest.raises(ValidationError, match="is in pipeline mode"):
                    publish(mine)
        for publish in both_ways(platform):
            publish(mine)
    assert platform.transfer.run_once() == {"orders": 2}


@contextmanager
def streaming(connection: Connection) -> Iterator[None]:
    rows = connection.cursor().stream("SELECT FROM generate_series(1, 3)")
    next(rows)
    yield
    deque(rows, maxlen=0)


@contextmanager
def copying(connection: Connection) -> Iterator[None]:
    with connection.cursor().copy("COPY (SELECT FROM generate_series(1, 3)) TO STDOUT") as copy:
        yield
        deque(copy, maxlen=0)


@contextmanager
def listening(connection: Connection) -> Iterator[None]:
    connection.execute("LISTEN here; NOTIFY here")
    connection.commit()
    notifications = connection.notifies()
    next(notifications)
    yield
    notifications.close()


@pytest.mark.parametrize("busy", [streaming, copying, listening])
def test_a_connection_in_the_middle_of_a_statement_is_refused(
    platform: EventSQL, direct_dsn: str, monkeypatch: pytest.MonkeyPatch,
    busy: Callable[[Connection], AbstractContextManager[None]],
) -> None:  # fmt: skip
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    with psycopg.connect(direct_dsn) as mine:
        with busy(mine):
            for publish in both_ways(platform):
                with pytest.raises(ValidationError, match="middle of a statement"):
                    publish(mine)
        for publish in both_ways(platform):
            publish(mine)
    assert platform.transfer.run_once() == {"orders": 2}


def test_a_statement_of_another_thread_on_the_connection_is_waited_for(
    platform: EventSQL, direct_dsn: str, sessions: Sessions, until: Until, until_blocked: UntilBlocked
) -> None:
    holder, lock = sessions(), "SELECT pg_advisory_xact_lock(1)"
    holder.execute(lock)
    with psycopg.connect(direct_dsn) as mine, ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(mine.execute, lock)
        until_blocked()
        published = threads.submit(platform.publisher.publish, ONE, connection=mine)
        until(published.running)
        holder.rollback()
        waiting.result()
        published.result()
    assert platform.transfer.run_once() == {"orders": 1}


def test_a_connection_that_is_refused_has_begun_nothing(platform: EventSQL, another: str) -> None:
    engine = sqlalchemy.create_engine(another.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as mine:
        with pytest.raises(ValidationError, match="'another'"):
            platform.publisher.publish(ONE, connection=mine)
        with mine.begin():
            assert mine.execute(sqlalchemy.text("SELECT 1")).scalar_one() == 1
    engine.dispose()


@pytest.mark.parametrize("cursor", [psycopg.ClientCursor, psycopg.RawCursor])
def test_cursors_of_a_callers_connection_may_be_of_any_kind(
    platform: EventSQL, dsn: str, cursor: type[psycopg.Cursor[Any]]
) -> None:
    queue = Queue(platform, "mails")
    queue.send(b"received")
    change = Change("placed", {"price": 1})
    with psycopg.connect(dsn, cursor_factory=cursor, row_factory=dict_row) as mine:
        for publish in both_ways(platform):
            publish(mine)
        queue.send(b"sent", connection=mine)
        queue.acknowledge(queue.receive()[0], connection=mine)
        platform.store.append("order", "1", [change], expected_version="none", connection=mine)
        assert [each.data for each in platform.store.load("order", "1", connection=mine)] == [change.data]
        assert mine.cursor_factory is cursor
    platform.transfer.run_once()
    assert [event.value for event in platform.reader.read("orders")] == [ONE.value] * 2
    assert [message.body for message in queue.receive()] == [b"sent"]


# The transfer


def test_only_events_of_a_callers_transaction_are_announced_as_uncommitted(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str | None]] = []
    monkeypatch.setattr(platform.shards[0].notifier, "notify", lambda kind, topic: told.append((kind, topic)))
    platform.publisher.publish(ONE)
    platform.publisher.publish_all([ONE])
    assert told == [(BUFFER, None)] * 2
    for publish in both_ways(platform):
        with session.transaction():
            publish(session)
    platform.publisher.statement(ONE)
    assert told[2:] == [(BUFFER, UNCOMMITTED)] * 3


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in this process", "in another process"])
def test_a_transfer_looks_again_and_again_for_an_announced_event_until_it_is_committed(
    dsn: str, session: Connection, until: Until, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool
) -> None:
    """Nobody announces the commit."""
    looks: list[object] = []
    with EventSQL(dsn) as transferring, EventSQL(dsn, transfer=not elsewhere) as publishing:
        shard = transferring.shards[0]
        look = shard.transfer._writer.look

        def noted(wanted: list[str] | None) -> tuple[int, list[str]]:
            looks.append(wanted)
            return look(wanted)

        monkeypatch.setattr(shard, "_transfer_delay", lambda: 3_600.0)
        monkeypatch.setattr(shard.transfer._writer, "look", noted)
        transferring.publisher.publish(ONE)
        until(lambda: shard.listener.listening and transferring.reader.count("orders") == 1)
        looks.clear()
        with session.transaction():
            (publishing if elsewhere else transferring).publisher.publish(ONE, connection=session)
            until(lambda: len(looks) >= 3)
        until(lambda: transferring.reader.count("orders") == 2)
