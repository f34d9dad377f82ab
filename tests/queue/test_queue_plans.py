"""The statements of a queue find their rows through its indexes, also if they were planned on an empty table."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from eventsql_orchestration.database import Connection, Database, Queries
from eventsql_orchestration.database.binary import decode_time
from eventsql_orchestration.queue import NewMessage, Queue
from tests.plans import custom_plan, plans

QUERIES = Queries("queue", "eventsql")

VALUES = {"queue": 7, "id": 7, "receipt": 7, "delay": 0.0, "reason": "no", "unhandled": 0}

READ = "SELECT seq_scan, seq_tup_read, coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = %s"

RETURNED = """
    SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index
    WHERE indrelid = 'eventsql.queue_message'::regclass
"""
"""The entries of indexes that were read, also those that the session has not reported yet."""

BLOCKS = RETURNED.replace("tuples_returned", "blocks_fetched")
"""The pages of indexes that were read."""


@pytest.fixture
def filled(database: Database) -> Database:
    """Many queues of many messages, a tenth of them delayed."""
    fill(database)
    return database


def fill(database: Database) -> None:
    with database.connection() as connection:
        connection.execute(
            """
            INSERT INTO eventsql.queue_message
                (eql_queue, eql_key, eql_in_order, eql_body, eql_metadata, eql_visible_at)
            SELECT number %% 50, 'k' || number, number %% 2 = 0, 'x', '{}',
                   now() + make_interval(secs => CASE WHEN number %% 10 = 0 THEN 30 ELSE -number END)
            FROM generate_series(1, %s) AS number
            """,
            (20_000,),
        )
        connection.execute("VACUUM ANALYZE eventsql.queue_message")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_session_that_planned_on_an_empty_table_reads_little_of_a_full_one(
    database: Database, *, ordered: bool
) -> None:
    queue = Queue(database, "commands", ordered=ordered)
    for _ in range(12):
        queue.send(b"x", key="a")
        queue.acknowledge_all(queue.receive())
    with database.connection() as connection:
        connection.execute("VACUUM eventsql.queue_message")
    fill(database)
    queue.send_all([NewMessage(b"x", key=str(number)) for number in range(100)])
    number = queue._shards.all()[0].id()
    with database.transaction() as connection:
        take = QUERIES("take_in_order" if ordered else "take")
        values = {"queue": number, "max_messages": 10, "visibility_timeout": 30.0, "since": None}
        rows = connection.execute(take, values).fetchall()
        assert len(rows) == 10
        held = {"ids": [row[0] for row in rows], "receipts": [row[5] for row in rows]}
        assert connection.execute(QUERIES("acknowledge"), {"queue": number, **held}).fetchone() == ([],)
        scans, read, fetched = connection.execute(READ, ["queue_message"]).fetchone() or (0, 0, 0)
        assert (scans, read) == (0, 0)
        assert fetched <= 150


def test_a_sender_that_planned_on_an_empty_table_finds_the_messages_of_a_key_in_their_index(
    database: Database, session: Connection
) -> None:
    queue = Queue(database, "commands", ordered=True)
    queue.definition()
    put = "SELECT eventsql.put_messages(%s, ARRAY['x'::bytea], ARRAY['first'], alone => true)"
    number = queue._shards.all()[0].id()
    fill(database)
    session.execute("TRUNCATE eventsql.queue_message")
    session.execute("VACUUM eventsql.queue_message")
    session.execute(put, [number])
    # Without an ANALYZE, after which the session would plan again.
    queue.send_all([NewMessage(b"x", key=str(each)) for each in range(3_000)])
    with session.transaction():
        (before,) = session.execute(RETURNED).fetchone() or (None,)
        session.execute(put, [number])
        (after,) = session.execute(RETURNED).fetchone() or (None,)
    assert after - before == 1, "the last message of the key"


@pytest.mark.parametrize("received", [False, True])
def test_a_receive_reads_few_of_the_messages_in_sight_of_one_key(database: Database, *, received: bool) -> None:
    queue = Queue(database, "commands", ordered=True)
    with database.transaction() as connection:
        # A transaction of the sender's own parks none but those of one call.
        for _ in range(300):
            queue.send(b"x", key="long", connection=connection)
    if received:
        queue.release(queue.receive()[0])
        with database.connection() as connection:
            earlier = "UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 hour'"
            connection.execute(f"{earlier} WHERE eql_receives > 0".encode())
    values = {"queue": queue._shards.all()[0].id(), "max_messages": 1, "visibility_timeout": 30.0, "since": None}
    with database.connection() as connection, connection.transaction(force_rollback=True):
        (before,) = connection.execute(RETURNED).fetchone() or (0,)
        assert len(connection.execute(QUERIES("take_in_order"), values).fetchall()) == 1
        (after,) = connection.execute(RETURNED).fetchone() or (0,)
    assert after - before <= 20


@pytest.mark.parametrize("retention", [None, 60.0])
def test_an_acknowledgement_reads_its_messages_alone_though_the_table_counted_as_empty(
    database: Database, retention: float | None
) -> None:
    queue = Queue(database, "commands", retention=retention)
    messages = [NewMessage(b"x")] * 3_000
    queue.send_all(messages)
    with database.connection() as connection:
        connection.execute("DELETE FROM eventsql.queue_message")
        # Not vacuumed: dead rows fill the pages that the planner sees.
        connection.execute("ANALYZE eventsql.queue_message")
    queue.send_all(messages)
    held = queue.receive(max_messages=10)
    receipts = {"ids": [each.id for each in held], "receipts": [each.receipt for each in held]}
    with database.connection() as connection, connection.transaction(force_rollback=True):
        (before,) = connection.execute(RETURNED).fetchone() or (0,)
        values = {"queue": queue._shards.all()[0].id(), **receipts}
        assert connection.execute(QUERIES("acknowledge"), values).fetchone() == ([],)
        (after,) = connection.execute(RETURNED).fetchone() or (0,)
    assert after - before <= 40


@pytest.mark.parametrize(
    "settle", ["acknowledge('commands', %s, %s)", "release('commands', %s, %s)", "extend('commands', %s, %s, 5)"]
)
def test_settling_in_sql_reads_its_message_alone_though_the_table_counted_as_empty(
    database: Database, session: Connection, settle: str
) -> None:
    queue = Queue(database, "commands")
    queue.send_all([NewMessage(b"x")] * 3_000)
    session.execute("DELETE FROM eventsql.queue_message")
    # Not vacuumed: dead rows fill the pages that the planner sees.
    session.execute("ANALYZE eventsql.queue_message")
    with pytest.raises(psycopg.errors.NoDataFound):
        session.execute(f"SELECT eventsql.queue_{settle}".encode(), [1, 1])
    for _ in range(5):
        queue.send_all([NewMessage(b"x")] * 10_000)
    (message,) = queue.receive()
    with session.transaction(force_rollback=True):
        (before,) = session.execute(BLOCKS).fetchone() or (0,)
        session.execute(f"SELECT eventsql.queue_{settle}".encode(), [message.id, message.receipt])
        (after,) = session.execute(BLOCKS).fetchone() or (0,)
    assert after - before <= 40


def test_no_plan_of_a_table_that_counted_as_empty_reads_the_messages_of_other_keys(
    database: Database, session: Connection
) -> None:
    queue = Queue(database, "commands", ordered=True)
    number = queue._shards.all()[0].id()
    # Indexes of long keys are higher than the others. For an empty table, that decides between plans.
    other_keys = [NewMessage(b"x", key=f"{each // 2}".ljust(200, "k"), delay=3_600) for each in range(4_000)]
    queue.send_all(other_keys)
    session.execute("DELETE FROM eventsql.queue_message")
    # Not vacuumed: dead rows fill the pages that the planner sees.
    session.execute("ANALYZE eventsql.queue_message")
    read: dict[str, int] = {}

    def execute(statement: str, *values: object) -> list[tuple[object, ...]]:
        with session.transaction():
            (before,) = session.execute(RETURNED).fetchone() or (0,)
            rows = session.execute(f"SELECT * FROM eventsql.{statement}".encode(), values).fetchall()
            (after,) = session.execute(RETURNED).fetchone() or (0,)
        read[f"{len(read)} {statement}"] = int(after - before)
        return rows

    def send_receive_and_settle(key: str) -> None:
        for _ in range(3):
            execute("put_messages(%s, ARRAY['x'::bytea], ARRAY[%s], alone => true)", number, key)
        for _ in range(2):
            execute("queue_send('commands', 'x', %s)", key)
        for _ in range(5):
            (message, *_) = execute("queue_receive('commands')")
            execute("queue_release('commands', %s, %s)", message[0], message[5])
            (message, *_) = execute("queue_receive('commands')")
            assert execute("queue_receive('commands')") == []
            execute("queue_acknowledge('commands', %s, %s)", message[0], message[5])

    send_receive_and_settle("first")
    queue.send_all(other_keys)
    read.clear()
    send_receive_and_settle("second")
    assert {statement: entries for statement, entries in read.items() if entries > 60} == {}


def test_a_receive_that_parks_many_messages_of_a_key_reads_each_of_them_a_few_times(
    database: Database, session: Connection
) -> None:
    queue = Queue(database, "commands", ordered=True)
    queue.definition()
    session.execute("SELECT eventsql.queue_send('commands', 'x', 'long') FROM generate_series(1, 2000)")
    assert len(queue.receive()) == 1
    values = {"queue": queue._shards.all()[0].id(), "max_messages": 10, "visibility_timeout": 30.0, "since": None}
    with session.transaction():
        (before,) = session.execute(RETURNED).fetchone() or (0,)
        assert session.execute(QUERIES("take_in_order"), values).fetchall() == []
        (after,) = session.execute(RETURNED).fetchone() or (0,)
    assert queue.statistics().blocked == 1_999
    assert after - before <= 40_000


@pytest.mark.parametrize("ordered", [False, True])
def test_a_receive_reads_no_messages_that_were_acknowledged_while_a_snapshot_is_open(
    database: Database, session: Connection, *, ordered: bool
) -> None:
    queue = Queue(database, "commands", ordered=ordered)
    start = datetime.now(UTC) - timedelta(hours=1)
    queue.send_all([NewMessage(b"x", str(number), due=start + timedelta(seconds=number)) for number in range(2_000)])
    session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    session.execute("SELECT count(*) FROM eventsql.queue_message")
    for _ in range(15):
        queue.acknowledge_all(queue.receive(max_messages=100))
    table = queue._shards.all()[0]
    values = {"queue": table.id(), "max_messages": 100, "visibility_timeout": 30.0}
    read = "SELECT pg_stat_get_xact_tuples_returned('eventsql.queue_message_visible'::regclass)"
    entries = []
    for since in (decode_time(table._onwards), None):
        with database.connection() as connection, connection.transaction(force_rollback=True):
            # What the session has not reported yet counts too.
            (before,) = connection.execute(read).fetchone() or (0,)
            take = QUERIES("take_in_order" if ordered else "take")
            assert len(connection.execute(take, {**values, "since": since}).fetchall()) == 100
            (after,) = connection.execute(read).fetchone() or (0,)
            entries.append(after - before)
    onwards, from_start = entries
    assert from_start >= 1_500
    assert onwards <= 350


@pytest.mark.parametrize("ordered", [False, True])
def test_a_receive_that_finds_fewer_messages_than_it_may_take_looks_once(database: Database, *, ordered: bool) -> None:
    queue = Queue(database, "commands", ordered=ordered)
    queue.send(b"x", key="a")
    scans = "SELECT pg_stat_get_xact_numscans('eventsql.queue_message_visible'::regclass)"
    with database.transaction() as connection:
        (before,) = connection.execute(scans).fetchone() or (0,)
        assert len(connection.execute("SELECT FROM eventsql.queue_receive('commands', 10)").fetchall()) == 1
        (after,) = connection.execute(scans).fetchone() or (0,)
    # One for each priority.
    assert after - before == 10


@pytest.mark.parametrize("ordered", [False, True])
def test_a_receive_of_a_backlog_begins_at_its_first_message_and_one_of_new_messages_0_1_s_ago(
    database: Database, *, ordered: bool
) -> None:
    queue = Queue(database, "commands", ordered=ordered)
    table = queue._shards.all()[0]
    first = datetime.now(UTC) - timedelta(hours=1)
    queue.send(b"x", due=first)
    assert len(queue.receive()) == 1
    assert table._onwards is not None
    assert decode_time(table._onwards) == first

    # A receive that finds urgent messages alone did not look at the others.
    queue.send(b"x", priority=9)
    assert len(queue.receive()) == 1
    assert decode_time(table._onwards) == first

    queue.send(b"x")
    assert len(queue.receive()) == 1
    with database.connection() as connection:
        (now,) = connection.execute("SELECT now()").fetchone() or (None,)
    assert first < decode_time(table._onwards) <= now - timedelta(seconds=0.1)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_behind_the_last_receive_is_received_when_no_other_is_left_and_from_time_to_time(
    database: Database, session: Connection, *, ordered: bool
) -> None:
    queue = Queue(database, "commands", ordered=ordered)
    table = queue._shards.all()[0]
    queue.send_all([b"x"] * 20)
    assert len(queue.receive(max_messages=10)) == 10

    def send_late(priority: int = 0) -> int:
        """Send a message as a sender that has not committed for an hour."""
        late = queue.send(b"late", priority=priority)
        earlier = "UPDATE eventsql.queue_message SET eql_visible_at = now() - interval '1 hour' WHERE eql_id = %s"
        session.execute(earlier, [late])
        return late

    late, urgent = send_late(), send_late(priority=9)
    table._from_start_at = time.monotonic() + 3_600
    assert [message.id for message in queue.receive()] == [urgent]
    assert [message.body for message in queue.receive(max_messages=10)] == [b"x"] * 10
    assert [message.id for message in queue.receive(max_messages=10)] == [late]

    queue.send_all([b"x"] * 10)
    assert len(queue.receive(max_messages=5)) == 5
    late = send_late()
    table._from_start_at = 0.0
    assert late in {message.id for message in queue.receive(max_messages=3)}


def test_settling_a_message_touches_its_row_alone(filled: Database) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES("release"), VALUES):
            assert "Index Scan using queue_message_pkey" in plan


def test_counting_a_queue_reads_its_part_of_the_index(filled: Database) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES("statistics"), {**VALUES, "expiry": time.time()}):
            assert "Seq Scan" not in plan


@pytest.mark.parametrize(("retention", "tables"), [(None, 0), (30 * 86_400.0, 1)])
def test_counting_a_queue_looks_at_the_day_of_the_archive_that_fills_now(
    database: Database, retention: float | None, tables: int
) -> None:
    """A plan for all days takes long, and the server has room for the locks of a few thousand tables."""
    own = {"queue": Queue(database, "commands", retention=retention)._shards.all()[0].id()}
    with database.connection() as connection:
        connection.execute("SELECT eventsql.make_queue_archive(now() + make_interval(days => generate_series(0, 60)))")
        [(expiry,)] = connection.execute(QUERIES("expiry"), own).fetchall()
        plan = custom_plan(connection, QUERIES("statistics"), {**own, "expiry": expiry})
    assert tables <= len(set(re.findall(r"queue_archive_\d{8}", plan))) <= 2 * tables


def test_the_next_due_time_takes_one_step_into_the_index(filled: Database) -> None:
    with filled.connection() as connection:
        for plan in plans(connection, QUERIES("due"), VALUES):
            assert "queue_message_visible" in plan
            assert "Seq Scan" not in plan


def test_the_lag_of_queues_is_read_through_indexes_by_any_plan(filled: Database) -> None:
    Queue(filled, "commands").definition()
    with filled.connection() as connection:
        connection.execute("VACUUM ANALYZE eventsql.queue")
        for plan in plans(connection, QUERIES("lag"), {"limit": 100}):
            assert "Seq Scan on queue_message" not in plan, plan
