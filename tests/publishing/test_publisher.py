"""Events are committed before the call returns, or with the caller's transaction, all or none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.errors import (
    DatabaseBusyError,
    DatabaseUnavailableError,
    RedefinitionError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.publishing import batches
from eventsql_orchestration.publishing.batches import STRAIGHT_MOST
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.topics import catalog
from tests.publishing.conftest import order, prepare, published
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from types import FrameType

    from tests.fixtures import SaidBy, Sessions, Until, UntilBlocked


@pytest.fixture
def platform(dsn: str) -> Iterator[EventSQL]:
    """One whose batches all go through the buffer; events move only when the test transfers them."""
    with EventSQL(dsn, transfer=False, straight=False) as opened:
        yield opened


pytestmark = pytest.mark.prepared.with_args(prepare)


def numbered(count: int) -> list[Publication]:
    return [order(b"%d" % number, key=str(number)) for number in range(count)]


# Alone


def test_an_empty_batch_publishes_nothing(platform: EventSQL) -> None:
    assert platform.publisher.publish_all([]) == 0
    assert published(platform) == []


def test_threads_share_a_publisher(platform: EventSQL) -> None:
    gate = threading.Barrier(6)

    def publish(thread: int) -> None:
        gate.wait()
        for number in range(10):
            platform.publisher.publish(order(b"%d" % (thread * 100 + number)))
            platform.publisher.publish_all(numbered(5))

    with ThreadPoolExecutor(6) as executor:
        for done in [executor.submit(publish, thread) for thread in range(6)]:
            done.result()
    assert len(published(platform)) == 6 * 10 * 6


def test_a_batch_whose_topic_has_to_be_looked_up_needs_one_connection(platform: EventSQL) -> None:
    """If it kept one while it asks for another, as many batches as there are connections would wait for each other."""
    with ExitStack() as others:
        for _ in range(int(platform.database.most_connections) - 1):
            others.enter_context(platform.database.connection())
        platform.registry.forget("orders")
        assert platform.publisher.publish_all(numbered(3)) == 3


# Nothing half-written


def test_a_batch_whose_source_fails_publishes_none_and_shows_the_failure_as_it_is(platform: EventSQL, dsn: str) -> None:
    def from_a_database_that_is_gone() -> Iterator[Publication]:
        yield from numbered(1_000)
        psycopg.connect("postgresql://someone@127.0.0.1:1/theirs")

    def from_a_bug() -> Iterator[Publication]:
        yield from numbered(1_000)
        raise ZeroDivisionError

    with pytest.raises(psycopg.OperationalError):
        platform.publisher.publish_all(from_a_database_that_is_gone())
    with pytest.raises(ZeroDivisionError):
        platform.publisher.publish_all(from_a_bug())
    with psycopg.connect(dsn) as mine:
        with pytest.raises(psycopg.OperationalError):
            platform.publisher.publish_all(from_a_database_that_is_gone(), connection=mine)
        mine.rollback()
    assert published(platform) == []
    assert platform.publisher.publish_all(numbered(3)) == 3


def test_a_connection_that_is_lost_in_a_batch_publishes_none(platform: EventSQL, sessions: Sessions) -> None:
    def publications() -> Iterator[Publication]:
        # More than are read before the first is written.
        yield from numbered(STRAIGHT_MOST + 1)
        with sessions() as session:
            session.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND query LIKE 'COPY%'"
            )
        yield from numbered(100_000)

    with pytest.raises(DatabaseUnavailableError):
        platform.publisher.publish_all(publications())
    assert published(platform) == []


# In the caller's transaction


def both_ways(platform: EventSQL, connection: Any) -> None:
    platform.publisher.publish(order(b"one"), connection=connection)
    platform.publisher.publish_all([order(b"two"), order(b"three")], connection=connection)


def test_an_outbox_publishes_with_the_callers_commit_and_not_before(platform: EventSQL, sessions: Sessions) -> None:
    mine = sessions()
    mine.execute("CREATE TABLE accounts (id int)")
    both_ways(platform, mine)
    assert published(platform) == []
    mine.commit()
    assert published(platform) == [b"one", b"two", b"three"]


def test_an_outbox_publishes_nothing_when_the_caller_rolls_back(platform: EventSQL, sessions: Sessions) -> None:
    mine = sessions()
    both_ways(platform, mine)
    mine.rollback()
    with pytest.raises(ZeroDivisionError), mine.transaction():
        both_ways(platform, mine)
        raise ZeroDivisionError
    mine.commit()
    assert published(platform) == []
    assert platform.transfer.run_once() == {}


def test_a_part_of_an_outbox_can_be_rolled_back(platform: EventSQL, sessions: Sessions) -> None:
    mine = sessions()
    with mine.transaction():
        platform.publisher.publish(order(b"kept"), connection=mine)
        with pytest.raises(ZeroDivisionError), mine.transaction():
            both_ways(platform, mine)
            raise ZeroDivisionError
        platform.publisher.publish(order(b"kept too"), connection=mine)
    assert published(platform) == [b"kept", b"kept too"]


def test_a_connection_of_the_caller_may_be_set_up_in_any_way(platform: EventSQL, dsn: str) -> None:
    with psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as mine:
        both_ways(platform, mine)
        assert published(platform) == [b"one", b"two", b"three"]
        with pytest.raises(ZeroDivisionError), mine.transaction():
            both_ways(platform, mine)
            raise ZeroDivisionError
        assert len(published(platform)) == 3


def test_a_batch_on_a_connection_outside_of_a_transaction_is_still_all_or_nothing(platform: EventSQL, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as mine:
        with pytest.raises(TopicNotFoundError):
            platform.publisher.publish_all([*numbered(5), Publication("nowhere", b"")], connection=mine)
        assert mine.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
    assert published(platform) == []


def test_an_outbox_of_sqlalchemy_that_begins_with_the_publication_is_the_callers_to_commit(
    platform: EventSQL, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection:
        both_ways(platform, connection)
        connection.commit()
        assert published(platform) == [b"one", b"two", b"three"]
        both_ways(platform, connection)
        connection.rollback()
    with engine.connect() as connection:
        both_ways(platform, connection)
    assert len(published(platform)) == 3


def test_another_driver_is_refused(platform: EventSQL) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(ValidationError, match="postgresql"):
        platform.publisher.publish(order(b""), connection=connection)
    engine.dispose()


# A topic that is redefined under a publisher


def remember(platform: EventSQL, topic: str = "orders") -> None:
    """Make the publisher look the topic up; it will not look again for seconds."""
    platform.registry.cached_topic(topic)


@pytest.mark.parametrize("joined", [True, False])
def test_a_batch_that_cannot_be_read_again_is_refused_once(
    platform: EventSQL, elsewhere: EventSQL, sessions: Sessions, *, joined: bool
) -> None:
    remember(platform)
    elsewhere.registry.unregister_topic("orders")
    elsewhere.registry.register_topic(Topic("orders", 2))
    mine = sessions() if joined else None
    publications = [*numbered(5 if joined else STRAIGHT_MOST + 1), Publication("payments", b"")]
    with pytest.raises(RedefinitionError, match="orders"):
        platform.publisher.publish_all(publications, connection=mine)
    if mine is not None:
        mine.rollback()
    assert published(platform) == []
    assert platform.publisher.publish_all(publications, connection=mine) == len(publications)


def test_a_batch_is_refused_though_its_publisher_learns_the_new_definition_while_the_batch_is_read(
    platform: EventSQL, elsewhere: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publications() -> Iterator[Publication]:
        yield order(b"one", partition=2)
        platform.publisher.publish(order(b"another"))
        yield order(b"two")

    monkeypatch.setattr(batches, "STRAIGHT_MOST", 0)
    remember(platform)
    elsewhere.registry.register_topic(Topic("orders", 1))
    with pytest.raises(RedefinitionError, match="orders"):
        platform.publisher.publish_all(publications())
    assert published(platform) == [b"another"]


def test_a_refused_batch_is_not_published_twice_by_a_caller_who_publishes_it_again_in_the_same_transaction(
    platform: EventSQL, elsewhere: EventSQL, sessions: Sessions
) -> None:
    remember(platform)
    elsewhere.registry.register_topic(Topic("orders", 2))
    mine = sessions()
    with pytest.raises(RedefinitionError):
        platform.publisher.publish_all(numbered(5), connection=mine)
    with pytest.raises(ValidationError):
        platform.publisher.publish_all(numbered(5), connection=mine)
    mine.commit()
    assert published(platform) == []


@pytest.mark.parametrize("one", [True, False], ids=["publish", "publish_all"])
def test_a_publication_that_comes_during_a_redefinition_waits_and_goes_by_the_new_one(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, one: bool
) -> None:
    remember(platform)
    redefining = sessions()
    redefining.execute("LOCK TABLE eventsql.event_buffer IN SHARE ROW EXCLUSIVE MODE")
    redefining.execute("UPDATE eventsql.topic SET eql_partitions = 1 WHERE eql_name = 'orders'")
    published: Future[Any]
    with ThreadPoolExecutor(1) as executor:
        if one:
            published = executor.submit(platform.publisher.publish, order(b"", key="a"))
        else:
            published = executor.submit(platform.publisher.publish_all, numbered(5))
        until_blocked()
        redefining.commit()
        published.result()
    assert platform.transfer.run_once() == {"orders": 1 if one else 5}
    assert {event.partition for event in platform.reader.read("orders")} == {0}


@pytest.mark.parametrize("one", [True, False], ids=["publish", "publish_all"])
def test_a_publication_goes_by_the_partitions_of_a_topic_that_was_made_anew(
    platform: EventSQL, elsewhere: EventSQL, *, one: bool
) -> None:
    remember(platform)
    elsewhere.registry.unregister_topic("orders")
    elsewhere.registry.register_topic(Topic("orders", 1))
    if one:
        platform.publisher.publish(order(b"", key="a"))
    else:
        platform.publisher.publish_all(numbered(5))
    platform.transfer.run_once()
    assert {event.partition for event in platform.reader.read("orders")} == {0}


def test_a_redefinition_waits_for_what_is_being_published_and_is_refused_by_it(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    mine = sessions()
    platform.publisher.publish(order(b""), connection=mine)
    with ThreadPoolExecutor(1) as executor:
        redefined = executor.submit(platform.registry.register_topic, Topic("orders", 2))
        until_blocked()
        mine.commit()
        with pytest.raises(RedefinitionError, match="it has events"):
            redefined.result()


def test_a_redefinition_does_not_wait_for_ever_for_a_transaction_that_published(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "GIVE_WAY_SECONDS", 0.0)
    monkeypatch.setattr(catalog, "LOCK_SECONDS", 0.05)
    mine = sessions()
    platform.publisher.publish(order(b""), connection=mine)
    with pytest.raises(DatabaseBusyError):
        platform.registry.register_topic(Topic("orders", 2))
    with pytest.raises(DatabaseBusyError):
        platform.registry.unregister_topic("orders")
    mine.rollback()
    platform.registry.register_topic(Topic("orders", 2))
    assert platform.registry.topic("orders") == Topic("orders", 2)


# What it asks of the server


def test_one_event_is_one_statement_and_one_round_trip(platform: EventSQL, said_by: SaidBy) -> None:
    remember(platform)
    said = said_by(platform.database)
    platform.publisher.publish(order(b""))
    assert said.verbs() == ["INSERT"]
    for number in range(10):
        platform.publisher.publish(order(b"%d" % number, key=str(number), metadata={"a": "b"}))
    assert said.round_trips() == 10


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_batch_is_one_copy_of_any_size(platform: EventSQL, said_by: SaidBy, count: int) -> None:
    remember(platform)
    said = said_by(platform.database)
    platform.publisher.publish_all(numbered(count))
    assert said.verbs() == ["BEGIN", "COPY", "SELECT", "COMMIT"]


def test_an_outbox_adds_its_statements_to_the_callers_and_nothing_else(
    platform: EventSQL, sessions: Sessions, said_by: SaidBy
) -> None:
    remember(platform)
    mine = sessions()
    # Where its URL differs from the platform's, the server is asked once which database it leads to.
    platform.publisher.publish(order(b""), connection=mine)
    mine.rollback()
    said = said_by(mine)
    platform.publisher.publish(order(b""), connection=mine)
    platform.publisher.publish_all(numbered(10), connection=mine)
    mine.commit()
    assert said.verbs() == ["BEGIN", "WITH", "COPY", "SELECT", "SELECT", "COMMIT"]


# A caller's transaction whose snapshot is older than the topic


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_that_began_before_a_redefinition_publishes_nothing_by_the_old_definition(
    platform: EventSQL, sessions: Sessions, isolation: str, count: int
) -> None:
    mine = sessions()
    mine.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
    mine.execute("SELECT count(*) FROM eventsql.topic")
    remember(platform)
    with EventSQL(platform.database.dsn) as other:
        other.registry.register_topic(Topic("orders", 2))
    with pytest.raises((DatabaseBusyError, RedefinitionError)):
        if count == 1:
            platform.publisher.publish(order(b"old"), connection=mine)
        else:
            platform.publisher.publish_all(numbered(count), connection=mine)
    mine.rollback()
    assert published(platform) == []


def test_a_transaction_of_a_higher_isolation_publishes(platform: EventSQL, sessions: Sessions) -> None:
    mine = sessions()
    mine.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    platform.publisher.publish(order(b"one"), connection=mine)
    platform.publisher.publish_all([order(b"two")], connection=mine)
    mine.commit()
    assert published(platform) == [b"one", b"two"]


@pytest.mark.parametrize("transfer", [True, False])
@pytest.mark.parametrize("spare", [True, False])
def test_an_interrupt_right_after_a_lock_was_taken_stops_no_later_publication(
    dsn: str, until: Until, *, transfer: bool, spare: bool
) -> None:
    """Ctrl-C may come before the block has begun that releases the lock."""

    def interrupt(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code is not threading.Condition.__enter__.__code__:
            return None
        if event == "return":
            raise KeyboardInterrupt
        return interrupt

    def is_asleep() -> bool:
        shard = opened.shards[0]
        return not (shard._wake.is_set() or shard.notifier._wake.is_set() or shard.notifier._pending)

    with EventSQL(dsn, transfer=transfer) as opened, ExitStack() as in_use:
        # It opens connections and starts threads.
        opened.publisher.publish(order(b"first"))
        until(is_asleep)
        if not spare:
            for _ in range(len(opened.database._pool._spares)):
                in_use.enter_context(opened.database.connection())
        traced = sys.gettrace()
        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt):
            opened.publisher.publish(order(b"interrupted"))
        sys.settrace(traced)
        publishing = start_thread("publishing", opened.publisher.publish, order(b"later"))
        publishing.join(PATIENCE)
        assert not publishing.is_alive()
