"""A batch may be appended to its topic's log directly: whole and in order with what was buffered, or not at all.

Interleavings are forced: transactions are held open where a publisher could be overtaken.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.migrations.holding import hold_publishers
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.publishing import batch_sizes, batches, log_writer, publisher
from eventsql_orchestration.storage import sequences
from tests.forms import check_order, in_blocks, stored
from tests.publishing.conftest import order, prepare
from tests.waiting import wait_until

if TYPE_CHECKING:
    from types import ModuleType

    from tests.fixtures import Said, SaidBy, Sessions, UntilBlocked


MANY = publisher.STRAIGHT_LEAST


pytestmark = [pytest.mark.both_forms, pytest.mark.prepared.with_args(prepare)]


def batch(name: str, count: int = MANY) -> list[Publication]:
    return [order(f"{name}.{number}", key=f"{number % 7}") for number in range(count)]


def values(platform: EventSQL, topic: str = "orders") -> list[str]:
    return [event.value.decode() for event in platform.reader.read(topic)]


def names(platform: EventSQL, partition: int | None = None) -> list[str]:
    """The batches in the log, in order, each once: a batch that is not whole or not together shows up twice."""
    values = [event.value.decode() for event in platform.reader.read("orders", partition=partition)]
    return [name for name, _ in itertools.groupby(values, key=lambda value: value.split(".")[0])]


def check_names(platform: EventSQL, *expected: str) -> None:
    """Assert that the log has these batches: in this order in each partition, and in a log in rows as a whole."""
    for partition in range(3) if in_blocks() else [None]:
        found = names(platform, partition)
        assert found == [name for name in expected if name in found]
    assert set(names(platform)) == set(expected)


@pytest.fixture
def hold(sessions: Sessions) -> Callable[[], Connection]:
    """Holds the topic, as a transfer under way does."""

    def held() -> Connection:
        session = sessions()
        session.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
        return session

    return held


def test_a_batch_is_in_the_log_when_publish_returns_without_a_transfer(platform: EventSQL) -> None:
    assert platform.publisher.publish_all(batch("a")) == MANY
    events = platform.reader.read("orders")
    check_order(events, [f"a.{number}" for number in range(MANY)])
    assert [event.id for event in events] == list(range(1, MANY + 1))
    assert platform.buffered() == {}


def test_small_batches_mixed_ones_and_those_in_a_transaction_go_through_the_buffer(
    platform: EventSQL, sessions: Sessions
) -> None:
    platform.publisher.publish_all(batch("small", MANY - 1))
    platform.publisher.publish_all([*batch("mixed"), Publication("payments", b"")])
    with sessions() as session:
        platform.publisher.publish_all(batch("outbox"), connection=session)
    assert values(platform) == []
    assert platform.buffered() == {"orders": 3 * MANY - 1, "payments": 1}


def test_a_publisher_learns_a_layout_with_the_number_of_partitions_that_it_knows(platform: EventSQL, dsn: str) -> None:
    platform.publisher.publish_all(batch("a"))
    with EventSQL(dsn, transfer=False) as other:
        for partitions in (4, 3):
            other.repartitioner.repartition("orders", partitions)
    platform.publisher.publish_all(batch("b"))
    platform.transfer.run_once()
    platform.publisher.publish_all(batch("c"))
    assert platform.buffered() == {}
    check_names(platform, "a", "b", "c")


@pytest.mark.parametrize("given", [list, iter])
@pytest.mark.parametrize("limit", ["STRAIGHT_MOST", "STRAIGHT_BYTES"])
def test_a_batch_that_is_too_large_goes_through_the_buffer_whole(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, limit: str, given: Callable[..., Iterable[Publication]]
) -> None:
    monkeypatch.setattr(batches, limit, MANY)
    assert platform.publisher.publish_all(given(batch("large", 500))) == 500
    assert values(platform) == []
    platform.transfer.run_once()
    check_order(platform.reader.read("orders"), [f"large.{number}" for number in range(500)])


def test_an_iterator_that_counts_as_false_is_read_to_its_end(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "STRAIGHT_MOST", MANY)

    class Left:
        """An iterator that is true while it knows of more, as some are, and knows of none."""

        def __init__(self) -> None:
            self._source = iter(batch("a", 3 * MANY))

        def __iter__(self) -> Left:
            return self

        def __next__(self) -> Publication:
            return next(self._source)

        def __len__(self) -> int:
            return 0

    assert platform.publisher.publish_all(Left()) == 3 * MANY
    platform.transfer.run_once()
    assert len(values(platform)) == 3 * MANY


def test_keys_and_metadata_count_for_the_size_of_a_batch(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "STRAIGHT_BYTES", 100 * MANY)
    for fields in ({"metadata": {"a": "x" * 100}}, {"metadata": {"x" * 101: ""}}, {"key": "x" * 101}):
        platform.publisher.publish_all(order("", **fields) for _ in range(MANY))
        assert sum(platform.buffered().values()) == MANY
        platform.transfer.run_once()


# Order over both paths


def test_earlier_buffered_events_come_first(platform: EventSQL) -> None:
    platform.publisher.publish(order("single.0", key="k"))
    platform.publisher.publish_all(batch("small", 3))
    platform.publisher.publish_all(batch("straight"))
    platform.publisher.publish(order("after.0", key="k"))
    platform.transfer.run_once()
    check_names(platform, "single", "small", "straight", "after")


def test_while_another_holds_the_topic_a_batch_goes_to_the_buffer_and_order_is_kept(
    platform: EventSQL, hold: Callable[[], Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform.shards[0].publisher._writer, "_lock_timeout", 0.01)
    platform.publisher.publish_all(batch("a"))
    holder = hold()
    platform.publisher.publish_all(batch("b"))
    platform.publisher.publish_all(batch("c"))
    check_names(platform, "a")
    holder.rollback()
    platform.publisher.publish_all(batch("d"))
    check_names(platform, "a", "b", "c", "d")
    assert platform.buffered() == {}


def test_an_event_that_commits_while_a_publisher_waits_for_the_topic_is_not_overtaken(
    platform: EventSQL, hold: Callable[[], Connection], until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform.shards[0].publisher._writer, "_lock_timeout", 100.0)
    holder = hold()
    with ThreadPoolExecutor() as executor:
        publishing = executor.submit(platform.publisher.publish_all, batch("late"))
        until_blocked()
        platform.publisher.publish(order("meanwhile.0"))
        holder.rollback()
        publishing.result()
    check_names(platform, "meanwhile", "late")


def test_an_open_transaction_neither_holds_the_straight_path_up_nor_loses_its_event(
    platform: EventSQL, sessions: Sessions
) -> None:
    early = sessions()
    platform.publisher.publish(order("outbox.0"), connection=early)
    platform.publisher.publish_all(batch("a"))
    platform.publisher.publish_all(batch("b"))
    early.commit()
    platform.publisher.publish_all(batch("c"))
    check_names(platform, "a", "b", "outbox", "c")


def test_a_reader_sees_a_smaller_id_no_later_than_a_larger_one(
    platform: EventSQL, sessions: Sessions, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A straight batch is stopped after its ids are drawn and before its commit, and others publish meanwhile."""
    monkeypatch.setattr(platform.shards[0].publisher._writer, "_lock_timeout", 0.01)
    with sessions() as session:
        session.execute(
            """
            CREATE FUNCTION eventsql.stop() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
            CREATE TRIGGER stop AFTER INSERT ON eventsql.{log}
            FOR EACH STATEMENT EXECUTE FUNCTION eventsql.stop()
            """.replace("{log}", stored("orders"))
        )
    gate = sessions()
    gate.execute("SELECT pg_advisory_xact_lock(7)")
    with EventSQL(platform.database.dsn, transfer=False) as stopped, ThreadPoolExecutor() as executor:
        # Its own limit for locks would end the stop on a busy machine.
        monkeypatch.setattr(stopped.shards[0].publisher._writer, "_lock_timeout", 3_600.0)
        publishing = executor.submit(stopped.publisher.publish_all, batch("stopped"))
        until_blocked()
        platform.publisher.publish_all(batch("meanwhile"))
        assert platform.transfer.run_once() == {}, "the holder of the topic is its one writer"
        check_names(platform)
        gate.rollback()
        publishing.result()
        check_names(platform, "stopped")
        platform.transfer.run_once()
        check_names(platform, "stopped", "meanwhile")


def test_many_publishers_keep_each_batch_whole_and_each_key_in_order(platform: EventSQL, dsn: str) -> None:
    rounds, publishers = 6, 4
    barrier = threading.Barrier(publishers)

    def publish(name: int) -> None:
        with EventSQL(dsn, transfer=False) as mine:
            barrier.wait()
            for turn in range(rounds):
                if turn % 3 == 2:
                    mine.publisher.publish(order(f"{name}:{turn}.0", key=f"{name}"))
                else:
                    mine.publisher.publish_all(order(f"{name}:{turn}.{n}", key=f"{name}") for n in range(MANY * 4))

    with ThreadPoolExecutor(publishers) as executor:
        list(executor.map(publish, range(publishers)))
    platform.transfer.run_once()
    for name in range(publishers):
        own = [value for value in values(platform) if value.startswith(f"{name}:")]
        expected = [
            f"{name}:{turn}.{n}" for turn in range(rounds) for n in range(1 if turn % 3 == 2 else MANY * 4)
        ]  # fmt: skip
        assert own == expected


@pytest.mark.parametrize(
    ("module", "limit", "most"), [(log_writer, "MOST_BUFFERED", 10), (batch_sizes, "MOST_BYTES", 50)]
)
def test_a_buffer_that_is_long_is_left_to_the_transfer(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, module: ModuleType, limit: str, most: int
) -> None:
    monkeypatch.setattr(module, limit, most)
    platform.publisher.publish_all(batch("a", 11))
    platform.publisher.publish_all(batch("b"))
    assert values(platform) == []
    platform.transfer.run_once()
    platform.publisher.publish_all(batch("c"))
    check_names(platform, "a", "b", "c")


def test_events_that_were_left_to_the_transfer_are_not_overtaken_by_the_next_batch(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(log_writer, "MOST_BUFFERED", 10)
        platform.publisher.publish_all(batch("a", 11))
        platform.publisher.publish_all(batch("b"))
    platform.publisher.publish_all(batch("c"))
    check_names(platform, "a", "b", "c")


def test_a_publisher_that_cannot_move_buffered_events_tries_fewer_until_they_move(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, tried = platform.shards[0].publisher._writer, list[str]()
    assert writer is not None

    def refuse(_connection: Connection, topic: str, **_named: object) -> None:
        tried.append(topic)
        raise psycopg.DataError("a trigger refuses them")

    platform.publisher.publish_all(batch("a", 10))
    with monkeypatch.context() as patched:
        patched.setattr(writer._mover, "move", refuse)
        platform.publisher.publish_all(batch("b"))
        platform.publisher.publish_all(batch("c"))
    assert tried == ["orders"]
    platform.transfer.run_once()
    for count in (4, 8, 16):
        platform.publisher.publish_all(batch("few", count))
        platform.publisher.publish_all(batch("d"))
        assert platform.buffered() == {}


def test_a_publisher_that_was_refused_a_log_does_not_try_it_again(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Topic] = []

    def refuse(_connection: Connection, topic: Topic, *_: object) -> None:
        tried.append(topic)
        raise psycopg.errors.InsufficientPrivilege

    monkeypatch.setattr(platform.shards[0].publisher._writer, "_append", refuse)
    for _ in range(2):
        platform.publisher.publish_all(batch("a"))
    assert len(tried) == 1
    assert platform.buffered() == {"orders": 2 * MANY}


def test_a_log_whose_times_have_no_zone_gets_its_batches_through_the_buffer(
    platform: EventSQL, sessions: Sessions
) -> None:
    """As EventSQL's Java library makes them: the server must convert to the reading of its own clock."""
    platform.registry.unregister_topic("orders")
    platform.registry.register_topic(Topic("orders", 3, storage="rows"))
    with sessions() as session:
        session.execute("ALTER TABLE eventsql.orders_event ALTER eql_buffered_at TYPE timestamp")
        session.execute("ALTER TABLE eventsql.orders_event ALTER eql_created_at TYPE timestamp")
        session.execute('ALTER DATABASE "' + session.info.dbname + "\" SET timezone TO 'Asia/Tokyo'")
    with EventSQL(platform.database.dsn, transfer=False) as elsewhere:
        before = datetime.now(UTC) - timedelta(seconds=5)
        elsewhere.publisher.publish_all(batch("a"))
        assert elsewhere.buffered() == {"orders": MANY}
        elsewhere.transfer.run_once()
        (event, *_) = elsewhere.reader.read("orders")
        assert before < event.buffered_at <= event.created_at < datetime.now(UTC) + timedelta(seconds=5)


def test_times_of_entering_the_log_grow_with_ids(platform: EventSQL) -> None:
    """A time is looked up in the log by bisection."""
    platform.publisher.publish_all(batch("a"))
    platform.publisher.publish(order("single", key="k"))
    platform.publisher.publish_all(batch("b"))
    events = platform.reader.read("orders")
    assert len(events) == 2 * MANY + 1
    assert all(before.created_at <= after.created_at for before, after in itertools.pairwise(events))


# Refusals and failures


@pytest.mark.parametrize(
    ("look_after", "noticed"), [(-1.0, True), (-1.0, False), (1e9, True)], ids=["looked at", "silent", "trusted"]
)
def test_a_connection_that_was_lost_since_its_last_batch_is_replaced(
    platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch, look_after: float, *, noticed: bool
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", look_after)
    if not noticed:
        # As behind a firewall, which says nothing when it forgets a connection.
        monkeypatch.setattr(log_writer, "is_quiet", lambda connection: not connection.closed)
    platform.publisher.publish_all(batch("a"))
    writer = platform.shards[0].publisher._writer
    assert writer is not None
    assert writer._connection is not None
    session.execute("SELECT pg_terminate_backend(%s, 10000)", [writer._connection.info.backend_pid])
    platform.publisher.publish_all(batch("b"))
    check_names(platform, "a", "b")


def test_a_batch_waits_for_a_migration_that_has_locked_the_tables(
    platform: EventSQL, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", -1.0)
    platform.publisher.publish_all(batch("a"))
    migration = sessions()
    hold_publishers(migration, "eventsql")
    with ThreadPoolExecutor() as executor, platform.database.connection() as watcher:
        publishing = executor.submit(platform.publisher.publish_all, batch("b"))

        def goes_on() -> bool:
            waits = watcher.execute(
                "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
                "AND query LIKE 'COPY%event_buffer%'"
            )
            return publishing.done() or waits.fetchone() is not None

        wait_until(goes_on, "the batch goes to the buffer")
        migration.rollback()
        publishing.result()
    platform.transfer.run_once()
    check_names(platform, "a", "b")


def test_a_connection_that_is_lost_in_the_append_publishes_none(
    platform: EventSQL, hold: Callable[[], Connection], until_blocked: UntilBlocked, sessions: Sessions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(platform.shards[0].publisher._writer, "_lock_timeout", 100.0)
    holder = hold()
    with ThreadPoolExecutor() as executor:
        publishing = executor.submit(platform.publisher.publish_all, batch("lost"))
        until_blocked()
        with sessions() as session:
            session.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
        with pytest.raises(DatabaseUnavailableError):
            publishing.result()
    holder.rollback()
    platform.publisher.publish_all(batch("next"))
    check_names(platform, "next")


def test_an_event_that_became_unstorable_publishes_nothing_and_costs_no_room(
    platform: EventSQL, sessions: Sessions
) -> None:
    publications = [order("bad", metadata={"a": "b"}) for _ in range(2_000)]
    # Past its check, so that the append fails in its midst.
    object.__setattr__(publications[1_500], "key", "\ud800")
    with sessions() as session:
        sequence = f"pg_get_serial_sequence('eventsql.{stored('orders')}', 'eql_id')"
        # In the second of the first segments; the append that fails makes one more, which goes with it.
        session.execute(f"SELECT setval({sequence}, 9000000)")
        session.commit()
        with pytest.raises(UnicodeEncodeError):
            platform.publisher.publish_all(publications)
        assert (values(platform), platform.buffered()) == ([], {})
        # The next one is made to reach the end of what there is now.
        session.execute(f"SELECT setval({sequence}, 14999990)")
        session.commit()
    platform.publisher.publish_all(batch("next"))
    check_names(platform, "next")
    assert platform.buffered() == {}


def test_a_mapping_of_the_callers_is_not_read_while_the_topic_is_held(platform: EventSQL, sessions: Sessions) -> None:
    session = sessions()
    free: list[bool] = []

    class Slow(Mapping[str, str]):
        def __getitem__(self, name: str) -> str:
            row = session.execute(
                "SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE SKIP LOCKED"
            )
            free.append(row.fetchone() is not None)
            session.rollback()
            return name

        def __iter__(self) -> Iterator[str]:
            return iter(("a",))

        def __len__(self) -> int:
            return 1

    platform.publisher.publish_all(order("", metadata=Slow()) for _ in range(MANY))
    assert platform.buffered() == {}
    assert len(free) >= MANY
    assert all(free)


@pytest.mark.parametrize(("of", "method"), [(psycopg.Copy, "write"), (psycopg.Transaction, "__exit__")])
def test_an_interrupted_append_leaves_nothing(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, of: type, method: str
) -> None:
    platform.publisher.publish_all(batch("first"))
    with monkeypatch.context() as patched:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(of, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            platform.publisher.publish_all(batch("interrupted"))
    platform.publisher.publish_all(batch("next"))
    check_names(platform, "first", "next")


# Statements


@pytest.fixture
def said(platform: EventSQL, said_by: SaidBy) -> Said:
    platform.publisher.publish_all(batch("first"))
    straight = platform.shards[0].publisher._writer
    assert straight is not None
    assert straight._connection is not None
    return said_by(straight._connection)


def draws() -> list[str]:
    """The statement that draws the ids of blocks; COPY draws those of rows."""
    return ["WITH"] if in_blocks() else []


def checks() -> list[str]:
    """The statement that looks at the last id that COPY drew for rows."""
    return [] if in_blocks() else ["SELECT"]


def test_a_batch_takes_the_same_few_statements_of_any_size(
    platform: EventSQL, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", 1e9)
    monkeypatch.setattr(sequences, "TRUST_SECONDS", 1e9)
    for count in (MANY, 10_000):
        platform.publisher.publish_all(batch("a", count))
        assert said.verbs() == ["BEGIN", "SELECT", "WITH", "COPY", *checks(), "COMMIT"]


def test_moving_the_buffered_events_takes_four_statements_more(
    platform: EventSQL, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", 1e9)
    monkeypatch.setattr(sequences, "TRUST_SECONDS", 1e9)
    platform.publisher.publish(order("buffered.0"))
    platform.publisher.publish_all(batch("a"))
    # The first row, the move, that no row is left, and the time.
    move = ["SELECT", "WITH", "SELECT", "SELECT"]
    assert said.verbs() == ["BEGIN", "SELECT", "WITH", *move, *draws(), "COPY", *checks(), "COMMIT"]
