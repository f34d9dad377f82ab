"""A sender only sends messages, a worker only works them off, a reader sees how many wait: also past the library."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import psycopg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.monitoring.queues import read_queues
from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.errors import PermissionDeniedError
from eventsql_orchestration.queue import Message, NewMessage, Queue, list_queues
from eventsql_orchestration.queue.lag import queue_lags
from tests.fixtures import Until
from tests.roles.conftest import As, Login
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def queues(owner: EventSQL) -> dict[str, Queue]:
    """Queues as their owner made them: one with dead letters and an archive, and one in order."""
    made = {
        "pictures": Queue(owner, "pictures", max_receives=1, retention=3_600.0),
        "letters": Queue(owner, "letters", ordered=True),
    }
    for queue in made.values():
        queue.definition()
    return made


def _take(message: Message, connection: Connection) -> None:
    """Nothing to do."""


def test_a_sender_sends_and_a_worker_works_off(queues: dict[str, Queue], as_: As, until: Until) -> None:
    sender, worker = as_("sender"), as_("worker")
    sent = Queue(sender, "pictures").send_all(
        [NewMessage(b"1", deduplication_id="a"), NewMessage(b"2", deduplication_id="a"), NewMessage(b"3", priority=9)]
    )
    assert sent[0] == sent[1]
    Queue(sender, "pictures").send(b"4", delay=600.0)
    ordered = Queue(sender, "letters").send_all([NewMessage(b"%d" % n, key="k") for n in range(3)])

    # It acknowledges into the archive, buries what was received too often, and brings the next of a key into sight.
    mine = Queue(worker, "pictures")
    first, second = mine.receive(max_messages=2)
    mine.extend(first, 600.0)
    mine.acknowledge(first)
    mine.release(second, reason="not now")
    assert mine.receive() == []
    found = queues["pictures"].statistics()
    assert (found.dead, found.delayed, len(queues["pictures"].archived())) == (1, 1, 1)

    in_order = Queue(worker, "letters")
    (failed,) = in_order.receive()
    assert in_order.release_failed(failed, delay=0.0, reason="no") is None
    with in_order.work(_take) as workers:
        until(lambda: workers.handled == len(ordered))


@pytest.mark.parametrize("ordered", [False, True])
def test_messages_that_change_between_a_receiver_s_look_and_its_lock_are_received_as_they_are_then(
    owner: EventSQL, direct_dsn: str, as_: As, *, ordered: bool
) -> None:
    sender = Queue(owner, "commands", ordered=ordered)
    first, moved, hidden, gone, last = sender.send_all([NewMessage(b"", key=str(number)) for number in range(5)])
    receiver = Queue(as_("worker"), "commands")
    with (
        psycopg.connect(direct_dsn, autocommit=True) as session,
        psycopg.connect(direct_dsn) as gate,
        ThreadPoolExecutor(1) as pool,
    ):
        # A policy is asked for each message: it holds the receiver at the first one, behind its snapshot.
        session.execute(
            """
            CREATE FUNCTION public.pass(message bigint) RETURNS boolean LANGUAGE plpgsql AS $$
            BEGIN
                IF message = 1 THEN PERFORM pg_advisory_xact_lock_shared(1); END IF;
                RETURN true;
            END $$;
            ALTER TABLE eventsql.queue_message ENABLE ROW LEVEL SECURITY;
            CREATE POLICY held ON eventsql.queue_message USING (public.pass(eql_id));
            """
        )
        assert first == 1
        gate.execute("SELECT pg_advisory_xact_lock(1)")
        receiving = pool.submit(receiver.receive, max_messages=10)
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
        wait_until(lambda: session.execute(waiting).rowcount)
        # Both have another place in the table then.
        change = "UPDATE eventsql.queue_message SET eql_visible_at = eql_visible_at + %s WHERE eql_id = %s"
        session.execute(change, [timedelta(0), moved])
        session.execute(change, [timedelta(hours=1), hidden])
        session.execute("DELETE FROM eventsql.queue_message WHERE eql_id = %s", [gone])
        gate.commit()
        received = receiving.result(PATIENCE)
    assert [(message.id, message.receives) for message in received] == [(first, 1), (moved, 1), (last, 1)]
    assert receiver.receive(max_messages=10) == []


def test_a_message_that_a_sender_sends_behind_another_of_its_key_waits_out_of_sight(
    queues: dict[str, Queue], as_: As
) -> None:
    letters = Queue(as_("sender"), "letters")
    for body in (b"1", b"2", b"3"):
        letters.send(body, key="k")
    found = queues["letters"].statistics()
    assert (found.visible, found.blocked) == (1, 2)


@pytest.mark.parametrize(
    ("time", "shown"),
    [("-infinity", "0001-01-02"), ("0001-01-01 00:00+00 BC", "0001-01-02"), ("20000-01-01 00:00+00", "9999-12-31")],
)
def test_a_message_with_a_time_of_a_worker_s_own_stops_nobody_s_view_of_the_queues(
    queues: dict[str, Queue], login: Login, as_: As, time: str, shown: str
) -> None:
    changed, other = queues["pictures"].send_all([b"changed", b"other"])
    with psycopg.connect(login("worker"), autocommit=True) as worker:
        worker.execute("UPDATE eventsql.queue_message SET eql_visible_at = %s WHERE eql_id = %s", [time, changed])
    state, visible = ("delayed", 1) if shown == "9999-12-31" else ("visible", 2)
    pictures = Queue(as_("worker"), "pictures")
    found = pictures.statistics()
    assert (found.visible, found.delayed) == (visible, 2 - visible)
    assert found.waiting is not None
    (lag,) = (each for each in queue_lags(as_("reader").database) if each.queue == "pictures")
    assert lag.visible == visible
    waiting = Queries("queue", "eventsql")("waiting")
    ((messages, seconds),) = query_all(as_("reader").database, waiting, {"name": "pictures", "limit": 9})
    assert messages == visible
    # Since version 17, the server subtracts infinite times.
    assert all(map(math.isfinite, (found.waiting, lag.seconds, seconds)))
    peeked = {message.id: message for message in pictures.peek()}
    assert (peeked[changed].state, peeked[other].state) == (state, "visible")
    assert peeked[changed].visible_at == datetime.fromisoformat(f"{shown}T00:00+00:00")


@pytest.mark.parametrize(("time", "shown"), [("-infinity", "0001-01-02"), ("infinity", "9999-12-31")])
def test_an_archived_message_with_times_of_a_worker_s_own_stops_nobody_s_view_of_the_archive(
    queues: dict[str, Queue], login: Login, time: str, shown: str
) -> None:
    queue = queues["pictures"]
    queue.send(b"x")
    queue.acknowledge(queue.receive()[0])
    with psycopg.connect(login("worker"), autocommit=True) as worker:
        worker.execute(
            "INSERT INTO eventsql.queue_archive (eql_queue, eql_id, eql_priority, eql_body, eql_metadata, "
            "eql_created_at, eql_receives, eql_acknowledged_at, eql_expires_at) "
            "SELECT eql_id, 7, 0, 'y', '{}', %(time)s, 1, %(time)s, now() + interval '1 hour' "
            "FROM eventsql.queue WHERE eql_name = 'pictures'",
            {"time": time},
        )
    found = {message.body: (message.sent_at, message.acknowledged_at) for message in queue.archived()}
    assert found.keys() == {b"x", b"y"}
    assert set(found[b"y"]) == {datetime.fromisoformat(f"{shown}T00:00+00:00")}


@pytest.mark.parametrize("role", ["worker", "reader"])
def test_who_may_count_messages_sees_the_rates_of_a_queue(queues: dict[str, Queue], as_: As, role: str) -> None:
    queues["pictures"].send_all([b"x", b"y"])
    queues["pictures"].acknowledge(queues["pictures"].receive()[0])
    found = Queue(as_(role), "pictures").statistics()
    assert (found.visible, found.sent_per_second, found.acknowledged_per_second) == (1, 2 / 60, 1 / 60)


def test_a_sender_and_a_worker_in_sql(queues: dict[str, Queue], login: Login) -> None:
    with psycopg.connect(login("sender"), autocommit=True) as sender:
        sender.execute("SELECT eventsql.queue_send('pictures', 'x'), eventsql.queue_send('letters', 'y', 'k')")
    with psycopg.connect(login("worker"), autocommit=True) as worker:
        for queue in queues:
            row = worker.execute("SELECT id, receipt FROM eventsql.queue_receive(%s)", [queue]).fetchone()
            assert row is not None
            worker.execute("SELECT eventsql.queue_acknowledge(%s, %s, %s)", [queue, *row])


def test_a_reader_sees_how_many_messages_wait_and_others_do_not(queues: dict[str, Queue], as_: As) -> None:
    queues["pictures"].send_all([b"1", b"2"])
    found = {lag.queue: lag.visible for lag in queue_lags(as_("reader").database)}
    assert found["pictures"] == 2
    assert queue_lags(as_("sender").database) == []
    assert queue_lags(as_("reader_orders").database) == []


@pytest.mark.parametrize("role", ["sender", "worker", "reader"])
def test_only_the_admin_deletes_a_queue(queues: dict[str, Queue], as_: As, role: str) -> None:
    with pytest.raises(PermissionDeniedError, match="only the admin may do this"):
        Queue(as_(role), "letters").delete(force=True)
    Queue(as_("admin"), "letters").delete()
    assert [each.name for each in list_queues(as_("admin").database)] == ["pictures", "pictures_dead"]


def test_only_the_admin_erases_messages_of_a_key(queues: dict[str, Queue], as_: As) -> None:
    queues["pictures"].send(b"1", key="a")
    for role in ("sender", "worker", "reader"):
        with pytest.raises(PermissionDeniedError, match="only the admin may do this"):
            Queue(as_(role), "pictures").erase(["a"])
    assert Queue(as_("admin"), "pictures").erase(["a"]).messages == 1


def test_only_the_admin_reads_the_archive(queues: dict[str, Queue], as_: As) -> None:
    queues["pictures"].send(b"1")
    queues["pictures"].acknowledge_all(queues["pictures"].receive())
    for role in ("sender", "worker", "reader"):
        with pytest.raises(PermissionDeniedError, match="only the admin may do this"):
            Queue(as_(role), "pictures").archived()
    assert len(Queue(as_("admin"), "pictures").archived()) == 1


def test_dagster_does_not_take_missing_rights_for_a_missing_queue(queues: dict[str, Queue], as_: As) -> None:
    assert read_queues(as_("reader"), ["pictures"])["pictures"].lags
    with pytest.raises(PermissionDeniedError):
        read_queues(as_("sender"), ["pictures"])


SENDER = (
    "SELECT eql_body FROM eventsql.queue_message",
    "SELECT eql_key FROM eventsql.queue_message",
    "SELECT count(*) FROM eventsql.queue_message WHERE eql_queue = 1",
    "SELECT * FROM eventsql.queue_receive('pictures')",
    "SELECT * FROM eventsql.take_messages(1, 1, 1)",
    "INSERT INTO eventsql.queue_message (eql_queue, eql_body, eql_metadata, eql_receives) VALUES (1, 'x', '{}', 9)",
    "INSERT INTO eventsql.queue_message (eql_queue, eql_body, eql_metadata, eql_origin) VALUES (1, 'x', '{}', 1)",
    "INSERT INTO eventsql.queue_message (eql_queue, eql_body, eql_metadata) VALUES (1, 'x', '{}')",
    (
        "INSERT INTO eventsql.queue_message (eql_id, eql_queue, eql_body, eql_metadata) "
        "OVERRIDING SYSTEM VALUE VALUES (9, 1, 'x', '{}')"
    ),
    (
        "INSERT INTO eventsql.queue_message (eql_queue, eql_key, eql_body, eql_metadata, eql_in_order, eql_visible_at) "
        "VALUES (2, 'k', 'x', '{}', true, 'infinity')"
    ),
    "SELECT setval('eventsql.queue_message_eql_id_seq', 1)",
    "SELECT nextval('eventsql.queue_message_eql_id_seq')",
    "SELECT eventsql.lock_last_of_keys(2, '{k}')",
    "SELECT * FROM eventsql.queue_deduplication",
    "INSERT INTO eventsql.queue_deduplication VALUES (1, 'order 7', 1, 'infinity')",
    "UPDATE eventsql.queue_deduplication SET eql_expires_at = 'infinity'",
    "DELETE FROM eventsql.queue_deduplication",
    "SELECT * FROM eventsql.queue_archive",
)
WORKER = (
    "SELECT eventsql.queue_send('pictures', 'x')",
    "INSERT INTO eventsql.queue_message (eql_queue, eql_body, eql_metadata) VALUES (1, 'x', '{}')",
    "SELECT * FROM eventsql.queue_archive",
    "SELECT * FROM eventsql.queue_deduplication",
)
READER = (
    "SELECT eql_body FROM eventsql.queue_message",
    "SELECT eql_key FROM eventsql.queue_message",
    "SELECT eql_metadata FROM eventsql.queue_message",
    "SELECT eql_history FROM eventsql.queue_message",
    "SELECT eventsql.queue_send('pictures', 'x')",
    "SELECT * FROM eventsql.queue_receive('pictures')",
    "SELECT * FROM eventsql.queue_archive",
)
NOBODY = (
    "INSERT INTO eventsql.queue (eql_name) VALUES ('mine')",
    "UPDATE eventsql.queue SET eql_max_receives = 1",
    "DELETE FROM eventsql.queue",
    "UPDATE eventsql.queue_message SET eql_body = 'x'",
    "UPDATE eventsql.queue_message SET eql_key = 'x'",
    "TRUNCATE eventsql.queue_message",
    "DELETE FROM eventsql.queue_archive",
    "INSERT INTO eventsql.event_buffer (eql_topic, eql_partition, eql_value) VALUES ('orders', 0, 'x')",
    "SELECT * FROM eventsql.orders_event",
)


@pytest.fixture
def connections(queues: dict[str, Queue], login: Login) -> Iterator[dict[str, Connection]]:
    """A connection as each role, to a database with a message."""
    queues["pictures"].send(b"x")
    roles = ("sender", "worker", "reader", "publisher", "consumer")
    opened = {role: psycopg.connect(login(role), autocommit=True) for role in roles}
    yield opened
    for connection in opened.values():
        connection.close()


def test_each_role_is_refused_what_is_not_its_work(connections: dict[str, Connection]) -> None:
    refused = {
        "sender": (*SENDER, *NOBODY, "UPDATE eventsql.queue_message SET eql_visible_at = now()",
                   "DELETE FROM eventsql.queue_message"),
        "worker": (*WORKER, *NOBODY),
        "reader": (*READER, *NOBODY[:-1], "DELETE FROM eventsql.queue_message"),
        "publisher": (*SENDER, *WORKER, *NOBODY[:7], "SELECT * FROM eventsql.queue"),
        "consumer": (*SENDER, *WORKER, *NOBODY[:7], "SELECT * FROM eventsql.queue"),
    }  # fmt: skip
    for role, statements in refused.items():
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connections[role].execute(statement)
                pytest.fail(f"{role} may: {statement}")


@pytest.mark.parametrize("queue", ["pictures", "letters"])
def test_a_sender_sends_no_message_that_nobody_could_receive(
    queues: dict[str, Queue], login: Login, as_: As, queue: str
) -> None:
    with psycopg.connect(login("sender"), autocommit=True) as sender:
        for bodies, values in (
            *(("'{a,b}'", each) for each in (
                "dues => '{infinity}'", "dues => '{-infinity}'", "dues => ARRAY[now(), '10000-01-01Z']",
                "delays => '{0, 1e12}'", "delays => '{-1}'", "priorities => '{10}'", "priorities => '{0, -1}'",
            )),
            ("'{a,NULL}'", "priorities => NULL"), ("'{a}'", "deduplication_ids => ARRAY[repeat('i', 1025)]"),
            ("ARRAY[convert_to(repeat('x', 67108865), 'UTF8')]", "alone => true"),
            *(("'{a,b}'", f"metadata => ARRAY['{{}}', '{each}']") for each in (
                "[]", "null", '{"n": 1}', '{"n": "1", "n": "2"}',
            )),
        ):  # fmt: skip
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                sender.execute(
                    "SELECT eventsql.put_messages((SELECT eql_id FROM eventsql.queue WHERE eql_name = %s), "
                    f"{bodies}, '{{k,k}}', {values})".encode(), [queue],
                )  # fmt: skip
                pytest.fail(f"{bodies[:20]}, {values}")
        assert queues[queue].statistics().depth == 0
        sender.execute("SELECT eventsql.queue_send(%s, 'x', 'k')", [queue])
    assert len(Queue(as_("worker"), queue).receive()) == 1


def test_a_sender_that_leaves_its_transaction_open_holds_up_an_acknowledgement_until_it_ends(
    queues: dict[str, Queue], login: Login
) -> None:
    queues["letters"].send(b"1", key="k")
    with (
        psycopg.connect(login("sender")) as sender,
        psycopg.connect(login("worker"), autocommit=True, options="-c lock_timeout=50ms") as worker,
    ):
        sender.execute(
            "SELECT eventsql.put_messages(eql_id, '{2}', '{k}', alone => true) FROM eventsql.queue "
            "WHERE eql_name = 'letters'"
        )
        receive = "SELECT id, receipt, body FROM eventsql.queue_receive('letters', 10)"
        (*first, body), *others = worker.execute(receive).fetchall()
        acknowledge = "SELECT eventsql.queue_acknowledge('letters', %s, %s)"
        with pytest.raises(psycopg.errors.LockNotAvailable):
            worker.execute(acknowledge, first)
        sender.commit()
        worker.execute(acknowledge, first)
        following = [body for *_, body in worker.execute(receive)]
    assert (body, others, following) == (b"1", [], [b"2"])


def test_the_error_names_the_role_that_may(queues: dict[str, Queue], as_: As) -> None:
    with pytest.raises(PermissionDeniedError) as refused:
        Queue(as_("worker"), "pictures").send(b"x")
    assert "_sender" in str(refused.value)
    queues["pictures"].send(b"x")
    with pytest.raises(PermissionDeniedError) as refused:
        Queue(as_("sender"), "pictures").receive()
    assert "_worker" in str(refused.value)
    with pytest.raises(PermissionDeniedError) as refused:
        Queue(as_("sender"), "mine").send(b"x")
    assert "_admin" in str(refused.value)
