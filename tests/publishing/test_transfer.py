"""The transfer moves events to the end of their topic's log, and a smaller id never appears after a larger one.

Interleavings are forced: transactions are held open between the assignment of their ids and their commit.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.cli.doctor_database import transaction_findings
from eventsql_orchestration.cli.doctor_store import store_findings
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    EventSQLError,
    PermissionDeniedError,
    TopicNotFoundError,
)
from eventsql_orchestration.model import BLOCKS, ROWS, Storage
from eventsql_orchestration.publishing import low_water, transfer
from eventsql_orchestration.publishing.buffer_mover import Moved
from eventsql_orchestration.publishing.log_writer import LogWriter
from eventsql_orchestration.publishing.transfer import Transfer
from eventsql_orchestration.storage import sequences
from eventsql_orchestration.store import Change
from eventsql_orchestration.threads import start_thread
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.forms import check_order, in_blocks, none_is, stored
from tests.interrupting import interrupted
from tests.publishing.conftest import order, prepare
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.fixtures import Said, SaidBy, Sessions, Terminate, Until, UntilBlocked


@pytest.fixture
def platform(dsn: str) -> Iterator[EventSQL]:
    """One whose batches all go through the buffer; events move only when the test transfers them."""
    with EventSQL(dsn, transfer=False, straight=False) as opened:
        yield opened


pytestmark = pytest.mark.prepared.with_args(prepare)


def values(platform: EventSQL, topic: str = "orders", **bounds: Any) -> list[str]:
    return [event.value.decode() for event in platform.reader.read(topic, **bounds)]


@pytest.fixture
def transfers(database: Database) -> Iterator[Callable[..., Transfer]]:
    """Further transfers of this database, as other processes run them."""
    opened: list[Transfer] = []

    def transfer(**options: Any) -> Transfer:
        opened.append(Transfer(database, **options))
        return opened[-1]

    yield transfer
    for each in opened:
        each.close()


# What is moved


def test_an_event_keeps_everything_and_the_time_of_its_publication(platform: EventSQL, sessions: Sessions) -> None:
    platform.publisher.publish(order("x", key="42", metadata={"source": "web"}))
    session = sessions()
    row = session.execute("SELECT eql_partition, eql_created_at FROM eventsql.event_buffer").fetchone()
    assert row is not None
    session.rollback()
    platform.transfer.run_once()
    event = platform.reader.read("orders")[0]
    assert (event.topic, event.key, event.value, event.metadata) == ("orders", "42", b"x", {"source": "web"})
    assert (event.partition, event.buffered_at) == row
    assert event.created_at > event.buffered_at


@pytest.mark.parametrize("storage", [BLOCKS, ROWS])
@pytest.mark.parametrize("partition", [-1, 2, 99])
def test_an_event_that_names_a_partition_that_its_topic_lacks_gets_one_that_consumers_read(
    platform: EventSQL, storage: Storage, partition: int
) -> None:
    platform.registry.register_topic(Topic("two", 2, storage=storage))
    with platform.database.connection() as another_program:
        another_program.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
            "VALUES ('two', %(partition)s, 'a', '', '{}'), ('two', %(partition)s, NULL, '', '{}')",
            {"partition": partition},
        )
    platform.transfer.run_once()
    with_key, without = [event.partition for event in platform.reader.read("two")]
    assert with_key == partition_of_key("a", 2)
    assert without in {0, 1}


def test_events_of_every_kind_of_publisher_are_moved(platform: EventSQL, dsn: str, sessions: Sessions) -> None:
    with EventSQL(dsn, transfer=False) as another:
        another.publisher.publish(order("of another process"))
    with sessions() as session:
        session.execute(
            "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) "
            "VALUES ('orders', 0, NULL, 'of another language', '{}'), ('payments', -1, NULL, 'of another topic', '{}')"
        )
    assert platform.transfer.run_once() == {"orders": 2, "payments": 1}
    check_order(platform.reader.read("orders"), ["of another process", "of another language"])


def test_only_the_topics_that_are_named_are_moved(platform: EventSQL) -> None:
    platform.publisher.publish_all([order("one"), Publication("payments", b"two")])
    assert platform.transfer.run_once(["payments", "nowhere"]) == {"payments": 1}
    assert platform.transfer.run_once([]) == {}
    assert platform.transfer.run_once() == {"orders": 1}


@pytest.mark.parametrize("batch", [1, 3, 10, 11, 1_000])
def test_batches_of_any_size_move_everything(
    platform: EventSQL, transfers: Callable[..., Transfer], batch: int
) -> None:
    platform.publisher.publish_all(order(number) for number in range(10))
    platform.publisher.publish_all(Publication("payments", b"") for _ in range(7))
    assert transfers(batch=batch).run_once() == {"orders": 10, "payments": 7}
    assert platform.transfer.run_once() == {}
    check_order(platform.reader.read("orders"), [str(number) for number in range(10)])


# Order and visibility


class Interleaving:
    """Publishers that insert and end in a given order, with a transfer and a reader after every step."""

    def __init__(self, platform: EventSQL, sessions: Sequence[Connection]) -> None:
        self._platform = platform
        self._sessions = sessions
        self._seen = platform.reader.end("orders")

    def run(self, order_of_steps: Sequence[int], commits: Sequence[bool]) -> None:
        """`order_of_steps` names each publisher three times: it inserts, inserts again, and ends."""
        steps = dict.fromkeys(range(len(self._sessions)), 0)
        expected: list[str] = []
        moved: list[str] = []
        for publisher in order_of_steps:
            session, step = self._sessions[publisher], steps[publisher]
            if step < 2:
                self._platform.publisher.publish(order(f"{publisher}.{step}", key=str(publisher)), connection=session)
            elif commits[publisher]:
                session.commit()
                expected += [f"{publisher}.0", f"{publisher}.1"]
            else:
                session.rollback()
            steps[publisher] = step + 1
            self._platform.transfer.run_once()
            # A reader that goes on from the last offset it saw must see everything, once.
            events = self._platform.reader.read("orders", after=self._seen)
            self._seen = events[-1].id if events else self._seen
            moved += [event.value.decode() for event in events]
            assert sorted(moved) == sorted(expected)
        for publisher, commit in enumerate(commits):
            of_publisher = [value for value in moved if value.startswith(f"{publisher}.")]
            assert of_publisher == ([f"{publisher}.0", f"{publisher}.1"] if commit else [])


def test_two_publishers_in_every_order_with_every_outcome_lose_and_reorder_nothing(
    platform: EventSQL, sessions: Sessions
) -> None:
    interleaving = Interleaving(platform, [sessions(), sessions()])
    for steps in sorted(set(itertools.permutations([0, 0, 0, 1, 1, 1]))):
        for commits in itertools.product([True, False], repeat=2):
            interleaving.run(steps, commits)


def test_four_publishers_in_many_orders_lose_and_reorder_nothing(platform: EventSQL, sessions: Sessions) -> None:
    drawn = random.Random(20250613)
    interleaving = Interleaving(platform, [sessions() for _ in range(4)])
    for _ in range(40):
        steps = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        drawn.shuffle(steps)
        interleaving.run(steps, [drawn.random() < 0.7 for _ in range(4)])


def test_a_reader_with_an_old_snapshot_sees_the_log_without_gaps_up_to_some_event(
    platform: EventSQL, sessions: Sessions
) -> None:
    reader = sessions()
    reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    seen = "SELECT eql_id FROM eventsql.orders_event ORDER BY eql_id"
    for number in range(3):
        platform.publisher.publish(order(number))
        platform.transfer.run_once()
        before = reader.execute(seen).fetchall()
        platform.publisher.publish(order(number))
        platform.transfer.run_once()
        assert reader.execute(seen).fetchall() == before
        reader.rollback()
        assert reader.execute(seen).fetchall()[: len(before)] == before
        reader.rollback()


def test_a_topic_that_another_transfer_holds_is_left_to_it_and_others_are_not(
    platform: EventSQL, sessions: Sessions
) -> None:
    platform.publisher.publish_all([order("first"), Publication("payments", b"")])
    holder = sessions()
    holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
    columns, values_of = (
        ("eql_events, eql_values", "1, ARRAY[eql_value]") if in_blocks() else ("eql_metadata, eql_value",) * 2
    )
    holder.execute(
        f"INSERT INTO eventsql.{stored('orders')} (eql_partition, eql_buffered_at, eql_created_at, {columns}) "
        f"SELECT eql_partition, eql_created_at, now(), {values_of} FROM eventsql.event_buffer "
        "WHERE eql_topic = 'orders'"
    )
    holder.execute("DELETE FROM eventsql.event_buffer WHERE eql_topic = 'orders'")
    platform.publisher.publish(order("second"))
    assert platform.transfer.run_once() == {"payments": 1}
    assert values(platform) == []
    holder.commit()
    assert platform.transfer.run_once() == {"orders": 1}
    assert values(platform) == ["first", "second"]


def test_a_transfer_that_ends_without_a_commit_leaves_its_events_to_the_next(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    platform.publisher.publish_all(order(number) for number in range(5))
    # The transfer stops between the deletion and the insertion.
    gate = sessions()
    gate.execute(f"LOCK TABLE eventsql.{stored('orders')} IN SHARE MODE")
    doomed = transfers()
    with ThreadPoolExecutor(1) as executor:
        moved = executor.submit(doomed.run_once)
        until_blocked()
        assert platform.transfer.run_once() == {}
        platform.publisher.publish(order(5))
        with psycopg.connect(gate.info.dsn, password=gate.info.password, autocommit=True) as killer:
            killer.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        with pytest.raises(DatabaseUnavailableError):
            moved.result()
    gate.rollback()
    assert platform.transfer.run_once() == {"orders": 6}
    check_order(platform.reader.read("orders"), [str(number) for number in range(6)])
    assert doomed.run_once() == {}


def test_transfers_that_take_turns_at_a_topic_keep_its_order(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions
) -> None:
    one, two = transfers(batch=2), transfers(batch=3)
    late = sessions()
    platform.publisher.publish(order("late"), connection=late)
    for turn in range(6):
        platform.publisher.publish_all(order(turn * 4 + number) for number in range(4))
        assert (one, two)[turn % 2].run_once() == {"orders": 4}
    late.commit()
    assert two.run_once() == {"orders": 1}
    assert one.run_once() == {}
    check_order(platform.reader.read("orders"), [*map(str, range(24)), "late"])


def test_many_transfers_and_publishers_at_once_lose_repeat_and_reorder_nothing(
    platform: EventSQL, transfers: Callable[..., Transfer]
) -> None:
    publishers, batches, size = 4, 12, 25
    stop = threading.Event()

    def publish(publisher: int) -> None:
        drawn = random.Random(publisher)
        for batch in range(batches):
            topic = drawn.choice(["orders", "payments"])
            numbers = range(batch * size, (batch + 1) * size)
            publications = [Publication(topic, b"%d" % number, key=str(publisher)) for number in numbers]
            if drawn.random() < 0.5:
                platform.publisher.publish_all(publications)
            else:
                with platform.database.transaction() as connection:
                    for publication in publications:
                        platform.publisher.publish(publication, connection=connection)

    with ThreadPoolExecutor(publishers + 3) as executor:
        moving = [executor.submit(transfers(batch=batch).run, stop, polling_delay=0.001) for batch in (7, 10, 1_000)]
        for published in [executor.submit(publish, publisher) for publisher in range(publishers)]:
            published.result()
        stop.set()
        for moved in moving:
            moved.result()
    platform.transfer.run_once()
    events = [*platform.reader.read("orders"), *platform.reader.read("payments")]
    assert len(events) == publishers * batches * size
    for publisher in range(publishers):
        for topic in ("orders", "payments"):
            numbers = [int(e.value) for e in events if e.key == str(publisher) and e.topic == topic]
            assert numbers == sorted(set(numbers))


# Fairness


@pytest.mark.usefixtures("single_rows")
def test_the_flood_of_one_topic_does_not_keep_another_waiting(
    platform: EventSQL, transfers: Callable[..., Transfer]
) -> None:
    platform.publisher.publish_all(order(number) for number in range(500))
    platform.publisher.publish(Publication("payments", b"one"))
    stop = threading.Event()
    rounds: list[dict[str, int]] = []

    def after_a_round(moved: dict[str, int]) -> None:
        rounds.append(moved)
        stop.set()

    transfers(batch=10).run(stop, on_moved=after_a_round)
    assert rounds == [{"orders": 10, "payments": 1}]


def test_a_topic_that_cannot_be_moved_does_not_keep_another_waiting(platform: EventSQL, sessions: Sessions) -> None:
    platform.registry.register_topic(Topic("broken")).register_topic(Topic("refusing"))
    platform.publisher.publish_all(
        Publication(topic, b"seven") for topic in ("broken", "orders", "refusing", "payments")
    )
    with sessions() as session:
        session.execute(f"DROP TABLE eventsql.{stored('broken')} CASCADE")
        session.execute(
            f"ALTER TABLE eventsql.{stored('refusing')} ADD CONSTRAINT no_seven CHECK ({none_is('value', 'seven')})"
        )
    with pytest.raises(TopicNotFoundError, match="the events of topic 'broken' stay in the buffer"):
        platform.transfer.run_once()
    assert values(platform) == ["seven"]
    assert values(platform, "payments") == ["seven"]
    with pytest.raises(DatabaseError, match="the events of topic 'refusing' stay in the buffer") as caught:
        platform.transfer.run_once(["refusing"])
    assert "\n" not in caught.value.message
    with sessions() as session:
        session.execute(f"ALTER TABLE eventsql.{stored('refusing')} DROP CONSTRAINT no_seven")
    assert platform.transfer.run_once(["refusing"]) == {"refusing": 1}


def test_an_event_that_cannot_be_taken_from_the_buffer_is_an_error_and_not_tried_for_ever(
    platform: EventSQL, session: Connection
) -> None:
    session.execute(
        "CREATE FUNCTION eventsql.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$; "
        "CREATE TRIGGER keep BEFORE DELETE ON eventsql.event_buffer FOR EACH ROW EXECUTE FUNCTION eventsql.keep()"
    )
    platform.publisher.publish(order(1))
    with pytest.raises(DatabaseError, match="still there"):
        platform.transfer.run_once()
    session.execute("DROP TRIGGER keep ON eventsql.event_buffer")
    assert platform.transfer.run_once() == {"orders": 1}
    assert values(platform) == ["1"]


def test_the_loop_goes_on_past_a_topic_that_cannot_be_moved_and_tries_it_again(
    platform: EventSQL, transfers: Callable[..., Transfer], session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_RETRY_DELAY", 0.01)
    log = f"eventsql.{stored('orders')}"
    session.execute(f"ALTER TABLE {log} ADD CONSTRAINT no_seven CHECK ({none_is('value', 'seven')})")
    stop = threading.Event()
    moved: list[dict[str, int]] = []

    def after_a_round(counts: dict[str, int]) -> None:
        moved.append(counts)
        if len(moved) == 1:
            platform.publisher.publish(Publication("payments", b"two"))
        elif len(moved) == 2:
            session.execute(f"ALTER TABLE {log} DROP CONSTRAINT no_seven")
        else:
            stop.set()

    platform.publisher.publish_all([order("seven"), Publication("payments", b"one")])
    transfers().run(stop, polling_delay=0.001, on_moved=after_a_round)
    assert moved == [{"payments": 1}, {"payments": 1}, {"orders": 1}]


def test_the_loop_tries_a_topic_that_cannot_be_moved_again_after_seconds_and_not_at_each_look(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_RETRY_DELAY", 3_600.0)
    moving, tried = transfers(), list[str]()

    def refuse(topic: str, _newest: int) -> int:
        tried.append(topic)
        raise DatabaseError("refused")

    monkeypatch.setattr(moving._writer, "move", refuse)
    platform.publisher.publish(order("one"))
    Looks("committed", "", "committed").of(moving)
    assert tried == ["orders"]


class Looks(threading.Event):
    """Wakes a loop as its script says, which has whether to wake it at each wait: by a commit, or without one."""

    def __init__(self, *script: str) -> None:
        super().__init__()
        self.script = list(script)
        self.stop = threading.Event()
        self.uncommitted = threading.Event()
        self.delays: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.delays.append(timeout)
        match self.script.pop(0):
            case "committed":
                self.set()
            case "uncommitted":
                self.uncommitted.set()
                self.set()
        if not self.script:
            self.stop.set()
        return self.is_set()

    def of(self, transfer: Transfer) -> list[float | None]:
        """The delays before the loop's looks."""
        transfer.run(self.stop, polling_delay=0.02, wake=self, uncommitted=self.uncommitted)
        return self.delays


def test_the_loop_looks_less_and_less_often_until_it_hears_of_events_that_may_be_uncommitted(
    transfers: Callable[..., Transfer],
) -> None:
    looks = Looks("", "", "", "uncommitted", "", "")
    assert looks.of(transfers()) == [0.005, 0.01, 0.02, 0.02, 0.005, 0.01]


def test_the_loop_looks_as_often_as_the_present_polling_delay_asks_for(transfers: Callable[..., Transfer]) -> None:
    looks, longest = Looks(*[""] * 6), iter([1.0] * 4 + [0.01] * 2)
    transfers().run(looks.stop, polling_delay=lambda: next(longest), wake=looks)
    assert looks.delays == [0.005, 0.01, 0.02, 0.04, 0.01, 0.01]


def test_a_look_for_committed_events_finds_them_and_needs_no_further_looks(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Looks("", "", "committed", "", "uncommitted", "", "committed", "")
    assert looks.of(transfers()) == [0.005, 0.01, 0.02, 0.02, 0.02, 0.005, 0.01, 0.01]

    class Published(Looks):
        def clear(self) -> None:
            super().clear()
            platform.publisher.publish(order("one"))

    looks, transfer, taken = Published("", "", "committed", ""), transfers(), list[object]()
    look = transfer._writer.look

    def noted(wanted: list[str] | None) -> tuple[int, list[str]]:
        taken.append(wanted)
        return look(wanted)

    monkeypatch.setattr(transfer._writer, "look", noted)
    assert looks.of(transfer) == [0.005, 0.01, 0.02, 0.02]
    assert values(platform) == ["one"]
    assert len(taken) == 4


def test_an_event_that_is_committed_during_a_round_is_moved_by_the_next(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, transfer = Looks("", ""), transfers()
    move = transfer._writer.move

    def move_and_publish(topic: str, newest: int) -> int | None:
        moved = move(topic, newest)
        if len(values(platform)) == 1:
            platform.publisher.publish(order("two"))
            looks.set()
        return moved

    monkeypatch.setattr(transfer._writer, "move", move_and_publish)
    platform.publisher.publish(order("one"))
    assert looks.of(transfer) == [0.005, 0.005]
    assert values(platform) == ["one", "two"]


@pytest.mark.usefixtures("single_rows")
def test_the_loop_moves_all_batches_before_it_waits(platform: EventSQL, transfers: Callable[..., Transfer]) -> None:
    # The topic that comes last has no second batch.
    platform.publisher.publish_all([*map(order, range(5)), Publication("payments", b"")])
    assert Looks("").of(transfers(batch=2)) == [0.005]
    assert len(values(platform)) == 5


def test_a_look_that_moves_nothing_is_announced_to_nobody(transfers: Callable[..., Transfer]) -> None:
    looks, told = Looks("", ""), list[object]()
    transfers(announce=told.append).run(looks.stop, wake=looks, on_moved=told.append)
    assert (len(looks.delays), told) == (2, [])


def test_the_loop_looks_soon_after_events_that_nobody_announced(
    platform: EventSQL, transfers: Callable[..., Transfer]
) -> None:
    class Unannounced(Looks):
        def wait(self, timeout: float | None = None) -> bool:
            if len(self.delays) == 2:
                platform.publisher.publish(order("one"))
            return super().wait(timeout)

    assert Unannounced("", "", "", "").of(transfers()) == [0.005, 0.01, 0.02, 0.005]
    assert values(platform) == ["one"]


def test_the_loop_looks_soon_again_for_committed_events_of_a_topic_that_another_transfer_holds(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions
) -> None:
    """The other transfer may have looked before they were committed."""
    other = sessions()
    other.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")

    class Held(Looks):
        def wait(self, timeout: float | None = None) -> bool:
            if len(self.delays) == 1:
                platform.publisher.publish(order("one"))
            if len(self.delays) == 4:
                other.rollback()
            return super().wait(timeout)

    looks = Held("", "committed", "", "committed", "", "")
    assert looks.of(transfers()) == [0.005, 0.01, 0.005, 0.01, 0.005, 0.005]
    assert values(platform) == ["one"]


def test_a_run_tries_a_held_topic_again_until_it_is_free(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, moving, tries = sessions(), transfers(), list[int | None]()
    other.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
    move = moving._writer.move

    def release(topic: str, newest: int) -> int | None:
        tries.append(move(topic, newest))
        other.rollback()
        return tries[-1]

    monkeypatch.setattr(moving._writer, "move", release)
    platform.publisher.publish(order("one"))
    assert moving.run_once(deadline=time.monotonic() + 3_600.0, retry_held=True) == {"orders": 1}
    assert tries == [None, 1]


def test_one_run_ends_though_publishers_go_on(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = transfers(batch=2)
    move = transfer._writer.move

    def move_and_publish(topic: str, newest: int) -> int | None:
        moved = move(topic, newest)
        platform.publisher.publish_all(order("meanwhile") for _ in range(4))
        return moved

    monkeypatch.setattr(transfer._writer, "move", move_and_publish)
    platform.publisher.publish_all(order("before") for _ in range(5))
    assert transfer.run_once() == {"orders": 5}
    assert values(platform) == ["before"] * 5


@pytest.mark.usefixtures("single_rows")
def test_the_loop_ends_between_batches_when_it_is_told_to(
    platform: EventSQL, transfers: Callable[..., Transfer]
) -> None:
    platform.publisher.publish_all(order(number) for number in range(100))
    stop = threading.Event()
    transfers(batch=10).run(stop, on_moved=lambda _: stop.set())
    assert len(values(platform)) == 10


def test_the_loop_ends_while_it_waits(
    transfers: Callable[..., Transfer], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "FIRST_DELAY", 1e6)
    stop, moving = threading.Event(), transfers()
    looked = Mock(wraps=moving._writer.look)
    monkeypatch.setattr(moving._writer, "look", looked)
    thread = start_thread("transfer", moving.run, stop, polling_delay=1e6)
    until(lambda: looked.called)
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_loop_is_woken(platform: EventSQL, transfers: Callable[..., Transfer], until: Until) -> None:
    stop, wake = threading.Event(), threading.Event()
    moved: list[dict[str, int]] = []
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(transfers().run, stop, polling_delay=1e6, wake=wake, on_moved=moved.append)
        platform.publisher.publish(order("one"))
        wake.set()
        until(lambda: moved)
        platform.publisher.publish(order("two"))
        wake.set()
        until(lambda: len(moved) == 2)
        stop.set()
        wake.set()
        running.result()


# The low-water mark


@pytest.fixture(autouse=True)
def observing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look observes the transactions that may have written, and no statement depends on the time."""
    monkeypatch.setattr(low_water, "OBSERVE_SECONDS", -1.0)
    monkeypatch.setattr(sequences, "TRUST_SECONDS", 1e6)


def marks(transfer: Transfer) -> dict[str, int]:
    return dict(transfer._writer._low_water.marks)


def newest_id(sessions: Sessions) -> int:
    with sessions() as session:
        (newest,) = session.execute("SELECT last_value FROM eventsql.event_buffer_eql_id_seq").fetchone() or ()
        return int(newest)


def test_the_mark_follows_what_was_moved(platform: EventSQL, sessions: Sessions) -> None:
    platform.publisher.publish_all(order(number) for number in range(10))
    platform.transfer.run_once()
    assert marks(platform.shards[0].transfer) == {"orders": newest_id(sessions)}


def test_the_mark_follows_what_another_transfer_moved(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions
) -> None:
    platform.publisher.publish_all(order(number) for number in range(10))
    behind = transfers()
    with behind._writer.session():
        newest, _ = behind._writer.look(None)
        platform.transfer.run_once()
        assert behind._writer.move("orders", newest) == 0
    assert marks(behind) == {"orders": newest_id(sessions)}


def test_a_look_sends_no_marks_of_topics_that_came_and_went(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_water, "LEAST_MARKS", 2)
    sent = []
    for number in range(12):
        name = f"orders_{number}"
        platform.registry.register_topic(Topic(name))
        for topic in (name, "orders"):
            platform.publisher.publish(Publication(topic, b""))
        assert platform.transfer.run_once() == {name: 1, "orders": 1}
        platform.registry.unregister_topic(name, force=True)
        sent.append(len(marks(platform.shards[0].transfer)))
    assert max(sent) <= 4
    assert marks(platform.shards[0].transfer)["orders"] > 0


def test_the_mark_stays_before_the_ids_of_a_transaction_that_is_open(platform: EventSQL, sessions: Sessions) -> None:
    platform.publisher.publish(order("before"))
    platform.transfer.run_once()
    before = newest_id(sessions)
    publisher = sessions()
    platform.publisher.publish(order("open"), connection=publisher)
    for _ in range(3):
        platform.publisher.publish(order("after"))
        platform.transfer.run_once()
        assert marks(platform.shards[0].transfer)["orders"] <= before
    publisher.commit()
    for _ in range(3):
        platform.publisher.publish(order("later"))
        platform.transfer.run_once()
    assert marks(platform.shards[0].transfer)["orders"] > before
    assert values(platform) == ["before", "after", "after", "after", "open", "later", "later", "later"]


def test_the_mark_follows_while_one_publisher_after_another_is_open(platform: EventSQL, sessions: Sessions) -> None:
    one, other = sessions(), sessions()
    platform.publisher.publish(order("one"), connection=one)
    platform.publisher.publish(order("seen"))
    platform.transfer.run_once()
    seen = newest_id(sessions)
    platform.publisher.publish(order("other"), connection=other)
    one.commit()
    platform.transfer.run_once()
    assert marks(platform.shards[0].transfer) == {"orders": seen}


def test_the_mark_is_not_held_back_by_a_transaction_that_only_reads(platform: EventSQL, sessions: Sessions) -> None:
    reader = sessions()
    reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    reader.execute("SELECT * FROM eventsql.event_buffer").fetchall()
    for number in range(3):
        platform.publisher.publish(order(number))
        platform.transfer.run_once()
        assert marks(platform.shards[0].transfer) == {"orders": newest_id(sessions)}


@pytest.mark.usefixtures("single_rows")
def test_the_mark_does_not_pass_events_that_a_full_batch_left(
    platform: EventSQL, transfers: Callable[..., Transfer]
) -> None:
    transfer = transfers(batch=4)
    platform.publisher.publish_all(order(number) for number in range(10))
    stop = threading.Event()
    transfer.run(stop, on_moved=lambda _: stop.set())
    assert sorted(values(platform)) == ["0", "1", "2", "3"]
    with platform.database.connection() as connection:
        first_left = connection.execute("SELECT min(eql_id) FROM eventsql.event_buffer").fetchone()
    assert first_left == (marks(transfer)["orders"] + 1,)
    assert transfer.run_once() == {"orders": 6}


@pytest.mark.usefixtures("single_rows")
def test_a_full_batch_lets_no_later_round_begin_at_once_while_another_transfer_holds_the_topic(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions
) -> None:
    transfer = transfers(batch=4)
    platform.publisher.publish_all(order(number) for number in range(10))
    assert transfer._round(None, {}, None, {}).again
    with sessions() as holder:
        holder.execute("SELECT FROM eventsql.event_buffer_lock WHERE eql_topic = 'orders' FOR UPDATE")
        moved: dict[str, int] = {}
        held = transfer._round(None, {}, None, moved)
        assert (moved, held.held, held.again) == ({}, True, False)
    assert transfer.run_once() == {"orders": 6}


def test_the_mark_is_void_when_the_sequence_gives_ids_out_again(platform: EventSQL, sessions: Sessions) -> None:
    platform.publisher.publish_all(order(number) for number in range(10))
    platform.transfer.run_once()
    assert marks(platform.shards[0].transfer)["orders"] >= 10
    with sessions() as session:
        session.execute("TRUNCATE eventsql.event_buffer RESTART IDENTITY")
    platform.publisher.publish(order("again"))
    assert platform.transfer.run_once() == {"orders": 1}


def test_the_mark_does_not_follow_to_ids_that_the_sequence_has_taken_back(
    platform: EventSQL, transfers: Callable[..., Transfer], sessions: Sessions, session: Connection,
    *, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """These ids were to be decided when the first publisher has ended. The second publisher got one of them anew."""
    moving = transfers()
    move = moving._writer.move

    def move_and_publish(topic: str, newest: int) -> int | None:
        monkeypatch.setattr(moving._writer, "move", move)
        moved = move(topic, newest)
        # The sequence passes the ids that it has taken back before the next look.
        for number in range(10):
            platform.publisher.publish(order(number))
        return moved

    with sessions() as first, sessions() as second:
        platform.publisher.publish(order("first"), connection=first)
        for number in range(10):
            platform.publisher.publish(order(number))
        moving.run_once()
        session.execute("SELECT setval('eventsql.event_buffer_eql_id_seq', 3)")
        platform.publisher.publish(order("second"), connection=second)
        first.rollback()
        platform.publisher.publish(order("last"))
        monkeypatch.setattr(moving._writer, "move", move_and_publish)
        assert moving.run_once() == {"orders": 1}
        second.commit()
    assert moving.run_once() == {"orders": 11}
    assert sorted(values(platform))[-2:] == ["last", "second"]


def test_the_mark_is_void_when_another_server_process_answers(platform: EventSQL, sessions: Sessions) -> None:
    """As behind a connection pooler that has failed over to a server that gives the last ids out again."""
    platform.publisher.publish_all(order(number) for number in range(10))
    platform.transfer.run_once()
    assert platform.shards[0].transfer._writer._connection is not None
    platform.shards[0].transfer._writer._low_water._process = "1 of the server of another day"
    with sessions() as session:
        session.execute("SELECT setval('eventsql.event_buffer_eql_id_seq', 3)")
    platform.publisher.publish(order("again"))
    with sessions() as session:
        session.execute("SELECT setval('eventsql.event_buffer_eql_id_seq', 100)")
    assert platform.transfer.run_once() == {"orders": 1}


def test_the_mark_is_void_when_the_connection_is_lost_between_a_look_and_a_batch(
    platform: EventSQL, sessions: Sessions, terminate: Terminate
) -> None:
    """As in a failover to a server that gives the last ids out again."""
    platform.publisher.publish_all(order(number) for number in range(10))
    platform.transfer.run_once()
    writer = platform.shards[0].transfer._writer
    assert writer._low_water.marks["orders"] >= 10
    with writer.session():
        newest, _ = writer.look(None)
        assert writer._connection is not None
        terminate(writer._connection)
        with sessions() as session:
            session.execute("SELECT setval('eventsql.event_buffer_eql_id_seq', 3)")
        platform.publisher.publish(order("again"))
        assert writer.move("orders", newest) == 1


@pytest.fixture
def preparing(server: EmbeddedPostgres, dsn: str) -> Iterator[EmbeddedPostgres]:
    """The server with room for prepared transactions."""
    with psycopg.connect(server.start().dsn, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET max_prepared_transactions TO 5")
    server.stop()
    server.start()
    yield server
    server.start()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for left in connection.tpc_recover():
            connection.tpc_rollback(left)
        connection.execute("ALTER SYSTEM RESET max_prepared_transactions")
    server.stop()
    server.start()


def test_an_event_of_a_prepared_transaction_is_not_passed_over(
    platform: EventSQL, preparing: EmbeddedPostgres, sessions: Sessions
) -> None:
    publisher = sessions()
    publisher.tpc_begin(publisher.xid(1, "orders", "1"))
    platform.publisher.publish(order("prepared"), connection=publisher)
    platform.publisher.publish(order("before"))
    platform.transfer.run_once()
    publisher.tpc_prepare()
    publisher.close()
    for _ in range(3):
        platform.publisher.publish(order("meanwhile"))
        platform.transfer.run_once()
    # A prepared transaction survives its server, and a transfer that reconnects has to know it anew.
    preparing.stop(mode="immediate")
    preparing.start()
    for _ in range(3):
        platform.publisher.publish(order("restarted"))
        platform.transfer.run_once()
    platform.store.subscribe("mailer", lambda _change, _connection: None, background=False)
    platform.store.append("order", "1", [Change("sent", {})], expected_version="any")
    (waiting,) = store_findings(platform.shards[0], stalled_after=0.0)
    assert "ROLLBACK PREPARED" in str(waiting.remedy)
    found = transaction_findings(platform.database, longer_than=0.0)
    (remedy,) = [each.remedy for each in found if "prepared as" in each.message]
    with platform.database.connection() as connection:
        (xid,) = connection.tpc_recover()
        assert remedy == f"if nobody needs it: ROLLBACK PREPARED '{xid}'"
        connection.tpc_commit(xid)
    assert platform.transfer.run_once() == {"orders": 1}
    assert values(platform)[-1] == "prepared"


# The server and the connection


def test_a_server_that_is_down_raises_an_error_of_the_package_and_its_events_are_moved_later(
    platform: EventSQL, server: EmbeddedPostgres
) -> None:
    platform.publisher.publish(order("one"))
    platform.transfer.run_once()
    platform.publisher.publish(order("two"))
    server.stop(mode="immediate")
    try:
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError):
                platform.transfer.run_once()
    finally:
        server.start()
    assert platform.transfer.run_once() == {"orders": 1}


def test_a_server_that_restarted_in_between_costs_no_error(platform: EventSQL, server: EmbeddedPostgres) -> None:
    platform.publisher.publish(order("before"))
    platform.transfer.run_once()
    server.stop(mode="immediate")
    server.start()
    platform.publisher.publish(order("after"))
    assert platform.transfer.run_once() == {"orders": 1}
    assert values(platform) == ["before", "after"]


def test_the_loop_waits_for_a_server_that_is_down(
    platform: EventSQL, transfers: Callable[..., Transfer], server: EmbeddedPostgres, until: Until
) -> None:
    stop = threading.Event()
    moved: list[dict[str, int]] = []
    platform.publisher.publish(order("before"))
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(transfers().run, stop, polling_delay=0.01, on_moved=moved.append)
        until(lambda: moved)
        server.stop(mode="immediate")
        server.start()
        platform.publisher.publish(order("after"))
        until(lambda: len(moved) == 2)
        stop.set()
        running.result()
    assert values(platform) == ["before", "after"]


def test_the_loop_tries_less_and_less_often_while_the_database_is_away(
    transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    pauses, stop, wake, moving = list[float | None](), Stop(), threading.Event(), transfers()
    outages = iter([True] * 12 + [False] + [True] * 2)

    def away(*_given: Any) -> Any:
        # Each publication wakes the loop.
        wake.set()
        if (outage := next(outages, None)) is None:
            stop.set()
        elif outage:
            raise DatabaseUnavailableError("gone")
        return transfer._Round(0, again=False, held=False)

    monkeypatch.setattr(moving, "_round", away)
    moving.run(stop, polling_delay=0.2, wake=wake)
    assert pauses == [*(0.005 * 2**times for times in range(10)), 5.0, 5.0, 0.005, 0.01]


def test_each_error_of_an_outage_is_one_line_in_the_log_of_the_transfer(
    transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    outages = iter(["gone", "gone", "refused", None, "gone"])
    moving = transfers()
    moves = moving._round

    def away(*given: Any) -> Any:
        if (outage := next(outages, "ended")) == "ended":
            stop.set()
        elif outage is not None:
            raise DatabaseUnavailableError(outage)
        return moves(*given)

    monkeypatch.setattr(moving, "_round", away)
    moving.run(stop, polling_delay=0.01)
    assert len([record for record in caplog.records if record.name == transfer.__name__]) == 3


def test_a_topic_that_cannot_be_moved_is_one_line_in_the_log_until_it_is_moved(
    platform: EventSQL, transfers: Callable[..., Transfer], session: Connection, until: Until,
    *, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(transfer, "MAX_RETRY_DELAY", 0.01)
    stop, moving, tried = threading.Event(), transfers(), list[str]()
    fault = moving._fault

    def count(topic: str, error: psycopg.Error | DatabaseError) -> EventSQLError:
        tried.append(topic)
        return fault(topic, error)

    monkeypatch.setattr(moving, "_fault", count)
    session.execute(
        f"ALTER TABLE eventsql.{stored('orders')} ADD CONSTRAINT no_seven CHECK ({none_is('value', 'seven')})"
    )
    platform.publisher.publish(order("seven"))
    with caplog.at_level(logging.INFO, transfer.__name__), ThreadPoolExecutor(1) as executor:
        running = executor.submit(moving.run, stop, polling_delay=0.01)
        until(lambda: len(tried) > 3)
        session.execute(f"ALTER TABLE eventsql.{stored('orders')} DROP CONSTRAINT no_seven")
        until(lambda: values(platform) == ["seven"])
        platform.publisher.publish(order("eight"))
        until(lambda: values(platform) == ["seven", "eight"])
        stop.set()
        running.result()
    assert [each.levelname for each in caplog.records if each.name == transfer.__name__] == ["ERROR", "INFO"]
    assert f"the transfer of topic 'orders' goes on with {platform.database}" in caplog.text


def test_another_refusal_of_a_topic_is_another_line_in_the_log(
    platform: EventSQL, transfers: Callable[..., Transfer], session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    moving = transfers()
    platform.publisher.publish(order("one"))
    for kind in ("check_violation", "invalid_parameter_value"):
        session.execute(
            "CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql "
            f"AS $$ BEGIN RAISE {kind} USING MESSAGE = '{kind}'; END $$"
        )
        session.execute(
            f"CREATE OR REPLACE TRIGGER refusal BEFORE INSERT ON eventsql.{stored('orders')} "
            "EXECUTE FUNCTION public.refuse()"
        )
        with pytest.raises(DatabaseError, match=f"stay in the buffer.*{kind}"):
            moving.run_once()
    assert [each.levelname for each in caplog.records if each.name == transfer.__name__] == ["ERROR"] * 2


def test_a_refusal_that_comes_back_is_a_line_in_the_log_although_another_transfer_has_moved_the_events_of_the_first(
    platform: EventSQL, transfers: Callable[..., Transfer], session: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    moving, log = transfers(), f"eventsql.{stored('orders')}"
    session.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE insufficient_privilege; END'"
    )

    def meet_a_refusal() -> None:
        session.execute(f"CREATE TRIGGER refusal BEFORE INSERT ON {log} EXECUTE FUNCTION public.refuse()")
        platform.publisher.publish(order("one"))
        with pytest.raises(PermissionDeniedError) as refused:
            moving.run_once()
        assert isinstance(refused.value.__cause__, psycopg.Error)
        session.execute(f"DROP TRIGGER refusal ON {log}")

    meet_a_refusal()
    assert transfers().run_once() == {"orders": 1}
    assert moving.run_once() == {}
    meet_a_refusal()
    assert [each.levelname for each in caplog.records if each.name == transfer.__name__] == ["ERROR"] * 2


def test_a_publication_beside_a_close_ends_its_transfer_without_a_word(
    dsn: str, platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closing = EventSQL(dsn, straight=False)
    notifier = closing.shards[0].notifier
    close = notifier.close

    def publish_before_it_closes() -> None:
        closing.publisher.publish(order("late"))
        close()

    monkeypatch.setattr(notifier, "close", publish_before_it_closes)
    closing.close()
    until(lambda: all(each.name != "eventsql-transfer" for each in threading.enumerate()))
    platform.transfer.run_once()
    assert (values(platform), [each for each in caplog.records if each.levelno > logging.INFO]) == (["late"], [])


def test_a_transfer_that_was_closed_opens_again(platform: EventSQL) -> None:
    platform.publisher.publish(order("one"))
    platform.transfer.run_once()
    platform.shards[0].transfer.close()
    platform.publisher.publish(order("two"))
    assert platform.transfer.run_once() == {"orders": 1}


def test_a_writer_that_is_closed_in_the_last_moment_of_its_session_keeps_no_connection(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, lock = platform.shards[0].transfer._writer, threading.Lock()

    def close_and_release() -> None:
        if not writer.broken:
            writer.close()
        lock.release()

    monkeypatch.setattr(writer, "_mutex", SimpleNamespace(acquire=lock.acquire, release=close_and_release))
    with writer.session():
        writer.look(None)
    assert writer.broken


def test_a_batch_whose_session_ends_does_not_keep_other_topics_waiting(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform.publisher.publish(order("it ends the session"))
    platform.publisher.publish(Publication("payments", b"one"))
    announced = list[str]()
    transfer = transfers(announce=announced.extend)
    mover = transfer._writer._mover
    move = mover.move

    def end(connection: Connection, topic: str, **named: Any) -> Moved:
        if topic == "orders":
            connection.close()
        return move(connection, topic, **named)

    with monkeypatch.context() as patched:
        patched.setattr(mover, "move", end)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError):
                transfer.run_once()
    assert values(platform, "payments") == ["one"]
    assert announced == ["payments"]
    assert transfer.run_once() == {"orders": 1}


def test_a_session_that_ends_before_its_batch_is_known_is_an_error_of_the_package(
    platform: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    platform.publisher.publish(order("one"))
    with sessions() as other, ThreadPoolExecutor() as executor:
        other.execute("LOCK TABLE eventsql.event_buffer_lock IN EXCLUSIVE MODE")
        moved = executor.submit(platform.transfer.run_once)
        until_blocked()
        session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks "
            "WHERE NOT granted AND relation = 'eventsql.event_buffer_lock'::regclass"
        )
        with pytest.raises(DatabaseUnavailableError):
            moved.result()
    assert platform.transfer.run_once() == {"orders": 1}


def test_a_topic_whose_batch_lost_the_connection_is_tried_again_at_once(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_RETRY_DELAY", 3_600.0)
    moving = transfers()
    move = moving._writer.move

    def lose(*_given: Any) -> int:
        monkeypatch.setattr(moving._writer, "move", move)
        moving._writer._discard()
        raise psycopg.OperationalError("gone")

    monkeypatch.setattr(moving._writer, "move", lose)
    platform.publisher.publish(order("one"))
    Looks("", "").of(moving)
    assert values(platform) == ["one"]


def test_events_that_were_moved_before_the_connection_broke_are_counted(
    platform: EventSQL, transfers: Callable[..., Transfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    moving, stop, told = transfers(), threading.Event(), list[dict[str, int]]()
    move = moving._writer.move

    def lose(topic: str, newest: int) -> int | None:
        if topic == "payments":
            stop.set()
            moving._writer._discard()
            raise psycopg.OperationalError("gone")
        return move(topic, newest)

    monkeypatch.setattr(moving._writer, "move", lose)
    platform.publisher.publish_all([order("one"), Publication("payments", b"")])
    moving.run(stop, on_moved=told.append)
    assert told == [{"orders": 1}]


def test_an_interrupted_transfer_leaves_nothing_half_done(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    platform.publisher.publish(order("one"))
    mover = platform.shards[0].transfer._writer._mover
    move = mover.move

    def interrupted(*arguments: Any, **named: Any) -> Moved:
        move(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mover, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            platform.transfer.run_once()
    assert values(platform) == []
    assert platform.transfer.run_once() == {"orders": 1}


# What it asks of the server


def verbs_of(platform: EventSQL, said: Said, publications: Iterable[Publication] = ()) -> list[str]:
    platform.publisher.publish_all(publications)
    said.statements()
    platform.transfer.run_once()
    return said.verbs()


@pytest.mark.usefixtures("single_rows")
def test_an_idle_look_is_one_statement_and_a_batch_takes_seven(platform: EventSQL, said_by: SaidBy) -> None:
    platform.publisher.publish(order("the first one looks whether there are segments ahead"))
    platform.transfer.run_once()
    assert platform.shards[0].transfer._writer._connection is not None
    said = said_by(platform.shards[0].transfer._writer._connection)
    # In rows, one more looks at the last id that was drawn.
    batch = ["SELECT", "SELECT", "BEGIN", "SELECT", "WITH", "WITH", *([] if in_blocks() else ["SELECT"]), "COMMIT"]
    assert verbs_of(platform, said) == ["SELECT"]
    assert verbs_of(platform, said, [order("one")]) == [*batch, "SELECT"]
    assert verbs_of(platform, said, [order(number) for number in range(900)]) == [*batch, "SELECT"]


def test_the_server_compiles_no_statement_of_a_transfer(platform: EventSQL, sessions: Sessions) -> None:
    """Where whole tables may not be scanned, a plan that reads a sequence seems dear enough to be compiled."""
    with sessions() as session:
        session.execute(f"ALTER DATABASE {session.info.dbname} SET jit TO on")
    platform.transfer.run_once()
    connection = platform.shards[0].transfer._writer._connection
    assert connection is not None
    assert connection.execute("SHOW jit").fetchone() == ("off",)


def test_ctrl_c_at_any_moment_of_a_session_of_the_writer_lets_other_threads_write(database: Database) -> None:
    writer = LogWriter(database)

    def use() -> None:
        with writer.session() as mine:
            assert mine
        writer.close()

    for after in itertools.count():
        goes_on = interrupted(after, use, module="log_writer.py", events=["c_return"])
        assert not writer._mutex.locked()
        if not goes_on:
            break
    assert after > 2
