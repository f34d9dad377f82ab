"""The changes of a captured table are events of its topic, whatever statement makes them."""

from __future__ import annotations

import random
from typing import Any, Literal

import psycopg
import pytest

from eventsql_orchestration import Consumer, EventSQL, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.topics.partitioner import partition_of_key
from tests.capture.replay import differences, events, replayed
from tests.fixtures import Sessions


def prepare(platform: EventSQL) -> None:
    with platform.database.connection() as connection:
        connection.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text, amount numeric)")
    platform.registry.register_topic(Topic("changes", 4))
    platform.capture("orders", "changes")


pytestmark = pytest.mark.prepared.with_args(prepare, fixture="orders")


@pytest.fixture
def orders(platform: EventSQL) -> EventSQL:
    """A platform with a table `orders` that is captured to the topic `changes` of four partitions."""
    return platform


def told(session: Connection) -> list[tuple[Any, ...]]:
    """Each change: operation, key, and the statuses before and after."""

    def status(row: dict[str, Any] | None) -> Any:
        return None if row is None else row["status"]

    return [(each["op"], each["key"], status(each["before"]), status(each["after"])) for each in events(session)]


def test_each_operation_is_an_event_with_the_row_before_and_after(orders: EventSQL, session: Connection) -> None:
    session.execute("INSERT INTO orders VALUES (1, 'new', 1.50), (2, 'new', NULL)")
    session.execute("UPDATE orders SET status = 'paid' WHERE id = 1")
    session.execute("DELETE FROM orders WHERE id = 2")
    session.execute("UPDATE orders SET status = 'paid' WHERE id > 5")
    assert told(session) == [
        ("c", "1", None, "new"), ("c", "2", None, "new"), ("u", "1", "new", "paid"), ("d", "2", "new", None),
    ]  # fmt: skip
    session.execute("TRUNCATE orders")
    assert [each["partition"] for each in events(session) if each["op"] == "t"] == [0, 1, 2, 3]
    assert differences(session, "orders", "id::text") == []


def test_an_event_has_debeziums_envelope_and_the_librarys_partition(orders: EventSQL, session: Connection) -> None:
    session.execute("INSERT INTO orders VALUES (7, 'new', 1.50)")
    orders.transfer.run_once()
    (event,) = orders.reader.read("changes")
    assert (event.key, event.partition) == ("7", partition_of_key("7", 4))
    assert event.metadata == {"op": "c", "table": "public.orders"}
    (envelope,) = events(session)
    assert envelope["before"] is None
    assert envelope["after"] == {"id": 7, "status": "new", "amount": "1.50"}
    source = envelope["source"]
    assert envelope["ts_ms"] == source.pop("ts_ms")
    assert source.pop("txId") > 0
    assert source == {
        "version": "1", "connector": "eventsql", "name": "changes", "snapshot": "false",
        "db": session.info.dbname, "schema": "public", "table": "orders",
    }  # fmt: skip


def test_a_rolled_back_change_is_no_event(orders: EventSQL, sessions: Sessions, session: Connection) -> None:
    writer = sessions()
    writer.execute("INSERT INTO orders VALUES (1, 'new', 1)")
    writer.execute("SAVEPOINT before")
    writer.execute("UPDATE orders SET status = 'paid'")
    writer.execute("ROLLBACK TO before")
    writer.commit()
    writer.execute("DELETE FROM orders")
    writer.rollback()
    assert told(session) == [("c", "1", None, "new")]


@pytest.mark.parametrize("rows", [1, 100])
def test_an_update_that_changes_nothing_is_no_event(orders: EventSQL, session: Connection, rows: int) -> None:
    session.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, %s) n", [rows])
    session.execute("UPDATE orders SET status = 'new'")
    assert [op for op, *_ in told(session)] == ["c"] * rows


def test_a_changed_key_is_a_deletion_and_a_creation(orders: EventSQL, session: Connection) -> None:
    session.execute("INSERT INTO orders VALUES (1, 'one', 1), (2, 'two', 2)")
    session.execute("UPDATE orders SET id = -id WHERE id = 1")
    assert told(session)[2:] == [("d", "1", "one", None), ("c", "-1", None, "one")]


STATEMENTS = (
    "INSERT INTO orders SELECT i, 'new', i FROM generate_series({a}, {b}) i ON CONFLICT DO NOTHING",
    """INSERT INTO orders SELECT i, 'again', i FROM generate_series({a}, {b}) i
    ON CONFLICT (id) DO UPDATE SET status = orders.status || 'x'""",
    "UPDATE orders SET amount = amount + 1 WHERE id BETWEEN {a} AND {b}",
    "UPDATE orders SET id = -id WHERE id BETWEEN {a} AND {b} AND -id NOT IN (SELECT id FROM orders)",
    "UPDATE orders SET status = repeat('long', 3000) WHERE id = {a}",
    "DELETE FROM orders WHERE id BETWEEN {a} AND {b}",
    """WITH gone AS (DELETE FROM orders WHERE id BETWEEN {a} AND {b} RETURNING *)
    INSERT INTO orders SELECT id, 'moved', amount FROM gone""",
    """WITH one AS (UPDATE orders SET status = 'a' WHERE id = {a} RETURNING 1)
    UPDATE orders SET status = 'b' WHERE id = {b}""",
    "COPY orders FROM STDIN",
    "TRUNCATE orders",
)


@pytest.mark.parametrize("seed", range(3))
def test_the_changes_add_up_to_the_table_after_every_statement(
    orders: EventSQL, session: Connection, seed: int
) -> None:
    choice = random.Random(seed)
    for number in range(60):
        statement = choice.choices(STATEMENTS, weights=[6, 6, 6, 6, 2, 4, 4, 4, 2, 1])[0]
        if statement.startswith("COPY"):
            with session.cursor().copy(statement) as copy:
                copy.write_row((1000 + number, "copied", None))
        else:
            low = choice.randint(-8, 8)
            session.execute(statement.format(a=low, b=low + choice.randint(0, 6)).encode())
        if choice.random() < 0.3:
            orders.transfer.run_once()
        assert differences(session, "orders", "id::text") == [], statement


@pytest.mark.parametrize(
    ("moment", "body"),
    [
        ("AFTER UPDATE OF amount", "UPDATE orders SET status = status || '!' WHERE id = NEW.id"),
        ("AFTER INSERT", "UPDATE orders SET status = 'numbered' WHERE id = NEW.id"),
        ("AFTER INSERT", "DELETE FROM orders WHERE id = NEW.id AND id = 2"),
        ("AFTER DELETE", "INSERT INTO orders VALUES (OLD.id, 'kept', 0)"),
        ("BEFORE INSERT", "DELETE FROM orders WHERE id = NEW.id"),
        ("BEFORE UPDATE OF amount", "UPDATE orders SET status = 'before' WHERE id = NEW.id + 1"),
    ],
)
@pytest.mark.parametrize("more", [0, 100], ids=["few", "many"])
def test_triggers_that_change_the_same_table_do_not_mislead(
    orders: EventSQL, session: Connection, moment: str, body: str, more: int
) -> None:
    others = f"SELECT n, 'other', 1 FROM generate_series(10, {10 * more}, 10) n"
    session.execute(f"INSERT INTO orders VALUES (1, 'old', 1), (3, 'old', 1) UNION ALL {others}".encode())
    session.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {body}; RETURN coalesce(NEW, OLD); END $$"
    )
    session.execute(f"CREATE TRIGGER meddle {moment} ON orders FOR EACH ROW EXECUTE FUNCTION meddle()")
    for statement in (
        f"INSERT INTO orders VALUES (2, 'new', 2), (4, 'new', 2) UNION ALL SELECT -n, 'other', 1 FROM ({others}) n (n)",
        "UPDATE orders SET amount = 3 WHERE id = 1 OR id % 10 = 0",
        "DELETE FROM orders WHERE id IN (1, 4) OR id % 10 = 0",
    ):
        session.execute(statement.encode())
        assert differences(session, "orders", "id::text") == [], statement


def test_cascades_within_the_table_and_from_others_are_captured(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE customer (id integer PRIMARY KEY)")
    session.execute(
        "CREATE TABLE orders (id integer PRIMARY KEY, parent integer REFERENCES orders ON DELETE CASCADE "
        "ON UPDATE CASCADE, customer integer REFERENCES customer ON DELETE SET NULL ON UPDATE CASCADE)"
    )
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute("INSERT INTO customer VALUES (1), (2)")
    session.execute("INSERT INTO orders VALUES (1, NULL, 1), (2, 1, 1), (3, 2, 2), (4, NULL, 2)")
    for statement in (
        "UPDATE customer SET id = 9 WHERE id = 1",
        "UPDATE orders SET id = 8 WHERE id = 1",
        "UPDATE orders SET id = 18 WHERE id = 8",
        "DELETE FROM customer WHERE id = 2",
        "DELETE FROM orders WHERE id = 18",
    ):
        session.execute(statement.encode())
        assert differences(session, "orders", "id::text") == [], statement
    assert session.execute("SELECT id FROM orders").fetchall() == [(4,)]


def test_a_row_whose_key_a_second_cascade_changes_is_captured(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE parent (a integer UNIQUE, b integer UNIQUE)")
    session.execute(
        "CREATE TABLE orders (other integer REFERENCES parent (b) ON UPDATE CASCADE, "
        "id integer PRIMARY KEY REFERENCES parent (a) ON UPDATE CASCADE)"
    )
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute("INSERT INTO parent VALUES (1, 1)")
    session.execute("INSERT INTO orders VALUES (1, 1)")
    session.execute("UPDATE parent SET a = 5, b = 5")
    assert differences(session, "orders", "id::text") == []


@pytest.mark.parametrize("rows", [1, 99, 100, 1_000])
def test_rows_that_stay_and_rows_whose_key_changes_have_their_events_in_order(
    orders: EventSQL, session: Connection, rows: int
) -> None:
    session.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, %s) n", [rows])
    session.execute("UPDATE orders SET id = CASE WHEN id % 2 = 1 THEN -id ELSE id END, status = 'moved'")
    session.execute("DELETE FROM orders")
    changes = told(session)
    assert sorted(changes[:rows]) == sorted(("c", str(n), None, "new") for n in range(1, rows + 1))
    moved = changes[rows:-rows]
    assert sorted(moved, key=str) == sorted([
        *(("d", str(n), "new", None) for n in range(1, rows + 1, 2)),
        *(("c", str(-n), None, "moved") for n in range(1, rows + 1, 2)),
        *(("u", str(n), "new", "moved") for n in range(2, rows + 1, 2)),
    ], key=str)  # fmt: skip
    if rows < 1_000:
        # Another key, such as an address, may have gone from one row to another.
        assert [op for op, *_ in moved[-((rows + 1) // 2) :]] == ["c"] * ((rows + 1) // 2)
    assert {op for op, *_ in changes[-rows:]} == {"d"}
    assert differences(session, "orders", "id::text") == []


def test_a_statement_with_few_changes_finds_its_rows_by_their_key(orders: EventSQL, session: Connection) -> None:
    orders.captures.drop("orders", "changes")
    session.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, 10000) n")
    session.execute("VACUUM ANALYZE orders")
    orders.capture("orders", "changes", snapshot=False)
    session.execute("BEGIN")
    session.execute("UPDATE orders SET status = 'paid' WHERE id = 17")
    session.execute("UPDATE orders SET id = -id WHERE id = 18")
    session.execute("UPDATE orders SET status = 'paid' WHERE id BETWEEN 101 AND 199")
    session.execute("INSERT INTO orders VALUES (10001, 'new', 1)")
    session.execute("DELETE FROM orders WHERE id = 19")
    scans = session.execute("SELECT seq_scan, idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'orders'")
    assert scans.fetchone() == (0, 4 + 1 + 1 + 1 + 99 + 1 + 1)
    session.execute("COMMIT")
    assert len(events(session)) == 1 + 2 + 99 + 1 + 1


def test_a_merge_is_captured(orders: EventSQL, session: Connection) -> None:
    if session.info.server_version < 150000:
        return
    session.execute("INSERT INTO orders VALUES (1, 'old', 1), (2, 'old', 2)")
    session.execute(
        "MERGE INTO orders o USING (VALUES (1, 'gone'), (2, 'paid'), (3, 'new'), (11, 'again')) v (id, status) "
        "ON o.id = v.id WHEN MATCHED AND v.status = 'gone' THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET status = v.status "
        "WHEN NOT MATCHED THEN INSERT VALUES (CASE v.id WHEN 11 THEN 1 ELSE v.id END, v.status, 0)"
    )
    assert differences(session, "orders", "id::text") == []
    assert session.execute("SELECT status FROM orders WHERE id = 1").fetchone() == ("again",)


def test_a_topic_that_is_repartitioned_gets_changes_in_its_new_partitions(
    orders: EventSQL, session: Connection
) -> None:
    orders.registry.register_consumer(Consumer("changes", "mirror", partitioned=True))
    session.execute("INSERT INTO orders SELECT i, 'new', i FROM generate_series(1, 20) i")
    orders.repartitioner.repartition("changes", 7)
    session.execute("UPDATE orders SET status = 'paid'")
    session.execute("TRUNCATE orders")
    changes = events(session)
    assert {each["partition"] for each in changes if each["op"] == "t"} == set(range(7))
    for each in changes:
        if each["op"] == "u":
            assert each["partition"] == partition_of_key(each["key"], 7)


def test_a_truncation_after_a_repartitioning_removes_the_rows_of_partitions_that_are_gone(
    orders: EventSQL, session: Connection
) -> None:
    session.execute("INSERT INTO orders SELECT i, 'new', i FROM generate_series(1, 20) i")
    orders.repartitioner.repartition("changes", 2)
    session.execute("TRUNCATE orders")
    session.execute("INSERT INTO orders VALUES (1, 'again', 0)")
    assert differences(session, "orders", "id::text") == []


def test_a_truncation_is_one_event_of_a_topic_without_partitions(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute("INSERT INTO orders VALUES (1)")
    session.execute("TRUNCATE orders")
    assert [(each["op"], each["partition"]) for each in events(session)] == [("c", -1), ("t", -1)]


def test_a_key_of_several_columns_is_a_json_array_of_their_texts(platform: EventSQL, session: Connection) -> None:
    session.execute('CREATE TABLE "Lines" (n smallint, "order" text, x int, PRIMARY KEY ("order", n))')
    platform.registry.register_topic(Topic("changes", 2))
    session.execute("""INSERT INTO "Lines" VALUES (1, 'a"b', 0)""")
    platform.capture('"Lines"', "changes")
    session.execute('UPDATE "Lines" SET x = 1')
    session.execute("""UPDATE "Lines" SET "order" = 'c'""")
    assert [(each["op"], each["key"]) for each in events(session)] == [
        ("r", r'["a\"b", "1"]'), ("u", r'["a\"b", "1"]'), ("d", r'["a\"b", "1"]'), ("c", '["c", "1"]'),
    ]  # fmt: skip


def test_keys_that_are_equal_and_not_the_same_text_are_two_keys(platform: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE orders (id numeric PRIMARY KEY, status text)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute("INSERT INTO orders VALUES (1.0, 'new')")
    session.execute("UPDATE orders SET id = 1.00")
    assert told(session)[1:] == [("d", "1.0", "new", None), ("c", "1.00", None, "new")]
    assert differences(session, "orders", "id::text") == []


@pytest.mark.parametrize("rows", [1, 100])
def test_a_trigger_that_changes_the_text_of_an_equal_key_does_not_mislead(
    platform: EventSQL, session: Connection, rows: int
) -> None:
    session.execute("CREATE TABLE orders (id numeric PRIMARY KEY, status text)")
    platform.registry.register_topic(Topic("changes"))
    platform.capture("orders", "changes")
    session.execute(
        "CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE orders SET id = round(NEW.id, 2) WHERE id = NEW.id; RETURN NULL; END $$"
    )
    session.execute("CREATE TRIGGER meddle AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION meddle()")
    session.execute("INSERT INTO orders SELECT round(n, 1), 'new' FROM generate_series(1, %s) n", [rows])
    assert differences(session, "orders", "id::text") == []


# Transactions of other isolation levels


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_transaction_of_a_stricter_level_is_captured(
    orders: EventSQL, sessions: Sessions, session: Connection, level: psycopg.IsolationLevel
) -> None:
    writer = sessions()
    writer.isolation_level = level
    writer.execute("INSERT INTO orders VALUES (1, 'new', 1)")
    writer.execute("UPDATE orders SET status = 'paid'")
    writer.commit()
    assert differences(session, "orders", "id::text") == []


@pytest.mark.parametrize("rows", [1, 100])
def test_a_row_that_another_transaction_deleted_since_the_snapshot_has_no_event(
    orders: EventSQL, sessions: Sessions, session: Connection, rows: int
) -> None:
    session.execute("INSERT INTO orders SELECT n, 'old', n FROM generate_series(1, %s) n", [rows])
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("SELECT FROM orders")
    session.execute("DELETE FROM orders")
    before = len(events(session))
    # The deleted rows are still visible to the writer, beside its own rows of the same keys.
    writer.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, %s) n", [rows])
    writer.execute("SAVEPOINT later")
    writer.execute("UPDATE orders SET status = 'paid' WHERE status = 'new'")
    writer.commit()
    changes = told(session)[before:]
    assert sorted(changes, key=str) == sorted(
        [("c", str(n), None, "new") for n in range(1, rows + 1)]
        + [("u", str(n), "new", "paid") for n in range(1, rows + 1)],
        key=str,
    )


@pytest.mark.parametrize("rows", [1, 100])
def test_a_row_that_a_younger_transaction_wrote_before_the_snapshot_and_another_deleted_since_has_no_event(
    orders: EventSQL, sessions: Sessions, session: Connection, rows: int
) -> None:
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    session.execute("CREATE TABLE turns ()")
    # The lock gives the writer its number before its first query takes the snapshot.
    writer.execute("LOCK TABLE turns")
    session.execute("INSERT INTO orders SELECT n, 'old', n FROM generate_series(1, %s) n", [rows])
    writer.execute("SELECT FROM orders")
    session.execute("DELETE FROM orders")
    before = len(events(session))
    writer.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, %s) n", [rows])
    writer.commit()
    assert sorted(told(session)[before:], key=str) == sorted(
        [("c", str(n), None, "new") for n in range(1, rows + 1)], key=str
    )


@pytest.mark.parametrize("columns", ["name", "name, part"])
def test_a_key_that_is_too_long_for_an_event_is_its_hash(platform: EventSQL, session: Connection, columns: str) -> None:
    session.execute(f"CREATE TABLE files (name text, part int, size int, PRIMARY KEY ({columns}))".encode())
    platform.registry.register_topic(Topic("changes"))
    session.execute("INSERT INTO files VALUES (repeat('s', 70000), 1, 0)")
    platform.capture("files", "changes")
    session.execute("INSERT INTO files VALUES (repeat('x', 70000), 1, 0), ('short', 1, 0)")
    session.execute("UPDATE files SET size = 1 WHERE name <> 'short'")
    session.execute("UPDATE files SET name = repeat('y', 70000) WHERE name LIKE 'x%'")
    session.execute("DELETE FROM files WHERE name LIKE 'y%'")
    found = [event for event in events(session) if event["op"] != "r"]
    long = next(event["key"] for event in found if event["op"] == "c" and event["after"]["name"] == "x" * 70_000)
    moved = found[-1]["key"]
    assert all(len(key) == 71 and key.startswith("sha256:") for key in (long, moved))
    assert [(event["op"], event["key"]) for event in found if event["key"] in (long, moved)] == [
        ("c", long), ("u", long), ("d", long), ("c", moved), ("d", moved),
    ]  # fmt: skip
    assert len({event["key"] for event in events(session)}) == 4
    assert platform.transfer.run_once() == {"changes": len(events(session))}


def test_a_transaction_that_began_before_the_capture_must_begin_anew(
    platform: EventSQL, sessions: Sessions, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text)")
    platform.registry.register_topic(Topic("changes"))
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("SELECT 1")
    platform.capture("orders", "changes")
    with pytest.raises(psycopg.errors.SerializationFailure):
        writer.execute("INSERT INTO orders VALUES (1, 'new')")
    writer.rollback()
    writer.execute("INSERT INTO orders VALUES (1, 'new')")
    writer.commit()
    assert differences(session, "orders", "id::text") == []


@pytest.mark.parametrize(
    ("change", "write"),
    [
        ("ADD COLUMN note text", "UPDATE orders SET note = 'urgent'"),
        ("DROP COLUMN amount", "UPDATE orders SET status = 'paid'"),
        ("RENAME COLUMN amount TO total", "UPDATE orders SET status = 'paid'"),
        ("RENAME COLUMN id TO number", "UPDATE orders SET status = 'paid'"),
    ],
)
def test_a_transaction_with_an_older_definition_of_the_table_must_begin_anew(
    orders: EventSQL, sessions: Sessions, session: Connection, change: str, write: str
) -> None:
    session.execute("INSERT INTO orders VALUES (1, 'new', NULL)")
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("SELECT 1")
    session.execute(f"ALTER TABLE orders {change}".encode())
    with pytest.raises(psycopg.errors.SerializationFailure):
        writer.execute(write.encode())
    writer.rollback()
    writer.execute(write.encode())
    writer.commit()
    assert [*replayed(events(session)).values()] == [
        row for (row,) in session.execute("SELECT row_to_json(o) FROM orders o").fetchall()
    ]


def test_a_transaction_goes_on_after_a_change_of_the_table_that_was_rolled_back(
    orders: EventSQL, sessions: Sessions, session: Connection
) -> None:
    writer, other = sessions(), sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("SELECT 1")
    other.execute("ALTER TABLE orders ADD COLUMN note text, DROP COLUMN amount")
    other.rollback()
    writer.execute("INSERT INTO orders VALUES (1, 'new', 1)")
    writer.execute("ALTER TABLE orders ADD COLUMN note text DEFAULT 'none'")
    writer.execute("UPDATE orders SET status = 'paid'")
    writer.commit()
    assert differences(session, "orders", "id::text") == []


def test_a_transaction_with_an_older_definition_of_the_topic_must_begin_anew(
    orders: EventSQL, sessions: Sessions, session: Connection
) -> None:
    writer = sessions()
    writer.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    writer.execute("SELECT 1")
    orders.registry.register_consumer(Consumer("changes", "mirror", partitioned=True))
    session.execute("INSERT INTO orders VALUES (1, 'new', 1)")
    orders.transfer.run_once()
    orders.repartitioner.repartition("changes", 9)
    with pytest.raises(psycopg.errors.SerializationFailure):
        writer.execute("INSERT INTO orders VALUES (2, 'new', 1)")


@pytest.mark.parametrize("partitions", [-1, 1, 7, 64, 30_000])
def test_a_statement_with_many_rows_writes_the_events_of_each_to_its_partition(
    platform: EventSQL, session: Connection, partitions: int
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text, amount numeric)")
    platform.registry.register_topic(Topic("changes", partitions))
    platform.capture("orders", "changes")
    session.execute("INSERT INTO orders SELECT n, 'new', n FROM generate_series(1, 2100) n")
    session.execute("UPDATE orders SET status = 'paid' WHERE id = 17")
    session.execute("UPDATE orders SET id = CASE WHEN id > 100 THEN -id ELSE id END, status = status || '!'")
    session.execute("DELETE FROM orders WHERE id < -105")
    found = events(session)
    assert len(found) == 2_100 + 1 + (100 + 2 * 2_000) + 1_995
    assert differences(session, "orders", "id::text") == []
    wanted = [-1 if partitions < 0 else partition_of_key(each["key"], partitions) for each in found]
    assert [each["partition"] for each in found] == wanted
    assert all(each["metadata"] == {"op": each["op"], "table": "public.orders"} for each in found)
    assert [(each["op"], (each["after"] or {}).get("status")) for each in found if each["key"] == "17"] == [
        ("c", "new"), ("u", "paid"), ("u", "paid!"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("storage", "partitions", "rows"), [("blocks", 4, 8), ("blocks", 200, 1_500), ("rows", 4, 1_500)]
)
def test_many_changes_are_blocks_in_the_buffer_where_the_topic_has_blocks(
    platform: EventSQL, session: Connection, storage: Literal["blocks", "rows"], partitions: int, rows: int
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, note text)")
    platform.registry.register_topic(Topic("changes", partitions, storage=storage))
    platform.capture("orders", "changes")
    # Some 4.5 MB of values: more than a block for each partition.
    session.execute("INSERT INTO orders SELECT n, repeat('note', 700) FROM generate_series(1, 1500) n")
    assert session.execute("SELECT FROM eventsql.event_buffer").rowcount == rows
    session.execute("UPDATE orders SET note = 'short' WHERE id < 10")
    before = events(session)
    assert len(before) == 1_500 + 9
    platform.transfer.run_once()
    assert session.execute("SELECT FROM eventsql.event_buffer").rowcount == 0
    assert differences(session, "orders", "id::text") == []
    assert sorted(map(str, events(session))) == sorted(map(str, before))
    assert {event.metadata["op"] for event in platform.reader.read("changes", limit=2_000)} == {"c", "u"}


def test_many_changes_of_one_partition_are_blocks_as_large_as_those_of_publishers(
    platform: EventSQL, session: Connection
) -> None:
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, note text)")
    platform.registry.register_topic(Topic("changes", 8, storage="blocks"))
    platform.capture("orders", "changes")
    session.execute(
        "INSERT INTO orders SELECT n, CASE WHEN n < 1000 THEN repeat('note', 4000) END "
        "FROM generate_series(1, 84000) n WHERE eventsql.partition_of_key(n::text, 8) = 3"
    )
    blocks = session.execute("SELECT eql_events, pg_column_size(eql_values) FROM eventsql.event_buffer").fetchall()
    assert sum(number for number, _ in blocks) > 10_000
    assert all(number <= 10_000 and size < 1.2 * 1024 * 1024 for number, size in blocks)
    platform.transfer.run_once()
    assert differences(session, "orders", "id::text") == []
