"""An ordered queue gives the messages of a key one after another, even if senders and receivers die meanwhile."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg
import pytest

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.sessions import wait_at_most
from eventsql_orchestration.errors import DatabaseBusyError, MessageNotFoundError, RedefinitionError, ValidationError
from eventsql_orchestration.model import MAX_KEY_BYTES
from eventsql_orchestration.queue import Message, NewMessage, Queue, upkeep
from eventsql_orchestration.queue.queue_table import ORDERED_KEY_BYTES, QueueTable
from eventsql_orchestration.queue.upkeep import QueueUpkeep
from tests.fixtures import Sessions, UntilBlocked

Result = TypeVar("Result")


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "commands", ordered=True)


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


def expire(database: Database) -> None:
    """Let every visibility timeout end, and every delay."""
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.queue_message SET eql_visible_at = now() WHERE eql_visible_at < 'infinity'")


def numbers(queue: Queue) -> tuple[int, int, int, int]:
    counted = queue.statistics()
    return counted.visible, counted.in_flight, counted.delayed, counted.blocked


def test_a_message_that_waits_again_keeps_its_timeout_in_its_history(database: Database, queue: Queue) -> None:
    queue.definition()
    with database.transaction() as late:
        queue.send(b"1", key="a", connection=late)
        queue.send(b"2", key="a")
        queue.receive()
    expire(database)
    (first,) = queue.receive(max_messages=5)
    assert (first.body, numbers(queue)) == (b"1", (0, 1, 0, 1))
    queue.acknowledge(first)
    (again,) = queue.receive()
    assert [(entry["receive"], entry["reason"]) for entry in again.history] == [(1, "the visibility timeout ended")]


def test_a_message_waits_out_of_sight_also_after_a_repeated_one_of_its_key(queue: Queue) -> None:
    queue.send(b"1", key="a", deduplication_id="x")
    queue.send_all([NewMessage(b"again", key="a", deduplication_id="x"), NewMessage(b"2", key="a")])
    assert numbers(queue) == (1, 0, 0, 1)
    queue.acknowledge(queue.receive()[0])
    assert bodies(queue.receive()) == [b"2"]


def test_only_the_first_message_of_a_key_is_received(queue: Queue) -> None:
    for body, key in ((b"a1", "a"), (b"a2", "a"), (b"b1", "b"), (b"free", None), (b"b2", "b")):
        queue.send(body, key=key)
    first = queue.receive(max_messages=10)
    assert bodies(first) == [b"a1", b"b1", b"free"]
    assert queue.receive(max_messages=10) == []
    queue.acknowledge(first[0])
    assert bodies(queue.receive(max_messages=10)) == [b"a2"]
    queue.acknowledge_all(first[1:])
    assert bodies(queue.receive(max_messages=10)) == [b"b2"]


def test_one_call_sends_the_messages_of_a_key_in_their_order(queue: Queue) -> None:
    sent = queue.send_all([NewMessage(b"%d" % number, key="ab"[number % 2]) for number in range(20)])
    assert sent == sorted(sent)
    assert numbers(queue) == (2, 0, 0, 18)
    received: list[bytes] = []
    while messages := queue.receive(max_messages=10):
        received += bodies(messages)
        queue.acknowledge_all(messages)
    assert [body for body in received if int(body) % 2 == 0] == [b"%d" % number for number in range(0, 20, 2)]
    assert [body for body in received if int(body) % 2] == [b"%d" % number for number in range(1, 20, 2)]


def test_a_key_that_is_too_long_for_the_index_is_refused_in_words(queue: Queue, database: Database) -> None:
    longest = secrets.token_hex(ORDERED_KEY_BYTES // 2)
    queue.send_all([NewMessage(b"1", key=longest), NewMessage(b"2", key=longest)])
    for length in (3_000, MAX_KEY_BYTES):
        too_long = secrets.token_hex(length // 2)
        with pytest.raises(ValidationError):
            queue.send(b"no", key=too_long)
        with psycopg.connect(database.dsn) as mine, pytest.raises(ValidationError):
            queue.send_all([b"no", NewMessage(b"no", key=too_long)], connection=mine)
    for body in (b"1", b"2"):
        (message,) = queue.receive(max_messages=10)
        assert (message.body, message.key) == (body, longest)
        queue.acknowledge(message)
    assert queue.receive() == []


def test_a_batch_fills_up_with_other_keys_behind_a_long_one(queue: Queue) -> None:
    for _ in range(300):
        queue.send(b"long", key="long")
    queue.send_all([NewMessage(b"other", key=str(number)) for number in range(9)])
    received = queue.receive(max_messages=10)
    assert sorted(bodies(received)) == [b"long"] + [b"other"] * 9


def test_a_receiver_finds_other_keys_behind_thousands_of_a_key_that_is_held(database: Database, queue: Queue) -> None:
    queue.send(b"held", key="long")
    queue.receive()
    queue.send(b"first", key="first")
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.queue_message "
            "(eql_queue, eql_key, eql_in_order, eql_body, eql_metadata, eql_visible_at) "
            "SELECT (SELECT eql_id FROM eventsql.queue), 'long', true, 'x', '{}', clock_timestamp() "
            "FROM generate_series(1, 6000)"
        )
    queue.send_all([NewMessage(b"other", key=str(number)) for number in range(12)])
    assert bodies(queue.receive(max_messages=10)) == [b"first"] + [b"other"] * 9


def test_a_receive_ends_although_messages_come_behind_a_held_key_as_fast_as_it_parks_them(
    queue: Queue, session: Connection
) -> None:
    queue.send(b"held", key="long")
    queue.receive()
    session.execute(
        "CREATE FUNCTION public.send() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF (SELECT count(*) FROM eventsql.queue_message) > 1000 THEN RAISE 'the receive does not end'; END IF; "
        "INSERT INTO eventsql.queue_message "
        "(eql_queue, eql_key, eql_in_order, eql_body, eql_metadata, eql_visible_at) "
        "SELECT eql_id, 'long', true, 'x', '{}', clock_timestamp() FROM eventsql.queue; RETURN NULL; END $$; "
        "CREATE TRIGGER send AFTER UPDATE ON eventsql.queue_message EXECUTE FUNCTION public.send(); "
        "UPDATE eventsql.queue_message SET eql_body = 'held'"
    )
    assert queue.receive(max_messages=10) == []
    assert numbers(queue)[3] >= 50


def test_a_receive_gives_out_its_messages_while_their_timeout_is_young(queue: Queue, session: Connection) -> None:
    queue.send(b"held", key="long")
    queue.receive()
    queue.send(b"other", key="other")
    session.execute("SELECT eventsql.queue_send('commands', 'x', 'long') FROM generate_series(1, 30)")
    session.execute(
        "CREATE FUNCTION public.dawdle() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_catalog.pg_sleep(0.1); RETURN NULL; END $$; "
        "CREATE TRIGGER dawdle AFTER UPDATE ON eventsql.queue_message EXECUTE FUNCTION public.dawdle()"
    )
    assert bodies(queue.receive(max_messages=10, visibility_timeout=1)) == [b"other"]
    # It looked at ten messages, and not at all that are behind the first.
    assert numbers(queue)[3] == 9


def test_a_message_that_comes_again_does_not_come_before_a_higher_priority(database: Database, queue: Queue) -> None:
    queue.send(b"again", key="b")
    queue.release(queue.receive()[0])
    with database.connection() as connection, connection.transaction():
        # A send in a transaction that goes on does not park the message behind its key: the receive does so first.
        queue.send(b"behind", key="b", priority=9, connection=connection)
    queue.send(b"urgent", priority=9)
    assert [message.body for message in queue.receive()] == [b"urgent"]


def test_a_released_message_keeps_its_priority_behind_a_key_that_is_held(database: Database, queue: Queue) -> None:
    queue.send(b"again", key="again", priority=9)
    (again,) = queue.receive()
    queue.send(b"held", key="held")
    queue.receive()
    with database.transaction() as connection:
        # In sight, so the receive finds this one first and has to look further.
        queue.send(b"behind", key="held", priority=9, connection=connection)
    queue.release(again)
    queue.send(b"new", key="new")
    assert bodies(queue.receive()) == [b"again"]


def test_one_receive_gives_new_messages_and_those_that_come_again_the_most_urgent_first(
    database: Database, queue: Queue
) -> None:
    queue.send(b"again", key="again", priority=5)
    (again,) = queue.receive()
    queue.send(b"new", key="new")
    queue.send(b"urgent", key="urgent", priority=9)
    with database.transaction() as connection:
        queue.send(b"behind", key="new", connection=connection)
    queue.release(again)
    assert bodies(queue.receive(max_messages=10)) == [b"urgent", b"again", b"new"]
    assert numbers(queue) == (0, 3, 0, 1)


def test_later_messages_wait_while_the_first_waits_for_its_retry(database: Database, queue: Queue) -> None:
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    (first,) = queue.receive()
    queue.release(first, delay=60)
    queue.send(b"3", key="a")
    assert queue.receive(max_messages=10) == []
    expire(database)
    (again,) = queue.receive(max_messages=10)
    assert (again.body, again.receives) == (b"1", 2)


def test_later_messages_wait_while_the_first_waits_after_its_timeout(database: Database, queue: Queue) -> None:
    queue.send(b"1", key="a")
    queue.receive()
    with database.transaction() as connection:
        queue.send(b"2", key="a", connection=connection)
    expire(database)
    assert bodies(queue.receive(max_messages=5)) == [b"1"]
    assert numbers(queue) == (0, 1, 0, 1)


def test_a_delay_counts_for_a_message_that_waits_behind_another(queue: Queue) -> None:
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a", delay=60), NewMessage(b"1", key="b")])
    queue.send(b"2", key="b", delay=60)
    for first in queue.receive(max_messages=10):
        queue.acknowledge(first)
    assert numbers(queue) == (0, 0, 2, 0)
    assert queue.receive() == []


def test_an_acknowledgement_that_keeps_its_message_in_the_archive_lets_the_next_one_go(database: Database) -> None:
    queue = Queue(database, "commands", ordered=True, retention=60)
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    queue.acknowledge_all(queue.receive())
    assert bodies(queue.receive()) == [b"2"]


@pytest.mark.parametrize("parked", [False, True])
def test_a_dead_letter_lets_the_next_message_go(database: Database, *, parked: bool) -> None:
    queue = Queue(database, "commands", ordered=True, max_receives=1)
    queue.send(b"1", key="a")
    queue.receive()
    if parked:
        queue.send(b"2", key="a")
    else:
        with database.transaction() as connection:
            queue.send(b"2", key="a", connection=connection)
    expire(database)
    assert bodies(queue.receive(max_messages=10)) == [b"2"]
    assert bodies(Queue(database, "commands_dead").receive()) == [b"1"]


@pytest.mark.parametrize("delay", [0.0, 60.0])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_that_fails_for_the_last_time_is_a_dead_letter_without_another_receive(
    database: Database, *, ordered: bool, delay: float
) -> None:
    queue = Queue(database, "commands", ordered=ordered, max_receives=1)
    queue.send(b"1", key="a")
    (failed,) = queue.receive()
    queue.send(b"2", key="a", delay=0.0 if ordered else 60.0)
    assert queue.receive() == []
    assert queue.release_failed(failed, delay=delay, reason="no") == "commands_dead"
    assert numbers(queue) == ((1, 0, 0, 0) if ordered else (0, 0, 1, 0))
    (letter,) = Queue(database, "commands_dead").receive()
    assert (letter.body, letter.receives) == (b"1", 1)
    assert [entry["reason"] for entry in letter.history] == ["no", "moved to the dead letters"]


def test_a_message_that_fails_for_the_last_time_wakes_the_receivers_of_its_dead_letters(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, woken = Queue(database, "commands", max_receives=1), list[str]()
    queue.send(b"1")
    (failed,) = queue.receive()
    monkeypatch.setattr(QueueTable, "notify", lambda own, name=None: woken.append(name or own.name))
    assert queue.release_failed(failed, delay=60.0, reason="no") == "commands_dead"
    assert "commands_dead" in woken


def test_a_delay_counts_for_a_message_behind_one_that_becomes_a_dead_letter(database: Database) -> None:
    queue = Queue(database, "commands", ordered=True, max_receives=1)
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a", delay=60)])
    queue.receive()
    expire(database)
    assert queue.receive() == []
    assert numbers(queue) == (0, 0, 1, 0)


def test_a_redriven_message_comes_after_those_that_wait(database: Database) -> None:
    queue = Queue(database, "commands", ordered=True, max_receives=1)
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    queue.receive()
    expire(database)
    (second,) = queue.receive(max_messages=10)
    assert queue.redrive() == 1
    assert queue.receive() == []
    queue.acknowledge(second)
    assert bodies(queue.receive()) == [b"1"]


def test_a_dead_letter_that_waits_for_a_redriven_one_can_be_received(database: Database) -> None:
    dead = Queue(database, "graveyard", ordered=True)
    dead.definition()
    queue = Queue(database, "commands", ordered=True, max_receives=1, dead_letters="graveyard")
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    for _ in range(3):
        queue.receive()
        expire(database)
    dead.release(dead.receive()[0])
    assert bodies(dead.receive(max_messages=5)) == [b"1"]
    assert numbers(dead) == (0, 1, 0, 1)
    expire(database)
    assert queue.redrive(1) == 1
    assert bodies(dead.receive()) == [b"2"]


def test_dead_letters_are_redriven_in_their_order(database: Database) -> None:
    queue = Queue(database, "commands", ordered=True, max_receives=1)
    queue.send_all([NewMessage(b"%d" % number, key="a") for number in range(20)])
    for _ in range(21):
        queue.receive()
        expire(database)
    assert queue.redrive() == 20
    assert [message.body for message in sorted(queue.peek(20), key=lambda each: each.id)] == [
        b"%d" % number for number in range(20)
    ]


def test_a_transaction_that_sends_several_times_never_deadlocks(database: Database, queue: Queue) -> None:
    queue.definition()
    with database.transaction() as one, database.transaction() as two:
        two.execute("SET LOCAL lock_timeout = '5s'")
        queue.send(b"1a", key="a", connection=one)
        queue.send(b"2b", key="b", connection=two)
        queue.send(b"1b", key="b", connection=one)
        queue.send(b"2a", key="a", connection=two)
    received: list[bytes] = []
    while messages := queue.receive(max_messages=10):
        assert len({message.key for message in messages}) == len(messages)
        received += bodies(messages)
        queue.acknowledge_all(messages)
    assert sorted(received) == [b"1a", b"1b", b"2a", b"2b"]


@pytest.mark.parametrize("parked", [False, True])
def test_a_message_that_commits_late_does_not_overlap_with_a_later_one(
    database: Database, queue: Queue, *, parked: bool
) -> None:
    queue.definition()
    with database.transaction() as late:
        queue.send(b"early id", key="a", connection=late)
        queue.send(b"late id", key="a")
        (held,) = queue.receive()
        assert held.body == b"late id"
    if parked:
        assert queue.receive() == []
    queue.release(held)
    assert bodies(queue.receive(max_messages=5)) == [b"early id"]
    assert queue.receive(max_messages=5) == []


def third_received_first(database: Database, queue: Queue) -> Message:
    """Send three messages of a key, the second with a delay. The third is received before the others are committed."""
    queue.definition()
    with database.transaction() as late:
        queue.send(b"1", key="a", connection=late)
        queue.send(b"2", key="a", delay=60, connection=late)
        queue.send(b"3", key="a")
        (third,) = queue.receive()
    assert queue.receive() == []
    return third


@pytest.mark.parametrize("again", ["released", "expired"])
def test_messages_of_a_transaction_keep_their_order_if_a_later_one_was_received_before(
    database: Database, queue: Queue, again: str
) -> None:
    third = third_received_first(database, queue)
    if again == "released":
        queue.release(third, delay=60)
    with database.connection() as connection:
        # The delay of the second message has passed.
        connection.execute(
            "UPDATE eventsql.queue_message SET eql_due_at = now(), "
            "eql_visible_at = CASE eql_visible_at WHEN 'infinity' THEN eql_visible_at ELSE now() END "
            "WHERE eql_body = '2'"
        )
    if again == "expired":
        expire(database)
    received: list[bytes] = []
    for _ in range(4):
        for message in queue.receive():
            received += bodies([message])
            queue.acknowledge(message)
        expire(database)
    assert received == [b"1", b"2", b"3"]


def test_a_delay_counts_for_a_message_between_two_others_of_its_key(database: Database, queue: Queue) -> None:
    third = third_received_first(database, queue)
    queue.acknowledge(third)
    queue.acknowledge(queue.receive()[0])
    assert numbers(queue) == (0, 0, 1, 0)


def give_back(queue: Queue, message: Message, session: Connection, way: str, delay: float) -> None:
    match way:
        case "release":
            queue.release(message, delay=delay)
        case "fail":
            queue.release_failed(message, delay=delay, reason="failed")
        case "in sql":
            values = [message.id, message.receipt, delay]
            session.execute("SELECT eventsql.queue_release('commands', %s, %s, %s)", values)


@pytest.mark.parametrize("way", ["release", "fail", "in sql"])
def test_an_earlier_message_that_commits_late_does_not_wait_for_the_retry_of_a_later_one(
    database: Database, queue: Queue, session: Connection, way: str
) -> None:
    queue.definition()
    with database.transaction() as late:
        queue.send(b"early id", key="a", connection=late)
        queue.send(b"late id", key="a")
        (held,) = queue.receive()
    assert queue.receive() == []
    give_back(queue, held, session, way, delay=60)
    assert bodies(queue.receive(max_messages=5)) == [b"early id"]
    assert queue.receive(max_messages=5) == []


@pytest.mark.parametrize("way", ["release", "fail", "in sql"])
def test_later_messages_stay_out_of_sight_if_the_first_one_comes_back_at_once(
    queue: Queue, session: Connection, way: str
) -> None:
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    (first,) = queue.receive()
    give_back(queue, first, session, way, delay=0)
    assert numbers(queue) == (1, 0, 0, 1)


ALONE = (
    "SELECT eventsql.put_messages((SELECT eql_id FROM eventsql.queue), ARRAY['2'::bytea], ARRAY['a'], alone => true)"
)
"""What a send without a connection executes."""


def test_a_message_behind_another_of_its_key_is_never_in_sight(database: Database, queue: Queue) -> None:
    for number in range(3):
        queue.send(b"%d" % number, key="a")
    assert numbers(queue) == (1, 0, 0, 2)
    with database.transaction() as connection:
        queue.send(b"3", key="a", connection=connection)
    # Nothing would keep an acknowledgement from missing a message of an open transaction behind its own.
    assert numbers(queue) == (2, 0, 0, 2)
    received: list[bytes] = []
    while messages := queue.receive(max_messages=10):
        received += bodies(messages)
        queue.acknowledge_all(messages)
    assert received == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("earlier", [0, 1])
def test_an_acknowledgement_waits_for_a_sender_that_relies_on_its_message(
    database: Database, queue: Queue, until_blocked: UntilBlocked, earlier: int
) -> None:
    queue.send_all([NewMessage(b"1", key="a")] * (earlier + 1))
    with database.transaction() as sender:
        sender.execute(ALONE)
        # Receivers do not wait, and neither do the acknowledgements of earlier messages.
        for _ in range(earlier):
            queue.acknowledge(queue.receive()[0])
        (last,) = queue.receive()
        acknowledging = threading.Thread(target=queue.acknowledge, args=[last])
        acknowledging.start()
        until_blocked()
    acknowledging.join()
    assert bodies(queue.receive()) == [b"2"]


def test_a_sender_does_not_rely_on_a_message_that_is_being_acknowledged(database: Database, queue: Queue) -> None:
    queue.send(b"1", key="a")
    (first,) = queue.receive()
    with database.transaction() as connection:
        queue.acknowledge(first, connection=connection)
        queue.send(b"2", key="a")
    assert bodies(queue.receive()) == [b"2"]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_sender_with_an_old_snapshot_relies_on_no_message(database: Database, queue: Queue, level: str) -> None:
    queue.send(b"1", key="a")
    (first,) = queue.receive()
    with database.transaction() as connection:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        connection.execute("SELECT count(*) FROM eventsql.queue_message")
        queue.acknowledge(first)
        connection.execute(ALONE)
    assert bodies(queue.receive()) == [b"2"]


TAKE = "SELECT key FROM eventsql.take_in_order((SELECT eql_id FROM eventsql.queue), 5, 30)"
"""What a receive executes."""


def test_two_receivers_with_open_transactions_have_neither_one_key_nor_one_message(
    database: Database, queue: Queue
) -> None:
    for number in range(8):
        queue.send(b"%d" % number, key="ab"[number % 2])
    queue.send(b"free")
    with database.transaction() as one, database.transaction() as two:
        two.execute("SET LOCAL lock_timeout = '5s'")
        assert one.execute(TAKE).fetchall() == [("a",), ("b",), (None,)]
        assert two.execute(TAKE).fetchall() == []


def test_no_receiver_gets_a_key_beside_another_that_did_not_see_its_earlier_message(
    database: Database, queue: Queue
) -> None:
    queue.definition()
    with database.transaction() as receiver:
        with database.transaction() as late:
            queue.send(b"early id", key="a", connection=late)
            queue.send(b"late id", key="a")
            assert receiver.execute(TAKE).fetchall() == [("a",)]
        assert queue.receive() == []
    assert queue.receive() == []


def test_a_receiver_that_parks_messages_beside_an_open_acknowledgement_strands_none(
    database: Database, queue: Queue
) -> None:
    queue.send(b"1", key="a")
    (first,) = queue.receive()
    with database.transaction() as connection:
        queue.send(b"2", key="a", connection=connection)
    with database.transaction() as connection:
        queue.acknowledge(first, connection=connection)
        # The first message is locked: it cannot vouch for the second, which stays in sight.
        assert queue.receive() == []
        assert numbers(queue)[3] == 0
    expire(database)
    assert bodies(queue.receive()) == [b"2"]


def test_an_acknowledgement_that_is_rolled_back_promotes_nothing(database: Database, queue: Queue) -> None:
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    (first,) = queue.receive()
    with database.connection() as connection, connection.transaction(force_rollback=True):
        queue.acknowledge(first, connection=connection)
    assert queue.receive() == []
    queue.acknowledge(first)
    assert bodies(queue.receive()) == [b"2"]


def two_of_one_key(database: Database, queue: Queue, third: NewMessage) -> tuple[Message, Message]:
    """Receive two messages of a key, the second before the first is committed. The third waits behind them."""
    queue.definition()
    with database.transaction() as late:
        queue.send(b"1", key="a", connection=late)
        queue.send_all([NewMessage(b"2", key="a"), third])
        (second,) = queue.receive()
    expire(database)
    (first,) = queue.receive()
    assert (first.body, second.body) == (b"1", b"2")
    return first, second


def test_two_late_acknowledgements_of_one_key_at_once_strand_nothing(database: Database, queue: Queue) -> None:
    first, second = two_of_one_key(database, queue, NewMessage(b"3", key="a"))
    with psycopg.connect(database.dsn) as one, psycopg.connect(database.dsn) as two:
        queue.acknowledge(second, connection=one)
        two.execute("SET LOCAL lock_timeout = '2s'")
        one.commit()
        queue.acknowledge(first, connection=two)
        two.commit()
    assert bodies(queue.receive()) == [b"3"]


def test_two_late_acknowledgements_of_one_key_at_once_keep_the_delay_of_the_next_message(
    database: Database, queue: Queue, until_blocked: UntilBlocked
) -> None:
    first, second = two_of_one_key(database, queue, NewMessage(b"3", key="a", delay=60))
    with ThreadPoolExecutor(1) as executor:
        with database.transaction() as connection:
            queue.acknowledge(second, connection=connection)
            waiting = executor.submit(queue.acknowledge, first)
            until_blocked()
        waiting.result()
    assert numbers(queue) == (0, 0, 1, 0)


def test_purging_leaves_a_queue_that_works(queue: Queue) -> None:
    queue.send_all([NewMessage(b"%d" % number, key="a") for number in range(5)])
    (held,) = queue.receive()
    assert queue.purge() == 5
    with pytest.raises(MessageNotFoundError):
        queue.acknowledge(held)
    queue.send(b"new", key="a")
    assert bodies(queue.receive()) == [b"new"]


def test_purging_leaves_messages_that_are_sent_meanwhile(queue: Queue, session: Connection) -> None:
    queue.send_all([b"1", b"2"])
    session.execute(
        "CREATE FUNCTION public.answer() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF OLD.eql_body <> 'new' THEN PERFORM eventsql.queue_send('commands', 'new'); END IF; RETURN NULL; END $$; "
        "CREATE TRIGGER answer AFTER DELETE ON eventsql.queue_message FOR EACH ROW EXECUTE FUNCTION public.answer()"
    )
    assert queue.purge() == 2
    assert bodies(queue.receive(max_messages=5)) == [b"new", b"new"]


def test_purging_leaves_a_message_that_a_worker_receives_meanwhile_to_it(
    queue: Queue, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    queue.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    (first,) = queue.receive()
    worker = sessions()
    worker.execute("SELECT eventsql.queue_acknowledge('commands', %s, %s)", [first.id, first.receipt])
    assert worker.execute("SELECT FROM eventsql.queue_receive('commands')").rowcount == 1
    with ThreadPoolExecutor(1) as executor:
        # It waits to bring the second message into sight.
        purging = executor.submit(queue.purge)
        until_blocked()
        worker.commit()
        assert purging.result() == 0
    assert queue.receive() == []


def beside_acknowledgements(
    call: Callable[[], Result], queue: Queue, sessions: Sessions, until_blocked: UntilBlocked
) -> Result:
    """The result of a call that waits for a transaction, which acknowledges two messages and waits for the call."""
    first, second = queue.receive(max_messages=6)
    worker, acknowledge = sessions(), "SELECT eventsql.queue_acknowledge(%s, %s, %s)"
    worker.execute("SET deadlock_timeout = '1h'")
    worker.execute(acknowledge, [queue.name, first.id, first.receipt])
    with ThreadPoolExecutor(1) as executor:
        result = executor.submit(call)
        until_blocked()
        worker.execute(acknowledge, [queue.name, second.id, second.receipt])
        worker.commit()
        return result.result()


def test_a_purge_gives_way_to_a_transaction_that_acknowledges_messages_of_several_keys(
    queue: Queue, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    queue.send_all([NewMessage(b"%d" % number, key=key) for key in "ab" for number in range(3)])
    assert beside_acknowledgements(queue.purge, queue, sessions, until_blocked) == 4
    assert queue.statistics().depth == 0


def test_a_redrive_gives_way_to_a_transaction_that_acknowledges_dead_letters_of_several_keys(
    database: Database, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    queue, dead = _with_dead_letters(database)
    assert beside_acknowledgements(queue.redrive, dead, sessions, until_blocked) == 4
    assert dead.statistics().depth == 0


def test_purges_and_redrives_say_that_transactions_keep_messages_from_them(
    database: Database, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.0)
    queue, dead = _with_dead_letters(database)
    first, _ = dead.receive(max_messages=6)
    sessions().execute("SELECT eventsql.queue_acknowledge('graveyard', %s, %s)", [first.id, first.receipt])
    with pytest.raises(DatabaseBusyError, match="queue 'graveyard' may keep messages, with 0 messages deleted"):
        dead.purge()
    with pytest.raises(DatabaseBusyError, match="queue 'commands' may keep dead letters, with 0 dead letters moved"):
        queue.redrive()
    assert dead.statistics().depth == 6


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (lambda _, dead: dead.purge(), "2 messages deleted"),
        (lambda _, dead: dead.erase(["a", "b"]), "2 messages deleted"),
        (lambda queue, _: queue.redrive(), "2 dead letters moved back"),
    ],
    ids=["purge", "erase", "redrive"],
)
def test_a_call_that_gives_up_says_how_much_it_has_done(
    database: Database, monkeypatch: pytest.MonkeyPatch, call: Callable[[Queue, Queue], object], done: str
) -> None:
    queue, dead = _with_dead_letters(database)
    transactions = itertools.count(1)

    def limit(connection: Connection, seconds: float) -> None:
        wait_at_most(connection, seconds)
        if next(transactions) > 1:
            raise DatabaseBusyError("a transaction does not end")

    monkeypatch.setattr(upkeep, "wait_at_most", limit)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "PURGED_AT_ONCE", 2)
    with pytest.raises(DatabaseBusyError, match=f"with {done}:"):
        call(queue, dead)
    assert dead.statistics().depth == 4


def test_a_redrive_that_gives_up_wakes_receivers_for_the_dead_letters_that_it_has_moved(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, _ = _with_dead_letters(database)
    redriven, woken_at = QueueUpkeep._redrive, list[int]()

    def redrive(own: QueueUpkeep, values: Mapping[str, Any], connection: Connection) -> int:
        if woken_at:
            raise DatabaseBusyError("a transaction does not end")
        return redriven(own, values, connection)

    monkeypatch.setattr(QueueUpkeep, "_redrive", redrive)
    monkeypatch.setattr(QueueTable, "notify", lambda own: woken_at.append(queue.statistics().visible))
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "PURGED_AT_ONCE", 1)
    with pytest.raises(DatabaseBusyError):
        queue.redrive()
    assert woken_at == [1]


def _with_dead_letters(database: Database) -> tuple[Queue, Queue]:
    """A queue that has three dead letters of each of two keys, in an ordered queue."""
    dead = Queue(database, "graveyard", ordered=True)
    dead.definition()
    queue = Queue(database, "commands", ordered=True, max_receives=1, dead_letters="graveyard")
    queue.send_all([NewMessage(b"%d" % number, key=key) for key in "ab" for number in range(3)])
    while queue.receive(max_messages=2):
        expire(database)
    return queue, dead


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_isolated_transaction_cannot_acknowledge(database: Database, queue: Queue, level: str) -> None:
    queue.send(b"1", key="a")
    (message,) = queue.receive()
    with database.transaction() as connection:
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        with pytest.raises(ValidationError):
            queue.acknowledge(message, connection=connection)
        assert connection.execute("SELECT 1").fetchone() == (1,)
    queue.acknowledge(message)


def test_the_order_of_a_queue_cannot_change(database: Database, queue: Queue) -> None:
    queue.send(b"1")
    with pytest.raises(RedefinitionError):
        Queue(database, "commands", ordered=False).send(b"2")
    assert numbers(Queue(database, "commands")) == (1, 0, 0, 0)
