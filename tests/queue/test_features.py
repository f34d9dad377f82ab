"""Priorities, deduplication, dead letters, the archive, waiting, looking and options of a queue."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import MessageNotFoundError, QueueInUseError, ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.queue import (
    AsyncQueue,
    ErasedMessages,
    Message,
    NewMessage,
    Queue,
    QueueDepth,
    drop_expired_archives,
    list_queues,
    message_queue,
    upkeep,
)
from tests.fixtures import Until, UntilBlocked
from tests.queue.test_ordered import bodies, expire
from tests.waiting import PATIENCE


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "commands")


def test_many_messages_are_sent_in_one_statement_and_keep_their_order(queue: Queue) -> None:
    given = [NewMessage(b"%d" % n, key=None if n % 3 else f"k{n}", metadata={"n": str(n)}) for n in range(50)]
    sent = queue.send_all([*given, b"bare"])
    received = queue.receive(max_messages=100)
    assert [message.id for message in received] == sent == sorted(sent)
    assert [(message.body, message.key, dict(message.metadata)) for message in received[:50]] == [
        (each.body, each.key, dict(each.metadata)) for each in given
    ]
    assert queue.send_all([]) == []


def test_a_message_that_cannot_be_sent_keeps_the_others_back(queue: Queue) -> None:
    bad: Any = [b"1", "text"]
    with pytest.raises(ValidationError):
        queue.send_all(bad)
    assert queue.depth().visible == 0


def test_higher_priorities_come_first(queue: Queue) -> None:
    queue.send_all([NewMessage(b"%d" % n, priority=n) for n in (0, 5, 9, 1)])
    assert bodies(queue.receive(max_messages=2)) == [b"9", b"5"]
    assert bodies(queue.receive(max_messages=2)) == [b"1", b"0"]


def test_each_message_of_a_call_has_its_own_delay_or_due_time(queue: Queue) -> None:
    now = datetime.now(UTC)
    queue.send_all(
        [
            NewMessage(b"now"),
            NewMessage(b"delayed", delay=60),
            NewMessage(b"due", due=now + timedelta(hours=1)),
            NewMessage(b"past", due=now - timedelta(hours=1)),
        ]
    )
    assert sorted(bodies(queue.receive(max_messages=9))) == [b"now", b"past"]
    states = {message.body: message.state for message in queue.peek()}
    assert states == {b"now": "in flight", b"past": "in flight", b"delayed": "delayed", b"due": "delayed"}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_repeated_deduplication_id_is_sent_once_within_the_window(database: Database, *, ordered: bool) -> None:
    queue = Queue(database, "commands", ordered=ordered, deduplication_window=600)
    first = queue.send(b"1", key="a", deduplication_id="x")
    ids = queue.send_all(
        [NewMessage(b"2", key="b", deduplication_id=name) for name in ("y", "x", "y")] + [NewMessage(b"3")]
    )
    assert ids[1] == first
    assert ids[0] == ids[2]
    assert sorted(bodies(queue.receive(max_messages=9))) == [b"1", b"2", b"3"]
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.queue_deduplication SET eql_expires_at = now() - interval '1 s'")
    assert queue.send(b"4", deduplication_id="x") > ids[3]


def test_a_repeated_deduplication_id_leaves_the_messages_before_it(queue: Queue) -> None:
    first = queue.send(b"1", deduplication_id="x")
    queue.acknowledge(queue.receive()[0])
    messages = [NewMessage(b"2"), NewMessage(b"3", deduplication_id="y"), NewMessage(b"again", deduplication_id="x")]
    assert queue.send_all(messages)[2] == first
    assert bodies(queue.receive(max_messages=9)) == [b"2", b"3"]


def test_deduplication_counts_when_the_first_sender_commits(
    database: Database, queue: Queue, until_blocked: UntilBlocked
) -> None:
    queue.definition()
    with ThreadPoolExecutor(1) as other, database.connection() as connection:
        with connection.transaction(force_rollback=True):
            queue.send(b"rolled back", deduplication_id="x", connection=connection)
            second = other.submit(queue.send, b"second", deduplication_id="x")
            until_blocked()
        second.result()
    assert bodies(queue.receive(max_messages=9)) == [b"second"]


def test_a_sender_does_not_wait_for_the_transaction_of_a_sender_of_another_id(
    direct_dsn: str, database: Database, queue: Queue
) -> None:
    for name in ("v", "x", "y"):
        queue.send(b"before", deduplication_id=name)
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.queue_deduplication SET eql_expires_at = now() - interval '1 s'")
        with connection.transaction(), Database(f"{direct_dsn}?options=-clock_timeout%3D100") as impatient:
            for name in ("y", "z"):
                queue.send(b"open", deduplication_id=name, connection=connection)
            Queue(impatient, queue.name).send(b"beside", deduplication_id="x")
    queue.send(b"after", deduplication_id="w")
    with database.connection() as connection:
        rows = connection.execute("SELECT eql_deduplication_id FROM eventsql.queue_deduplication").fetchall()
    assert sorted(rows) == [("w",), ("x",), ("y",), ("z",)], "a send by itself deletes the ids whose time has ended"


def test_calls_with_the_same_ids_in_any_order_do_not_wait_for_each_other(
    database: Database, queue: Queue, until_blocked: UntilBlocked
) -> None:
    queue.definition()
    with ThreadPoolExecutor(2) as executor:
        with database.transaction() as connection:
            queue.send(b"", deduplication_id="m", connection=connection)
            calls = [
                executor.submit(queue.send_all, [NewMessage(b"", deduplication_id=each) for each in ids])
                for ids in ("xmy", "ymx")
            ]
            until_blocked(2)
        first, second = (call.result() for call in calls)
    assert first == second[::-1]


def test_a_send_in_a_callers_transaction_deletes_ids_that_nobody_has_sent_for_a_day(
    database: Database, queue: Queue, session: Connection
) -> None:
    for name in ("old", "older", "yesterday"):
        queue.send(b"1", deduplication_id=name)
    ended = (
        "UPDATE eventsql.queue_deduplication SET eql_expires_at = now() - %s::interval WHERE eql_deduplication_id = %s"
    )
    for name, ago in (("old", "2 days"), ("older", "3 days"), ("yesterday", "23 hours")):
        session.execute(ended, [ago, name])
    with database.transaction() as connection:
        queue.send(b"2", deduplication_id="new", connection=connection)
    rows = session.execute("SELECT eql_deduplication_id FROM eventsql.queue_deduplication").fetchall()
    assert sorted(rows) == [("new",), ("yesterday",)]


def test_spent_messages_move_to_the_dead_letters_with_their_history(database: Database) -> None:
    queue = Queue(database, "commands", max_receives=2, dead_letters="graveyard")
    queue.send(b"bad", metadata={"a": "b"})
    (message,) = queue.receive()
    queue.release(message, reason="first")
    queue.receive(visibility_timeout=60)
    expire(database)
    queue.send(b"good")
    # The statement that would have given it out again moves it, and gives the next one instead.
    assert bodies(queue.receive()) == [b"good"]
    assert queue.statistics().dead == 1
    (letter,) = Queue(database, "graveyard").peek()
    assert (letter.body, letter.origin, letter.metadata) == (b"bad", "commands", {"a": "b"})
    assert [(entry["receive"], entry["reason"]) for entry in letter.history] == [
        (1, "first"),
        (2, "the visibility timeout ended"),
        (2, "moved to the dead letters"),
    ]
    assert queue.redrive() == 1
    (again,) = queue.receive()
    assert (again.body, again.receives) == (b"bad", 1)
    assert again.history[-1]["reason"] == "redriven"
    assert queue.statistics().dead == 0


def test_a_key_that_is_too_long_for_ordered_dead_letters_holds_nothing_up(database: Database) -> None:
    dead = Queue(database, "graveyard", ordered=True)
    dead.definition()
    queue = Queue(database, "commands", max_receives=1, dead_letters="graveyard")
    key = secrets.token_hex(MAX_KEY_BYTES // 2)
    queue.send_all([NewMessage(b"1", key=key), NewMessage(b"2", key="short")])
    queue.receive(max_messages=2)
    expire(database)
    queue.send(b"3")
    assert bodies(queue.receive()) == [b"3"]
    letters = dead.receive(max_messages=2)
    assert [(each.body, each.key) for each in letters] == [(b"1", key), (b"2", "short")]


def test_a_key_that_is_too_long_for_the_order_of_a_queue_holds_no_redrive_up(database: Database) -> None:
    Queue(database, "graveyard", ordered=True, max_receives=1, dead_letters="last").definition()
    queue = Queue(database, "commands", max_receives=1, dead_letters="graveyard")
    dead, last = Queue(database, "graveyard"), Queue(database, "last")
    keys = [secrets.token_hex(1_500), "k" * MAX_KEY_BYTES, "short"]
    queue.send_all([NewMessage(b"%d" % number, key=key) for number in (1, 2) for key in keys])
    for each in (queue, dead):
        while each.receive(max_messages=10):
            expire(database)
    assert last.statistics().visible == 6
    assert dead.redrive() == 6
    # The first of each key that the index takes, and both of the other one.
    received = [(message.body, keys.index(message.key or "")) for message in dead.receive(max_messages=10)]
    assert sorted(received) == [(b"1", 0), (b"1", 1), (b"1", 2), (b"2", 0)]


def test_a_receive_fills_up_behind_spent_messages(database: Database) -> None:
    queue = Queue(database, "commands", max_receives=1)
    queue.send_all([b"1", b"2"])
    queue.receive(max_messages=2)
    expire(database)
    queue.send_all([b"3", b"4", b"5", b"6"])
    assert bodies(queue.receive(max_messages=3)) == [b"3", b"4", b"5"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_that_was_given_back_has_all_its_receives_in_each_queue(database: Database, *, ordered: bool) -> None:
    Queue(database, "dead", ordered=ordered, max_receives=1, dead_letters="last").definition()
    queue = Queue(database, "commands", ordered=ordered, max_receives=1, dead_letters="dead")
    dead, last = Queue(database, "dead"), Queue(database, "last")
    queue.send(b"1", key="a")

    def use_up(queue: Queue) -> None:
        queue.give_back(queue.receive())
        (message,) = queue.receive()
        queue.release(message)
        assert queue.receive() == []

    use_up(queue)
    use_up(dead)
    last.give_back(last.receive())
    assert dead.redrive() == 1
    use_up(dead)
    assert last.statistics().visible == 1


def test_the_history_of_a_redriven_message_has_the_timeout_of_its_dead_letter(database: Database) -> None:
    queue = Queue(database, "commands", max_receives=1)
    queue.send(b"1")
    queue.release(queue.receive()[0], reason="failed")
    assert queue.receive() == []
    Queue(database, "commands_dead").receive()
    expire(database)
    assert queue.redrive() == 1
    (again,) = queue.receive()
    assert [(entry["receive"], entry["reason"]) for entry in again.history] == [
        (1, "failed"),
        (1, "moved to the dead letters"),
        (1, "the visibility timeout ended"),
        (1, "redriven"),
    ]


def test_some_dead_letters_are_redriven(database: Database) -> None:
    queue = Queue(database, "commands", max_receives=1)
    queue.send_all([b"1", b"2", b"3"])
    queue.receive(max_messages=3)
    expire(database)
    assert queue.receive() == []
    dead = Queue(database, "commands_dead")
    second = dead.peek()[1]
    assert queue.redrive(ids=[second.id]) == 1
    assert bodies(queue.receive(max_messages=9)) == [b"2"]
    assert queue.redrive(1) == 1
    assert bodies(queue.receive(max_messages=9)) == [b"1"]


def test_the_message_that_died_first_is_redriven_first(database: Database) -> None:
    queue = Queue(database, "commands", max_receives=1)
    queue.send_all([b"1", b"2"])
    for message in reversed(queue.receive(max_messages=2)):
        queue.release(message)
        assert queue.receive() == []
    assert queue.redrive(1) == 1
    assert bodies(queue.receive()) == [b"2"]


def test_messages_beyond_those_of_one_transaction_are_redriven_and_purged(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PURGED_AT_ONCE", 2)
    queue = Queue(database, "commands", max_receives=1)
    queue.send_all([NewMessage(b"1", key="a"), b"2", b"3", b"4", b"5", b"6"])
    queue.receive(max_messages=6)
    expire(database)
    assert queue.receive() == []
    assert (queue.redrive(3), queue.redrive()) == (3, 3)
    assert bodies(queue.receive(max_messages=9)) == [b"1", b"2", b"3", b"4", b"5", b"6"]
    assert queue.purge() == 6


def test_dead_letters_are_redriven_all_or_none_where_some_are_unknown(database: Database) -> None:
    queue, other = Queue(database, "commands", max_receives=1), Queue(database, "others", max_receives=1)
    queue.send(b"1")
    other.send(b"2")
    for each in (queue, other):
        each.receive()
    expire(database)
    assert (queue.receive(), other.receive()) == ([], [])
    waiting = queue.send(b"3")
    (letter,), (theirs,) = Queue(database, "commands_dead").peek(), Queue(database, "others_dead").peek()
    with pytest.raises(MessageNotFoundError) as raised:
        queue.redrive(ids=[letter.id, theirs.id, waiting])
    assert raised.value.ids == (theirs.id, waiting)
    assert queue.statistics().dead == 1
    assert queue.redrive(ids=[letter.id, letter.id]) == 1


def test_all_messages_are_acknowledged_or_none(queue: Queue) -> None:
    queue.send_all([b"1", b"2", b"3"])
    messages = queue.receive(max_messages=3)
    queue.acknowledge(messages[1])
    with pytest.raises(MessageNotFoundError) as raised:
        queue.acknowledge_all(messages)
    assert raised.value.ids == (messages[1].id,)
    assert queue.statistics().in_flight == 2
    queue.acknowledge_all([messages[0], messages[2], messages[0]])
    assert queue.statistics().depth == 0


@pytest.mark.parametrize("retention", [None, timedelta(days=1)])
def test_messages_of_different_receives_are_acknowledged_together_in_any_order(
    database: Database, retention: timedelta | None
) -> None:
    queue = Queue(database, "commands", retention=retention)
    queue.send_all([b"1", b"2", b"3"])
    first, second, third = queue.receive(max_messages=3)
    queue.release(second)
    (again,) = queue.receive()
    with pytest.raises(MessageNotFoundError) as failure:
        queue.acknowledge_all([third, second, first])
    assert failure.value.ids == (second.id,)
    queue.acknowledge_all([third, again, first])
    assert queue.statistics().depth == 0


def test_a_receipt_that_no_queue_gives_is_refused(queue: Queue) -> None:
    queue.send(b"1")
    (message,) = queue.receive()
    with pytest.raises(ValidationError):
        queue.acknowledge(replace(message, receipt=2**31))
    one_for_several: Any = message
    with pytest.raises(ValidationError):
        queue.acknowledge_all(one_for_several)
    queue.acknowledge(message)


def test_a_held_message_can_be_extended(database: Database, queue: Queue) -> None:
    queue.send(b"1")
    (message,) = queue.receive(visibility_timeout=60)
    expire(database)
    queue.extend(message, 60)
    assert queue.receive() == []
    assert queue.extend_all([message], 60) == [message]
    queue.acknowledge(message)
    with pytest.raises(MessageNotFoundError):
        queue.extend(message, 60)
    assert queue.extend_all([message], 60) == []


def test_acknowledged_messages_are_archived_until_their_retention_ends(database: Database) -> None:
    queue = Queue(database, "commands", retention=timedelta(days=3))
    queue.send_all([b"1", b"2"])
    queue.acknowledge_all(queue.receive(max_messages=2))
    assert sorted(each.body for each in queue.archived()) == [b"1", b"2"]
    assert drop_expired_archives(database) == []
    with database.connection() as connection:
        connection.execute(
            "SELECT eventsql.make_queue_archive(now() - interval '5 days');"
            "UPDATE eventsql.queue_archive SET eql_expires_at = now() - interval '5 days'"
        )
    assert len(drop_expired_archives(database)) == 2
    assert queue.archived() == []


def test_the_rates_of_a_queue_count_what_was_sent_and_acknowledged_within_the_last_minute(
    database: Database, session: Connection
) -> None:
    others = Queue(database, "others", retention=60)
    others.send_all([b"other", b"other"])
    others.acknowledge(others.receive()[0])
    queue = Queue(database, "commands", retention=60, max_receives=1)
    queue.send_all([b"%d" % number for number in range(9)])
    done = queue.receive(max_messages=5)
    queue.acknowledge_all(done)
    queue.release(queue.receive()[0])
    assert [message.body for message in queue.receive(max_messages=4)] == [b"6", b"7", b"8"]
    # One message was acknowledged half a minute ago, perhaps on the day before.
    session.execute("SELECT eventsql.make_queue_archive(now() - interval '1 day')")
    session.execute(
        "UPDATE eventsql.queue_archive SET eql_acknowledged_at = eql_acknowledged_at - interval '30 seconds', "
        "eql_expires_at = eql_expires_at - interval '30 seconds' WHERE eql_id = %s",
        [done[2].id],
    )
    found = queue.statistics()
    assert (found.dead, found.sent_per_second, found.acknowledged_per_second) == (1, 9 / 60, 5 / 60)

    # Of the acknowledged messages, two were sent more than a minute ago, and one of the two was acknowledged then, too.
    # One message that waits and one dead letter were sent more than a minute ago.
    earlier = "= now() - interval '61 seconds' WHERE eql_id = ANY (%s)"
    for changed, ids in (
        (f"queue_archive SET eql_created_at {earlier}", [done[0].id, done[1].id]),
        (f"queue_archive SET eql_acknowledged_at {earlier}", [done[1].id]),
        ("queue_message SET eql_created_at = now() - interval '61 seconds' WHERE eql_body = ANY (%s)", [b"5", b"8"]),
    ):
        session.execute(f"UPDATE eventsql.{changed}".encode(), [ids])
    found = queue.statistics()
    assert (found.sent_per_second, found.acknowledged_per_second) == (5 / 60, 4 / 60)


def test_a_queue_without_a_retention_has_no_rates(queue: Queue) -> None:
    queue.send(b"1")
    found = queue.statistics()
    assert (found.visible, found.sent_per_second, found.acknowledged_per_second) == (1, None, None)


def test_no_message_of_a_queue_is_older_than_a_clock_that_went_back(queue: Queue, session: Connection) -> None:
    assert queue.statistics().oldest is None
    queue.send(b"x")
    session.execute("UPDATE eventsql.queue_message SET eql_created_at = now() + interval '1 hour'")
    assert queue.statistics().oldest == 0


@pytest.mark.parametrize(
    ("due", "zone"),
    [(datetime.min.replace(tzinfo=UTC), "America/New_York"), (datetime.max.replace(tzinfo=UTC), "Pacific/Kiritimati")],
    ids=["first", "last"],
)
def test_messages_of_the_first_and_the_last_day_are_looked_at_in_any_time_zone(
    dsn: str, due: datetime, zone: str
) -> None:
    with Database(f"{dsn}?options=-ctimezone%3D{zone}") as database:
        queue = Queue(database, "commands")
        queue.send(b"x", due=due)
        (message,) = queue.peek()
    assert message.visible_at is not None
    assert abs(message.visible_at - due) <= timedelta(days=1)


def test_archived_messages_are_kept_for_their_retention_in_any_time_zone(dsn: str) -> None:
    with Database(f"{dsn}?options=-ctimezone%3D48") as database:
        queue = Queue(database, "commands", retention=timedelta(hours=1))
        queue.send(b"1")
        queue.acknowledge(queue.receive()[0])
        assert drop_expired_archives(database) == []
        assert [each.body for each in queue.archived()] == [b"1"]


def test_acknowledgements_at_once_make_the_archive_once(database: Database, until_blocked: UntilBlocked) -> None:
    queue = Queue(database, "commands", retention=timedelta(days=3))
    queue.send_all([b"1", b"2"])
    first, second = queue.receive(max_messages=2)
    with ThreadPoolExecutor(1) as executor:
        with database.transaction() as connection:
            queue.acknowledge(first, connection=connection)
            waiting = executor.submit(queue.acknowledge, second)
            until_blocked()
        waiting.result()
    assert len(queue.archived()) == 2


def test_an_acknowledgement_does_not_wait_for_another_that_makes_the_archive_of_a_later_day(
    database: Database, session: Connection
) -> None:
    expires = datetime.now(UTC) + timedelta(days=3)
    make = "SELECT eventsql.make_queue_archive(%s)"
    session.execute(make, [expires - timedelta(days=1)])
    with database.transaction() as one, database.transaction() as two:
        one.execute(make, [expires])
        two.execute("SET LOCAL lock_timeout = '5s'")
        two.execute(make, [expires])


@pytest.mark.parametrize("way", ["send", "release", "give back", "fail", "redrive"])
def test_a_receiver_hears_of_a_message_that_comes_into_sight(
    platform: EventSQL, until: Until, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    queue, other, paused = Queue(platform, "commands", max_receives=2), Queue(platform, "commands"), threading.Event()
    queue.definition()
    other.send(b"x")
    (held,) = other.receive()
    if way == "send":
        other.acknowledge(held)
    if way == "redrive":
        for _ in range(2):
            other.release(held)
            held = next(iter(other.receive()), held)

    def look_again_in_an_hour() -> float:
        paused.set()
        return 3_600.0

    monkeypatch.setattr(queue, "pause", look_again_in_an_hour)
    with ThreadPoolExecutor(1) as receivers:
        waiting = receivers.submit(queue.receive, wait=3_600)
        until(lambda: paused.is_set() and platform.listener.listening)
        match way:
            case "send":
                other.send(b"x")
            case "release":
                other.release(held)
            case "give back":
                other.give_back([held])
            case "fail":
                other.release_failed(held, delay=0.0, reason="no")
            case "redrive":
                assert other.redrive() == 1
        assert bodies(waiting.result(PATIENCE)) == [b"x"]


def test_a_receiver_that_may_wait_gets_a_message_that_is_there(queue: Queue) -> None:
    queue.send(b"x")
    assert bodies(queue.receive(wait=0.001)) == [b"x"]


def test_a_waiting_receiver_holds_no_transaction_and_gives_up_in_time(
    queue: Queue, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.definition()
    clock, open_transactions = [0.0], list[int]()

    def let_time_pass() -> float:
        in_transaction = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state ~ 'in transaction'"
        open_transactions.append(session.execute(in_transaction).rowcount)
        clock[0] += 25
        return 0.0

    monkeypatch.setattr(message_queue, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(queue, "pause", let_time_pass)
    assert queue.receive(wait=60) == []
    assert open_transactions == [0, 0, 0]


def test_a_task_receives_and_acknowledges(platform: EventSQL) -> None:
    queue = AsyncQueue(Queue(platform, "commands"))

    async def work() -> list[tuple[bytes, str | None]]:
        waiting = asyncio.create_task(queue.receive(max_messages=5, wait=60))
        await asyncio.sleep(0)
        await queue.send(b"1", key="a")
        messages = await waiting
        await queue.acknowledge_all(messages)
        assert await queue.receive() == []
        return [(message.body, message.key) for message in messages]

    assert asyncio.run(work()) == [(b"1", "a")]


@pytest.mark.parametrize("name", [name for name in vars(AsyncQueue) if not name.startswith("_")])
def test_a_call_in_a_task_takes_what_the_queue_takes(name: str) -> None:
    def taken(owner: type) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert taken(AsyncQueue) == taken(Queue)


def test_a_task_looks_after_a_queue(platform: EventSQL) -> None:
    queue = AsyncQueue(Queue(platform, "commands", max_receives=1, retention=60))

    async def work() -> None:
        assert (await queue.definition()).max_receives == 1
        await queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="b"), NewMessage(b"3", key="c")])
        assert [message.body for message in await queue.peek(2)] == [b"1", b"2"]
        assert await queue.depth() == QueueDepth(3, 0)

        first, *others = await queue.receive(max_messages=3)
        await queue.acknowledge(first)
        assert [message.body for message in await queue.archived()] == [b"1"]

        for message in others:
            await queue.release(message, reason="no")
        assert await queue.receive() == []
        dead = await AsyncQueue(Queue(platform, "commands_dead")).peek()
        assert await queue.redrive(ids=[message.id for message in dead if message.key == "b"]) == 1
        assert await queue.count_of_keys(["b", "c"]) == await queue.erase(["b", "c"]) == ErasedMessages(1, 1, 0)

        await queue.send(b"4")
        assert (await queue.statistics()).depth == await queue.purge() == 1
        with pytest.raises(QueueInUseError):
            await queue.delete()
        await queue.delete(force=True)

    asyncio.run(work())
    assert [each.name for each in list_queues(platform)] == ["commands_dead"]


def test_a_receive_that_is_cancelled_leaves_no_subscription(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Queue(platform, "commands")
    subscribe = own.subscribe

    async def receive_and_cancel() -> None:
        waiting = asyncio.create_task(AsyncQueue(own).receive(wait=60))
        loop = asyncio.get_running_loop()

        def subscribe_and_cancel(callback: Callable[[], None]) -> Callable[[], None]:
            loop.call_soon_threadsafe(waiting.cancel)
            return subscribe(callback)

        monkeypatch.setattr(own, "subscribe", subscribe_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(receive_and_cancel())
    assert platform.shards[0].listener._callbacks == {}


@pytest.mark.parametrize("ended", [False, True])
def test_a_receive_that_is_cancelled_gives_its_messages_back(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """Its thread has received them, and has not ended yet, or has ended and its task does not know it yet."""
    own = Queue(platform, "commands", max_receives=1)
    own.send(b"1")
    receive = own.receive
    cancelled = threading.Event()

    async def receive_and_cancel() -> None:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(threads)
        task = asyncio.create_task(AsyncQueue(own).receive())

        def cancel() -> None:
            if ended:
                # The only thread ends the receive first.
                threads.submit(bool).result()
            task.cancel()

        def receive_and_wait(**options: Any) -> list[Message]:
            found = receive(**options)
            loop.call_soon_threadsafe(cancel)
            assert ended or cancelled.wait(PATIENCE)
            return found

        monkeypatch.setattr(own, "receive", receive_and_wait)
        with pytest.raises(asyncio.CancelledError):
            await task
        cancelled.set()

    asyncio.run(receive_and_cancel())
    monkeypatch.undo()
    assert [message.body for message in own.receive()] == [b"1"]


def test_options_are_kept_in_the_database_and_can_be_changed(database: Database) -> None:
    Queue(database, "commands", max_receives=3, visibility_timeout=5).definition()
    found = Queue(database, "commands").definition()
    assert (found.max_receives, found.dead_letters, found.visibility_timeout) == (3, "commands_dead", 5)
    assert Queue(database, "commands", retention=60).definition().retention == 60
    assert [each.name for each in list_queues(database)] == ["commands", "commands_dead"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_receives": 0},
        {"visibility_timeout": 0},
        {"retention": -1},
        {"dead_letters": "commands"},
        {"deduplication_window": "x"},
        {"ordered": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(nowhere: Database, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Queue(nowhere, "commands", **options)


def test_dead_letters_need_a_number_of_receives(database: Database) -> None:
    with pytest.raises(ValidationError):
        Queue(database, "commands", dead_letters="other").definition()
