"""A queue hands each message to one receiver at a time and keeps it until one of them acknowledges it."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.errors import (
    DatabaseError,
    DatabaseUnavailableError,
    InvalidNameError,
    MessageNotFoundError,
    QueueNotFoundError,
    ValidationError,
)
from eventsql_orchestration.queue import Message, NewMessage, Queue, QueueDepth
from eventsql_orchestration.threads import start_thread
from tests.fixtures import Sessions
from tests.interrupting import interrupted
from tests.queue.test_ordered import expire
from tests.waiting import PATIENCE


@pytest.fixture
def queue(database: Database) -> Queue:
    return Queue(database, "commands")


def hidden_for(database: Database) -> int:
    """Hours until the message is visible, of which the last may have begun."""
    seconds = "SELECT extract(epoch FROM eql_visible_at - clock_timestamp()) FROM eventsql.queue_message"
    with database.connection() as connection:
        ((left,),) = connection.execute(seconds).fetchall()
    return math.ceil(float(left) / 3_600)


def receive_within(connection: Connection, queue: Queue, max_messages: int) -> set[int]:
    """The messages of a receiver whose transaction is still open."""
    statement = Queries("queue", "eventsql")("take")
    (row,) = connection.execute("SELECT eql_id FROM eventsql.queue WHERE eql_name = %s", [queue.name])
    values = {"queue": row[0], "max_messages": max_messages, "visibility_timeout": 30.0, "since": None}
    return {row[0] for row in connection.execute(statement, values)}


def test_a_message_arrives_as_it_was_sent(queue: Queue) -> None:
    body = bytes(range(256))
    sent = queue.send(body, key="órder 7", metadata={"source": "wéb", "empty": ""})
    (message,) = queue.receive()
    metadata = {"source": "wéb", "empty": ""}
    assert message == Message(sent, body, "órder 7", metadata, 1, message.receipt, 0, message.sent_at)


def test_a_message_needs_neither_a_key_nor_metadata_nor_a_body(queue: Queue) -> None:
    queue.send(b"")
    (message,) = queue.receive()
    assert (message.body, message.key, message.metadata) == (b"", None, {})


@pytest.mark.parametrize("metadata", ['{"digits": ' + "1" * 5_000 + "}", "[1]"])
def test_metadata_that_another_program_wrote_hold_up_no_message(
    database: Database, queue: Queue, metadata: str
) -> None:
    queue.send_all([b"odd", b"even"])
    with database.connection() as connection:
        statement = "UPDATE eventsql.queue_message SET eql_metadata = %s::json WHERE eql_body = 'odd'"
        connection.execute(statement, [metadata])
    odd, even = queue.receive(max_messages=2)
    assert (odd.metadata, even.metadata) == ({"eventsql_unreadable": metadata}, {})


def test_an_empty_queue_hands_out_nothing(queue: Queue) -> None:
    assert queue.receive(max_messages=10) == []
    assert queue.depth() == QueueDepth(visible=0, invisible=0)


def test_a_queue_hands_out_nothing_of_another_queue(database: Database, queue: Queue) -> None:
    Queue(database, "other").send(b"theirs")
    assert queue.receive() == []
    assert queue.depth() == QueueDepth(0, 0)


def test_messages_come_in_the_order_in_which_they_were_sent(queue: Queue) -> None:
    sent = [queue.send(str(number).encode()) for number in range(10)]
    first, second = queue.receive(max_messages=6), queue.receive(max_messages=6)
    assert [message.id for message in first + second] == sent


def test_two_receivers_with_open_transactions_get_different_messages(database: Database, queue: Queue) -> None:
    sent = {queue.send(b"x") for _ in range(6)}
    with database.transaction() as one, database.transaction() as two:
        two.execute("SET LOCAL lock_timeout = '5s'")
        first = receive_within(one, queue, 4)
        second = receive_within(two, queue, 4)
        assert (len(first), len(second)) == (4, 2)
        assert first | second == sent
        assert queue.receive(max_messages=10) == []


def test_the_messages_of_a_receiver_that_rolls_back_are_visible_at_once(database: Database, queue: Queue) -> None:
    sent = queue.send(b"x")
    with ExitStack() as stack:
        receiver = database.dedicated()
        stack.callback(receiver.close)
        receiver.execute("BEGIN")
        assert receive_within(receiver, queue, 1) == {sent}
        assert queue.receive() == []
        receiver.execute("ROLLBACK")
    (message,) = queue.receive()
    assert (message.id, message.receives) == (sent, 1)


def test_many_receivers_at_once_get_every_message_once(queue: Queue) -> None:
    sent = [queue.send(b"x") for _ in range(300)]

    def drain(_: int) -> list[int]:
        mine: list[int] = []
        while messages := queue.receive(max_messages=3):
            for message in messages:
                mine.append(message.id)
                queue.acknowledge(message)
        return mine

    with ThreadPoolExecutor(8) as receivers:
        received = [message for mine in receivers.map(drain, range(8)) for message in mine]
    assert sorted(received) == sent
    assert queue.depth() == QueueDepth(0, 0)


def test_a_message_that_is_not_acknowledged_comes_back_when_its_timeout_ended(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (first,) = queue.receive(visibility_timeout=3 * 3_600)
    assert queue.receive() == []
    assert hidden_for(database) == 3
    expire(database)
    (second,) = queue.receive()
    assert (second.id, second.receives) == (first.id, 2)
    assert second.receipt != first.receipt


def test_durations_are_seconds_or_timedeltas(database: Database, queue: Queue) -> None:
    queue.send(b"x", delay=timedelta(hours=4))
    assert hidden_for(database) == 4
    expire(database)
    queue.receive(visibility_timeout=timedelta(hours=5))
    assert hidden_for(database) == 5


def test_an_acknowledged_message_is_gone(queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    queue.acknowledge(message)
    assert queue.depth() == QueueDepth(0, 0)
    with pytest.raises(MessageNotFoundError, match=f"'commands' has no message {message.id}"):
        queue.acknowledge(message)


def test_a_receipt_is_stale_once_another_receiver_has_the_message(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (stale,) = queue.receive()
    expire(database)
    (current,) = queue.receive()
    with pytest.raises(MessageNotFoundError):
        queue.acknowledge(stale)
    with pytest.raises(MessageNotFoundError):
        queue.release(stale)
    assert queue.depth() == QueueDepth(visible=0, invisible=1)
    queue.acknowledge(current)
    assert queue.depth() == QueueDepth(0, 0)


def test_a_late_acknowledgement_counts_while_nobody_else_has_the_message(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    expire(database)
    assert queue.depth() == QueueDepth(visible=1, invisible=0)
    queue.acknowledge(message)
    assert queue.depth() == QueueDepth(0, 0)


@pytest.mark.parametrize("retention", [None, 60])
def test_a_message_is_settled_on_its_own_queue_alone(
    database: Database, queue: Queue, session: Connection, retention: float | None
) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    other = Queue(database, "other", retention=retention)
    other.give_back([message])
    for settle in (other.acknowledge, other.release, lambda held: other.extend(held, 60)):
        with pytest.raises(MessageNotFoundError):
            settle(message)
    for call in ("release('other', %s, %s)", "extend('other', %s, %s, 60)"):
        with pytest.raises(psycopg.errors.NoDataFound):
            session.execute(f"SELECT eventsql.queue_{call}".encode(), [message.id, message.receipt])
    assert queue.depth() == QueueDepth(visible=0, invisible=1)
    queue.acknowledge(message)


def test_a_released_message_is_visible_at_once_behind_those_that_waited(queue: Queue) -> None:
    first, second = queue.send(b"1"), queue.send(b"2")
    (message,) = queue.receive()
    assert message.id == first
    queue.release(message)
    assert queue.depth() == QueueDepth(visible=2, invisible=0)
    assert [queue.receive()[0].id for _ in range(2)] == [second, first]


def test_the_history_of_a_message_has_its_last_20_entries(queue: Queue) -> None:
    queue.send(b"x")
    for number in range(25):
        (message,) = queue.receive()
        queue.release(message, reason=str(number))
    assert [entry["reason"] for entry in queue.peek()[0].history] == [str(number) for number in range(5, 25)]


def test_a_released_message_cannot_be_settled_by_its_former_receiver(queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    queue.release(message)
    with pytest.raises(MessageNotFoundError):
        queue.acknowledge(message)
    with pytest.raises(MessageNotFoundError):
        queue.release(message)
    assert queue.depth() == QueueDepth(visible=1, invisible=0)


def test_a_delayed_message_is_not_visible_before_its_delay_has_passed(database: Database, queue: Queue) -> None:
    sent = queue.send(b"x", delay=3 * 3_600)
    assert queue.depth() == QueueDepth(visible=0, invisible=1)
    assert queue.receive() == []
    assert hidden_for(database) == 3
    expire(database)
    assert [message.id for message in queue.receive()] == [sent]


def test_the_delay_counts_from_the_sending_in_a_long_transaction(database: Database, queue: Queue) -> None:
    with database.transaction() as connection:
        queue.send(b"x", delay=10, connection=connection)
        # In a transaction, now() is the time of its beginning.
        due = connection.execute("SELECT extract(epoch FROM eql_visible_at - now()) FROM eventsql.queue_message")
        assert due.fetchall()[0][0] > 10


def test_a_message_sent_in_a_transaction_is_not_there_when_it_rolls_back(database: Database, queue: Queue) -> None:
    with database.connection() as connection, connection.transaction(force_rollback=True):
        queue.send(b"x", connection=connection)
    assert queue.depth() == QueueDepth(0, 0)


def test_an_acknowledgement_commits_with_the_effects_of_the_message(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    with database.connection() as connection:
        connection.execute("CREATE TABLE effect (body bytea)")

    def work(connection: Connection) -> None:
        connection.execute("INSERT INTO effect VALUES (%s)", (message.body,))
        queue.acknowledge(message, connection=connection)

    with database.connection() as connection, connection.transaction(force_rollback=True):
        work(connection)
    assert queue.depth() == QueueDepth(visible=0, invisible=1)
    with database.transaction() as connection:
        work(connection)
    assert queue.depth() == QueueDepth(0, 0)
    with database.connection() as connection:
        assert connection.execute("SELECT body FROM effect").fetchall() == [(b"x",)]


def test_a_message_whose_acknowledgement_is_about_to_commit_goes_to_nobody(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    expire(database)
    with database.transaction() as connection:
        queue.acknowledge(message, connection=connection)
        assert queue.depth() == QueueDepth(visible=1, invisible=0)
        assert queue.receive() == []
    assert queue.depth() == QueueDepth(0, 0)


def test_a_stale_acknowledgement_leaves_the_callers_transaction_usable(database: Database, queue: Queue) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    queue.acknowledge(message)
    with database.transaction() as connection:
        with pytest.raises(MessageNotFoundError):
            queue.acknowledge(message, connection=connection)
        queue.send(b"apology", connection=connection)
    assert [message.body for message in queue.receive()] == [b"apology"]


def test_a_late_acknowledgement_under_repeatable_read_is_the_queues_error(queue: Queue, sessions: Sessions) -> None:
    queue.send(b"work")
    (message,) = queue.receive()
    strict = sessions()
    strict.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    strict.execute("SELECT 1")
    queue.release(message)
    with pytest.raises(MessageNotFoundError):
        queue.acknowledge(message, connection=strict)


def test_a_call_with_no_messages_does_nothing_but_look_at_the_connection(
    queue: Queue, session: Connection, direct_dsn: str
) -> None:
    calls: list[Callable[..., object]] = [queue.send_all, queue.acknowledge_all]
    with psycopg.connect(direct_dsn, dbname="postgres") as elsewhere:
        for call in calls:
            assert not call([])
            assert not call([], connection=session)
            with pytest.raises(ValidationError, match="postgres"):
                call([], connection=elsewhere)


def test_a_transaction_of_sqlalchemy_sends_and_acknowledges(queue: Queue, engine: sqlalchemy.Engine) -> None:
    with engine.begin() as connection:
        queue.send(b"x", connection=connection)
        assert queue.receive() == []
    (message,) = queue.receive()
    with engine.connect() as connection:
        queue.acknowledge(message, connection=connection)
        connection.rollback()
        queue.acknowledge(message, connection=connection)
        connection.commit()
    assert queue.depth() == QueueDepth(0, 0)


def test_a_callers_connection_may_have_a_row_factory_of_its_own(database: Database, queue: Queue) -> None:
    database.ensure_schema()
    with psycopg.connect(database.dsn, row_factory=dict_row) as connection:
        sent = queue.send(b"x", connection=connection)
    assert [message.id for message in queue.receive()] == [sent]


def test_nothing_is_sent_to_a_queue_that_is_gone_and_was_made_anew(database: Database, queue: Queue) -> None:
    queue.send(b"before")
    with database.connection() as connection:
        connection.execute("DELETE FROM eventsql.queue_message; DELETE FROM eventsql.queue")
    Queue(database, "commands", ordered=True).definition()

    for sent in (NewMessage(b"x"), NewMessage(b"x", deduplication_id="once")):
        with pytest.raises(QueueNotFoundError):
            queue.send_all([sent])
        with pytest.raises(QueueNotFoundError), database.transaction() as connection:
            queue.send_all([sent], connection=connection)
    with database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM eventsql.queue_message").fetchone() == (0,)


def test_the_error_of_a_users_trigger_is_not_taken_for_a_refusal_of_the_shard(database: Database, queue: Queue) -> None:
    queue.definition()
    with database.connection() as connection:
        connection.execute(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE object_not_in_prerequisite_state; END $$; "
            "CREATE TRIGGER refuse BEFORE INSERT ON eventsql.queue_message EXECUTE FUNCTION public.refuse()"
        )
    with pytest.raises(DatabaseError):
        queue.send(b"1")


def test_a_plain_message_is_not_sent_to_a_queue_that_keeps_an_order_by_now(database: Database, queue: Queue) -> None:
    queue.definition()
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.queue SET eql_ordered = true")
    with pytest.raises(QueueNotFoundError):
        queue.send(b"x", key="a")
    with database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM eventsql.queue_message").fetchone() == (0,)


@pytest.mark.parametrize("name", ["", " ", " commands", "commands ", "a\nb", "a\x00b", "\ud800", "q" * 201, None, 7])
def test_a_name_that_cannot_be_used_is_refused(nowhere: Database, name: Any) -> None:
    with pytest.raises(InvalidNameError, match="name"):
        Queue(nowhere, name)


def test_a_name_may_have_200_characters_of_any_script(database: Database) -> None:
    queue = Queue(database, "очередь " * 24 + "очередь!")
    queue.send(b"x")
    assert len(queue.receive()) == 1


@pytest.mark.parametrize(
    "send",
    [
        lambda queue: queue.send("text"),
        lambda queue: queue.send(None),
        lambda queue: queue.send(b"x", key=7),
        lambda queue: queue.send(b"x", key="a\x00b"),
        lambda queue: queue.send(b"x", key="\ud800"),
        lambda queue: queue.send(b"x", key="k" * 65_537),
        lambda queue: queue.send(b"x", metadata=["source"]),
        lambda queue: queue.send(b"x", metadata={"source": 7}),
        lambda queue: queue.send(b"x", metadata={7: "source"}),
        lambda queue: queue.send(b"x", metadata={"source": "a\x00b"}),
        lambda queue: queue.send(b"x", delay=-1),
        lambda queue: queue.send(b"x", delay=math.inf),
        lambda queue: queue.send(b"x", delay=math.nan),
        lambda queue: queue.send(b"x", delay="1"),
        lambda queue: queue.send(b"x", delay=timedelta(days=366)),
        lambda queue: queue.send(b"x" * (64 * 1024 * 1024 + 1)),
        lambda queue: queue.send_all([b"x"] * 10_001),
        lambda queue: queue.send_all(NewMessage(b"x")),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused_before_anything_is_written(
    nowhere: Database, send: Callable[[Any], object]
) -> None:
    with pytest.raises(ValidationError):
        send(Queue(nowhere, "commands"))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_messages": 0},
        {"max_messages": 10_001},
        {"max_messages": True},
        {"max_messages": 1.0},
        {"visibility_timeout": 0},
        {"visibility_timeout": -1.0},
        {"visibility_timeout": math.inf},
        {"visibility_timeout": timedelta(0)},
        {"visibility_timeout": "x"},
    ],
)
def test_wrong_arguments_of_a_receive_are_refused_before_a_message_is_hidden(
    nowhere: Database, limits: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError):
        Queue(nowhere, "commands").receive(**limits)


def test_a_server_that_is_not_there_is_named_without_its_password(nowhere: Database) -> None:
    with pytest.raises(DatabaseUnavailableError) as raised:
        Queue(nowhere, "commands").send(b"x")
    assert "127.0.0.1" in raised.value.message
    assert "secret" not in raised.value.message


def test_a_receiver_that_ctrl_c_interrupts_keeps_no_thread_from_waking_it(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that listens to notifications wakes all receivers, and may do so just before a subscription ends."""
    wakes: list[Callable[[], None]] = []

    def subscribe(wake: Callable[[], None]) -> Callable[[], None]:
        wakes.append(wake)
        return lambda: None

    monkeypatch.setattr(queue, "subscribe", subscribe)
    for after in count():
        goes_on = interrupted(after, partial(queue.receive, wait=0.01), module="threading.py")
        for wake in wakes:
            waking = start_thread("wake", wake)
            waking.join(PATIENCE)
            assert not waking.is_alive()
        if not goes_on:
            break
