"""`eventsql.queue_send`, `queue_receive` and the rest do in SQL what the library's queue does: in psql, in Java."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.types.json import Json

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import MessageNotFoundError
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.queue.queue_table import ORDERED_KEY_BYTES
from tests.fixtures import Sessions, UntilBlocked
from tests.refusals import check_refused
from tests.shard_keys import shard_of_key

if TYPE_CHECKING:
    from tests.languages.conftest import Psql
    from tests.shards.conftest import Databases

RECEIVE = "SELECT id, body, key, metadata, receives, receipt, priority, sent_at FROM eventsql.queue_receive"


@pytest.fixture
def queue(platform: EventSQL) -> Queue:
    queue = Queue(platform, "commands", max_receives=2)
    queue.definition()
    return queue


def one(connection: Connection, statement: str, *values: object) -> Any:
    row = connection.execute(statement.encode(), values).fetchone()
    assert row is not None
    return row[0]


def test_a_message_of_either_side_is_the_same_for_the_other(queue: Queue, session: Connection) -> None:
    metadata = {"é": "☃"}
    queue.send(b"\x00\xff", key="clé", metadata=metadata, priority=3)
    one(
        session, "SELECT eventsql.queue_send('commands', %s, %s, %s, priority => 3)", b"\x00\xff", "clé", Json(metadata)
    )
    rows = session.execute(f"{RECEIVE}('commands')".encode()).fetchall()
    (message,) = queue.receive()
    (row,) = rows
    assert row[1:5] == (message.body, message.key, message.metadata, message.receives)
    assert row[6] == message.priority == 3

    queue.acknowledge(message)
    session.execute("SELECT eventsql.queue_acknowledge('commands', %s, %s)", [row[0], row[5]])
    assert queue.statistics().depth == 0


def test_many_messages_keep_their_order_and_are_acknowledged_together(queue: Queue, session: Connection) -> None:
    ids = one(session, "SELECT eventsql.queue_send_all('commands', %s)", [b"%d" % number for number in range(300)])
    assert one(session, "SELECT eventsql.queue_send_all('commands', '{}')") == []
    received = session.execute(f"{RECEIVE}('commands', 1000)".encode()).fetchall()
    assert [(row[0], row[1]) for row in received] == [(id_, b"%d" % number) for number, id_ in enumerate(ids)]
    receipts = [row[5] for row in received]

    with pytest.raises(psycopg.errors.NoDataFound):
        session.execute("SELECT eventsql.queue_acknowledge_all('commands', %s, %s)", [ids, [*receipts[:-1], 9]])
    assert queue.statistics().in_flight == 300
    session.execute("SELECT eventsql.queue_acknowledge_all('commands', %s, %s)", [ids, receipts])
    assert queue.statistics().depth == 0


def test_the_most_urgent_messages_come_first(queue: Queue, session: Connection) -> None:
    queue.send_all([NewMessage(b"%d" % number, priority=number) for number in (0, 5, 9, 1)])
    received = session.execute(f"{RECEIVE}('commands', 4)".encode()).fetchall()
    assert [row[1] for row in received] == [b"9", b"5", b"1", b"0"]


def test_an_old_receipt_settles_nothing(queue: Queue, session: Connection) -> None:
    queue.send(b"")
    (early,) = queue.receive()
    session.execute("SELECT eventsql.queue_release('commands', %s, %s, 0, 'no time')", [early.id, early.receipt])
    (id_, *_, receipt, _, _) = session.execute(f"{RECEIVE}('commands')".encode()).fetchall()[0]
    assert (id_, receipt) == (early.id, early.receipt + 1)
    with pytest.raises(MessageNotFoundError):
        queue.acknowledge(early)
    for settle in ("acknowledge('commands', %s, %s)", "release('commands', %s, %s)", "extend('commands', %s, %s, 5)"):
        with pytest.raises(psycopg.errors.NoDataFound):
            session.execute(f"SELECT eventsql.queue_{settle}".encode(), [early.id, early.receipt])
    session.execute("SELECT eventsql.queue_extend('commands', %s, %s, 600)", [id_, receipt])
    (peeked,) = queue.peek()
    assert peeked.visible_at is not None
    assert (peeked.visible_at - peeked.sent_at).total_seconds() > 500
    assert [entry["reason"] for entry in peeked.history] == ["no time"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_transaction_that_goes_on_receives_a_message_that_came_since_it_began(
    platform: EventSQL, sessions: Sessions, *, ordered: bool
) -> None:
    queue = Queue(platform, "late", ordered=ordered)
    queue.definition()
    worker = sessions()
    assert worker.execute(f"{RECEIVE}('late')".encode()).fetchall() == []
    queue.send(b"x")

    def held_for_a_minute() -> bool:
        # now() is the beginning of the transaction.
        return bool(one(worker, "SELECT eql_visible_at > now() + interval '1 minute' FROM eventsql.queue_message"))

    for _ in range(2):
        ((id_, body, _, _, _, receipt, *_),) = worker.execute(f"{RECEIVE}('late', 1, 60)".encode())
        assert (body, held_for_a_minute()) == (b"x", True)
        worker.execute("SELECT eventsql.queue_extend('late', %s, %s, 60)", [id_, receipt])
        assert held_for_a_minute()
        worker.execute("SELECT eventsql.queue_release('late', %s, %s)", [id_, receipt])


def test_a_message_for_a_queue_that_is_deleted_at_that_moment_is_refused(
    queue: Queue, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    deleting = sessions()
    # The function reads this table after it has found the queue.
    deleting.execute("LOCK TABLE eventsql.shard")
    with ThreadPoolExecutor(1) as executor:
        sending = executor.submit(session.execute, "SELECT eventsql.queue_send('commands', 'x')")
        until_blocked()
        deleting.execute("DELETE FROM eventsql.queue WHERE eql_name = 'commands'")
        deleting.commit()
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            sending.result()


def test_a_message_is_released_after_a_heartbeat_that_was_under_way(
    queue: Queue, session: Connection, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    queue.send(b"x")
    (message,) = queue.receive()
    held, beating = [message.id, message.receipt], sessions()
    beating.execute("SELECT eventsql.queue_extend('commands', %s, %s, 60)", held)
    with ThreadPoolExecutor(1) as executor:
        releasing = executor.submit(session.execute, "SELECT eventsql.queue_release('commands', %s, %s)", held)
        until_blocked()
        beating.commit()
        releasing.result()
    assert queue.statistics().visible == 1


def test_a_message_whose_receives_are_spent_becomes_a_dead_letter(queue: Queue, session: Connection) -> None:
    one(session, "SELECT eventsql.queue_send('commands', 'x')")
    for _ in range(2):
        (row,) = session.execute(f"{RECEIVE}('commands')".encode()).fetchall()
        session.execute("SELECT eventsql.queue_release('commands', %s, %s)", [row[0], row[5]])
    assert session.execute(f"{RECEIVE}('commands')".encode()).fetchall() == []
    assert queue.statistics().dead == 1


def test_messages_of_a_key_are_received_one_after_another(platform: EventSQL, session: Connection) -> None:
    queue = Queue(platform, "ordered", ordered=True)
    queue.definition()
    one(session, "SELECT eventsql.queue_send_all('ordered', %s, %s)", [b"1", b"2", b"3"], ["a", "a", "b"])
    first = session.execute(f"{RECEIVE}('ordered', 10000)".encode()).fetchall()
    assert [(row[1], row[2]) for row in first] == [(b"1", "a"), (b"3", "b")]
    with session.transaction():
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState), session.transaction():
            session.execute("SELECT eventsql.queue_acknowledge('ordered', %s, %s)", [first[0][0], first[0][5]])
    session.execute("SELECT eventsql.queue_acknowledge('ordered', %s, %s)", [first[0][0], first[0][5]])
    assert [message.body for message in queue.receive(max_messages=10)] == [b"2"]


def test_an_old_snapshot_receives_no_message_of_a_key_beside_an_earlier_one(
    platform: EventSQL, session: Connection, sessions: Sessions
) -> None:
    queue = Queue(platform, "ordered", ordered=True)
    queue.definition()
    late, old = sessions(), sessions()
    late.execute("SELECT eventsql.queue_send('ordered', '1', 'a')")
    queue.send(b"2", key="a")
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("SELECT FROM eventsql.queue")
    late.commit()
    assert [message.body for message in queue.receive()] == [b"1"]
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        pytest.fail(str(old.execute(f"{RECEIVE}('ordered')".encode()).fetchall()))


def test_an_id_is_sent_once_in_the_window(queue: Queue, session: Connection) -> None:
    send = "SELECT eventsql.queue_send('commands', 'x', deduplication_id => 'order 7')"
    assert one(session, send) == one(session, send) == queue.send(b"x", deduplication_id="order 7")
    # An array of other bounds than those of the library's driver.
    ids = one(
        session, "SELECT eventsql.queue_send_all('commands', '{a,b}', deduplication_ids => '[5:6]={new,\"order 7\"}')"
    )
    assert ids[1] == one(session, send)
    assert len(queue.receive(max_messages=10)) == 2


REFUSED = [
    "send('absent', 'x')", "send(NULL, 'x')", "send('commands', NULL)", "send('commands', 'x', repeat('k', 65537))",
    "send('commands', convert_to(repeat('x', 67108865), 'UTF8'))",
    "send('commands', 'x', NULL, '[]')", """send('commands', 'x', NULL, '{"a": 1}')""",
    """send('commands', 'x', NULL, '{"a": "1", "a": "2"}')""",
    "send('commands', 'x', NULL, json_build_object('a', repeat('m', 16777216)))",
    "send('commands', 'x', delay => -1)", "send('commands', 'x', delay => 'NaN')",
    "send('commands', 'x', delay => 31536001)", "send('commands', 'x', priority => -1)",
    "send('commands', 'x', priority => 10)", "send('commands', 'x', deduplication_id => repeat('d', 1025))",
    "send_all('commands', NULL)", "send_all('commands', '{a,b}', '{k}')",
    "send_all('commands', '{a,b}', metadata => '{\"{}\"}')", "send_all('commands', '{a,b}', delays => '{1}')",
    "send_all('commands', '{a,b}', priorities => '{1}')", "send_all('commands', '{a,b}', deduplication_ids => '{d}')",
    "send_all('commands', array_fill('x'::bytea, ARRAY[10001]))",
    "receive('absent')", "receive('commands', 0)", "receive('commands', 10001)", "receive('commands', NULL)",
    "receive('commands', 1, 0)", "receive('commands', 1, 'NaN')", "receive('commands', 1, 31536001)",
    "acknowledge('absent', 1, 1)", "acknowledge('commands', NULL, 1)", "acknowledge('commands', 1, NULL)",
    "acknowledge_all('commands', '{1,1}', '{1,2}')", "acknowledge_all('commands', '{1,2}', '{1}')",
    "acknowledge_all('commands', NULL, NULL)",
    "release('commands', 1, 1, -1)", "release('commands', 1, 1, 31536001)",
    "extend('commands', 1, 1, 0)", "extend('commands', 1, 1, NULL)", "extend('commands', 1, 1, 31536001)",
]  # fmt: skip


def test_sql_refuses_what_the_library_refuses(queue: Queue, session: Connection) -> None:
    calls = [f"SELECT eventsql.queue_{call}" for call in REFUSED]
    check_refused(session, calls, psycopg.errors.InvalidParameterValue)
    assert queue.statistics().depth == 0


def test_a_key_that_is_too_long_for_an_ordered_queue_is_refused_as_in_the_library(
    platform: EventSQL, session: Connection
) -> None:
    queue = Queue(platform, "ordered", ordered=True)
    queue.definition()
    send = "SELECT eventsql.queue_send_all('ordered', %s, %s, deduplication_ids => %s)"
    too_long = secrets.token_hex(1_500)
    with pytest.raises(psycopg.errors.InvalidParameterValue) as raised:
        session.execute(send, [[b"1", b"2"], ["a", too_long], ["x", None]])
    assert f" {ORDERED_KEY_BYTES} bytes" in str(raised.value.diag.message_hint)
    assert queue.statistics().depth == 0
    compressible = "k" * 10_000
    session.execute(send, [[b"3", b"4"], [compressible, secrets.token_hex(ORDERED_KEY_BYTES // 2)], ["x", None]])
    assert [message.body for message in queue.receive(max_messages=9)] == [b"3", b"4"]


def test_a_rolled_back_transaction_sends_and_acknowledges_nothing(queue: Queue, sessions: Sessions) -> None:
    queue.send(b"stays")
    (message,) = queue.receive()
    caller = sessions()
    caller.autocommit = False
    caller.execute("SELECT eventsql.queue_send('commands', 'x')")
    caller.execute("SELECT eventsql.queue_acknowledge('commands', %s, %s)", [message.id, message.receipt])
    caller.rollback()
    assert (queue.statistics().visible, queue.statistics().in_flight) == (0, 1)


def test_a_service_with_rights_by_hand_uses_a_queue_in_a_hostile_session(
    queue: Queue, direct_dsn: str, session: Connection
) -> None:
    role = "queue_service"
    session.execute(
        f"""
        CREATE ROLE {role};
        GRANT USAGE ON SCHEMA eventsql TO {role};
        GRANT SELECT ON eventsql.queue, eventsql.shard, eventsql.shard_layout TO {role};
        GRANT SELECT, UPDATE, DELETE ON eventsql.queue_message TO {role};
        GRANT EXECUTE ON FUNCTION eventsql.put_messages TO {role};
    """.encode()
    )
    try:
        with psycopg.connect(direct_dsn, autocommit=True) as service:
            service.execute(f"SET ROLE {role}".encode())
            service.execute("CREATE TEMP TABLE queue (eql_name text); CREATE TEMP TABLE queue_message (eql_id bigint)")
            one(service, "SELECT eventsql.queue_send('commands', 'x', deduplication_id => 'once')")
            (row,) = service.execute(f"{RECEIVE}('commands')".encode()).fetchall()
            service.execute("SELECT eventsql.queue_acknowledge('commands', %s, %s)", [row[0], row[5]])
    finally:
        session.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())
    assert queue.statistics().depth == 0


def test_a_shard_takes_its_own_keys_of_an_ordered_queue_alone(databases: Databases) -> None:
    urls = databases(2)
    with EventSQL(*urls, transfer=False) as platform:
        platform.registry.register_topic(Topic("orders", 3))
        names = [str(shard.name) for shard in platform.shards]
        Queue(platform, "ordered", ordered=True).definition()
        Queue(platform, "any").definition()
        for shard, url in zip(platform.shards, urls, strict=True):
            with psycopg.connect(url, autocommit=True) as connection:
                # An earlier layout does not count.
                connection.execute("INSERT INTO eventsql.shard_layout VALUES (0, %s)", [names[:1]])
                for key in map(str, range(10)):
                    mine = shard_of_key(key, names) == shard.name
                    try:
                        connection.execute("SELECT eventsql.queue_send('ordered', 'v', %s)", [key])
                        assert mine
                    except psycopg.errors.ObjectNotInPrerequisiteState:
                        assert not mine
                    connection.execute("SELECT eventsql.queue_send('any', 'v', %s)", [key])
                connection.execute("SELECT eventsql.queue_send('ordered', 'v')")
                # A shard whose addition is under way takes nothing.
                connection.execute("UPDATE eventsql.shard SET eql_active = false")
                for name in ("ordered", "any"):
                    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
                        connection.execute("SELECT eventsql.queue_send(%s, 'v')", [name])


# Other programs


def test_psql_sends_receives_and_acknowledges(queue: Queue, psql: Psql) -> None:
    said = psql("""
        SELECT eventsql.queue_send('commands', 'from psql') > 0;
        SELECT id, receipt FROM eventsql.queue_receive('commands') \\gset
        BEGIN;
        SELECT eventsql.queue_acknowledge('commands', :id, :receipt);
        COMMIT;
        SELECT count(*) FROM eventsql.queue_receive('commands');
    """)
    assert said.split() == ["t", "0"]
    assert queue.statistics().depth == 0


def test_javas_driver_works_a_queue_off(queue: Queue, jdbc: Any, session: Connection) -> None:
    session.execute("CREATE TABLE charged (id text PRIMARY KEY)")
    queue.send_all([b"%d" % number for number in range(20)])
    receive = jdbc.prepareStatement("SELECT id, receipt, body FROM eventsql.queue_receive('commands', 3)")
    charge = jdbc.prepareStatement("INSERT INTO charged VALUES (convert_from(?, 'UTF8'))")
    acknowledge = jdbc.prepareStatement("SELECT eventsql.queue_acknowledge('commands', ?, ?)")
    while True:
        messages = receive.executeQuery()
        received = []
        while messages.next():
            received.append((messages.getLong("id"), messages.getInt("receipt"), messages.getBytes("body")))
        jdbc.commit()
        if not received:
            break
        for id_, receipt, body in received:
            charge.setBytes(1, body)
            charge.execute()
            acknowledge.setLong(1, id_)
            acknowledge.setInt(2, receipt)
            acknowledge.execute()
            jdbc.commit()
    assert session.execute("SELECT count(*), max(id::int) FROM charged").fetchone() == (20, 19)
    assert queue.statistics().depth == 0
