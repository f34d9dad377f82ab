"""The messages of a key can be deleted wherever the queue keeps them, while it is used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.errors import DatabaseBusyError, MessageNotFoundError, QueueNotFoundError, ValidationError
from eventsql_orchestration.queue import ErasedMessages, NewMessage, Queue, upkeep
from tests.fixtures import Sessions, UntilBlocked
from tests.queue.test_ordered import beside_acknowledgements, bodies

SEND = "SELECT eventsql.put_messages(eql_id, ARRAY[%s::bytea], ARRAY['a'], alone => true) FROM eventsql.queue"
"""Sends a message to the only queue, and locks the last message of the key, behind which the new message waits."""

NOTHING = ErasedMessages(0, 0, 0)


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "letters", max_receives=1, retention=timedelta(days=1))


@pytest.fixture
def ordered(database: Database) -> Queue:
    return Queue(database, "letters", ordered=True)


def bury(queue: Queue, keys: str) -> None:
    queue.send_all([NewMessage(b"dead", key=key) for key in keys])
    for _ in range(2):
        for message in queue.receive(max_messages=10):
            queue.release(message)


def test_the_messages_of_keys_are_deleted_in_every_state(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PURGED_AT_ONCE", 2)
    bury(queue, "aabc")
    queue.send_all([NewMessage(b"done", key=key) for key in "abc"])
    queue.acknowledge_all(queue.receive(max_messages=3))
    queue.send_all([NewMessage(b"held", key=key) for key in "abc"])
    held = queue.receive(max_messages=3)
    queue.send_all([NewMessage(b"late", key=key, delay=60) for key in "abc"])
    queue.send_all([NewMessage(b"new", key=key) for key in "abc"] + [NewMessage(b"no key")])

    there = ErasedMessages(messages=6, dead_letters=3, archived=2)
    assert (queue.count_of_keys(["a", "b"]), there.total) == (there, 11)
    assert queue.erase({"a", "b"}) == there
    assert queue.erase({"a", "b"}) == queue.count_of_keys({"a", "b"}) == NOTHING

    for message in held:
        if message.key == "c":
            queue.acknowledge(message)
        else:
            with pytest.raises(MessageNotFoundError):
                queue.acknowledge(message)
    assert sorted(bodies(queue.receive(max_messages=10))) == [b"new", b"no key"]
    assert (queue.statistics().delayed, queue.statistics().dead, len(queue.archived())) == (1, 1, 2)


def test_messages_of_another_queue_stay(queue: Queue, database: Database) -> None:
    other = Queue(database, "others", max_receives=1, dead_letters="letters_dead", retention=60)
    bury(queue, "a")
    bury(other, "a")
    other.send_all([NewMessage(b"done", key="a"), NewMessage(b"new", key="a")])
    other.acknowledge(other.receive()[0])
    assert queue.erase(["a"]) == ErasedMessages(0, 1, 0)
    assert other.count_of_keys(["a"]) == ErasedMessages(1, 1, 1)
    assert Queue(database, "letters_dead").erase(["a"]) == ErasedMessages(1, 0, 0)


def test_an_erasure_waits_for_a_transaction_that_brings_a_message_into_sight(
    ordered: Queue, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    ordered.send_all([NewMessage(b"%d" % number, key="a") for number in range(3)])
    (first,) = ordered.receive()
    worker = sessions()
    worker.execute("SELECT eventsql.queue_acknowledge('letters', %s, %s)", [first.id, first.receipt])
    with ThreadPoolExecutor(1) as executor:
        erasing = executor.submit(ordered.erase, ["a"])
        until_blocked()
        worker.commit()
        assert erasing.result() == ErasedMessages(2, 0, 0)
    assert ordered.count_of_keys(["a"]) == NOTHING


def test_an_erasure_gives_way_to_a_transaction_that_acknowledges_messages_of_several_keys(
    ordered: Queue, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    ordered.send_all([NewMessage(b"%d" % number, key=key) for key in "ab" for number in range(3)])
    erased = beside_acknowledgements(lambda: ordered.erase(["a", "b"]), ordered, sessions, until_blocked)
    assert erased == ErasedMessages(4, 0, 0)


def test_an_erasure_says_that_transactions_keep_messages_from_it(
    ordered: Queue, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.0)
    ordered.send_all([NewMessage(b"%d" % number, key="a") for number in range(3)])
    (first,) = ordered.receive()
    sessions().execute("SELECT eventsql.queue_acknowledge('letters', %s, %s)", [first.id, first.receipt])
    with pytest.raises(
        DatabaseBusyError, match="queue 'letters' may keep messages of these keys, with 0 messages deleted"
    ):
        ordered.erase(["a"])
    assert ordered.count_of_keys(["a"]).messages == 3


def test_a_message_that_a_transaction_holds_stays(queue: Queue, database: Database) -> None:
    queue.send(b"1", key="a")
    with database.transaction() as connection:
        queue.acknowledge(queue.receive()[0], connection=connection)
        assert (queue.erase(["a"]), queue.count_of_keys(["a"])) == (NOTHING, ErasedMessages(1, 0, 0))
    assert queue.count_of_keys(["a"]) == ErasedMessages(0, 0, 1)


def test_a_message_that_waited_behind_a_deleted_one_comes_into_sight(ordered: Queue, session: Connection) -> None:
    ordered.send_all([NewMessage(b"1", key="a"), NewMessage(b"2", key="a")])
    session.execute("BEGIN")
    session.execute(SEND, ["3"])
    assert ordered.erase(["a"]) == ErasedMessages(1, 0, 0)
    session.execute("COMMIT")
    (second,) = ordered.receive(max_messages=5)
    assert second.body == b"2"
    ordered.acknowledge(second)
    assert bodies(ordered.receive(max_messages=5)) == [b"3"]


def test_no_later_message_of_a_key_comes_while_a_transaction_acknowledges_an_earlier_one(
    ordered: Queue, sessions: Sessions
) -> None:
    ordered.send_all([NewMessage(b"%d" % number, key="a") for number in range(4)])
    (first,) = ordered.receive()
    worker, sender = sessions(), sessions()
    worker.execute("SELECT FROM eventsql.queue_message WHERE eql_id = %s FOR UPDATE", [first.id])
    sender.execute(SEND, ["4"])
    assert ordered.erase(["a"]) == ErasedMessages(2, 0, 0)
    sender.commit()
    worker.rollback()
    assert ordered.receive(max_messages=5) == []
    ordered.acknowledge(first)
    (next_one,) = ordered.receive(max_messages=5)
    assert next_one.body == b"3"


def test_an_erasure_without_keys_or_a_queue_is_refused(queue: Queue, database: Database) -> None:
    with pytest.raises(QueueNotFoundError, match="there is no queue 'letters'"):
        queue.erase(["a"])
    queue.definition()
    for keys in ([], "a", [f"{number}" for number in range(1_001)], ["\0"]):
        for call in (queue.erase, queue.count_of_keys):
            with pytest.raises(ValidationError):
                call(keys)
