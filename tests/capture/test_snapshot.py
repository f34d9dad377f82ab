"""The first snapshot joins the changes: at every moment, the events of a row give the row as it stands."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psycopg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.capture import captures
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, EventSQLError
from tests.capture.replay import differences, events, replayed
from tests.fixtures import Sessions, Until, UntilBlocked

ROWS = 500


@pytest.fixture
def table(platform: EventSQL, session: Connection, monkeypatch: pytest.MonkeyPatch) -> EventSQL:
    """A platform with a table of many rows, and snapshots of small pages."""
    monkeypatch.setattr(captures, "PAGE_ROWS", 16)
    session.execute("CREATE TABLE orders (id integer PRIMARY KEY, status text)")
    session.execute("INSERT INTO orders SELECT i, 'old' FROM generate_series(1, %s) i", [ROWS])
    platform.registry.register_topic(Topic("changes", 3))
    return platform


def test_a_snapshot_reads_every_row_once(table: EventSQL, session: Connection) -> None:
    seen: list[int] = []
    capture = table.captures.create("orders", "changes", on_rows=seen.append)
    assert (capture.snapshot, capture.snapshot_rows) == ("done", ROWS)
    assert seen[-1] == ROWS
    changes = events(session)
    assert [each["key"] for each in changes] == [str(number) for number in range(1, ROWS + 1)]
    assert {(each["op"], each["source"]["snapshot"]) for each in changes} == {("r", "true")}
    assert differences(session, "orders", "id::text") == []


def test_a_snapshot_reads_every_row_of_a_key_of_several_columns_once(table: EventSQL, session: Connection) -> None:
    session.execute("CREATE TABLE lines (n integer, shop text, PRIMARY KEY (shop, n))")
    session.execute("INSERT INTO lines SELECT n % 20, 'shop ' || n / 20 FROM generate_series(0, 99) n")
    assert table.capture("lines", "changes").snapshot_rows == 100
    keys = [each["key"] for each in events(session)]
    assert len(keys) == len(set(keys)) == 100


def test_a_capture_without_a_snapshot_has_the_changes_alone(table: EventSQL, session: Connection) -> None:
    assert table.capture("orders", "changes", snapshot=False).snapshot == "none"
    session.execute("DELETE FROM orders WHERE id = 1")
    assert [(each["op"], each["key"]) for each in events(session)] == [("d", "1")]
    assert table.capture("orders", "changes").snapshot_rows == ROWS - 1
    assert differences(session, "orders", "id::text") == []


def test_an_empty_table_has_an_empty_snapshot(table: EventSQL, session: Connection) -> None:
    session.execute("DELETE FROM orders")
    assert table.capture("orders", "changes").snapshot_rows == 0


def test_the_same_call_goes_on_with_a_snapshot_that_ended_early(table: EventSQL, session: Connection) -> None:
    def stop(rows: int) -> None:
        if rows >= 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.captures.create("orders", "changes", on_rows=stop)
    session.execute("UPDATE orders SET status = 'new' WHERE id IN (1, 400)")
    session.execute("DELETE FROM orders WHERE id IN (2, 401)")
    assert table.captures.list()[0].snapshot == "running"
    assert table.capture("orders", "changes").snapshot == "done"
    keys = [each["key"] for each in events(session) if each["op"] == "r"]
    assert len(keys) == len(set(keys)) == ROWS - 1
    assert differences(session, "orders", "id::text") == []
    assert table.capture("orders", "changes").snapshot_rows == ROWS - 1


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("before", ["integer", "text"])
def test_a_snapshot_whose_key_changes_its_order_reads_every_row(
    table: EventSQL, session: Connection, before: str, interrupted: bool
) -> None:
    session.execute(f"ALTER TABLE orders ALTER id TYPE {before}")

    def change(rows: int) -> None:
        if rows == 48:
            session.execute('ALTER TABLE orders ALTER id TYPE text COLLATE "C"')
            if interrupted:
                raise KeyboardInterrupt

    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            table.captures.create("orders", "changes", on_rows=change)
        capture = table.captures.create("orders", "changes")
    else:
        capture = table.captures.create("orders", "changes", on_rows=change)
    assert (capture.snapshot, capture.snapshot_rows) == ("done", ROWS)
    # With the page that found out.
    assert len(events(session)) == 48 + 16 + ROWS
    assert differences(session, "orders", "id::text") == []


def test_a_snapshot_reads_the_rows_that_a_new_order_of_the_key_puts_before_those_it_has_read(
    table: EventSQL, session: Connection
) -> None:
    session.execute("DELETE FROM orders WHERE id IN (97, 98, 99)")

    def change(rows: int) -> None:
        if rows == 96:
            # As texts, all of the keys from 100 on come before 96.
            session.execute('ALTER TABLE orders ALTER id TYPE text COLLATE "C"')

    capture = table.captures.create("orders", "changes", on_rows=change)
    assert (capture.snapshot, capture.snapshot_rows) == ("done", ROWS - 3)
    assert differences(session, "orders", "id::text") == []


def test_a_row_that_another_transaction_holds_is_read_after_it(
    table: EventSQL, sessions: Sessions, session: Connection, until_blocked: UntilBlocked
) -> None:
    writer = sessions()
    # Deadlocks would end the writer: it takes a row behind the one that the snapshot waits for.
    table.capture("orders", "changes", snapshot=False)
    table.captures.drop("orders", "changes")
    thread = threading.Thread(target=table.capture, args=("orders", "changes"))
    writer.execute("SELECT FROM orders WHERE id = 33 FOR UPDATE")
    thread.start()
    until_blocked()
    writer.execute("UPDATE orders SET status = 'new' WHERE id = 34")
    writer.execute("DELETE FROM orders WHERE id = 33")
    writer.commit()
    thread.join(60)
    assert not thread.is_alive()
    assert differences(session, "orders", "id::text") == []


def test_a_transaction_that_does_not_end_stops_the_snapshot_and_the_next_call_goes_on(
    table: EventSQL, sessions: Sessions, session: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "RETRY_SECONDS", 0.2)
    table.capture("orders", "changes", snapshot=False)
    table.captures.drop("orders", "changes")
    stuck = sessions()

    def hold(rows: int) -> None:
        if rows == 16:
            stuck.execute("UPDATE orders SET status = 'held' WHERE id = 100")

    with pytest.raises(DatabaseBusyError):
        table.captures.create("orders", "changes", on_rows=hold)
    stuck.rollback()
    assert table.captures.list()[0].snapshot_rows == 99
    table.capture("orders", "changes")
    assert differences(session, "orders", "id::text") == []


def writing(dsn: str, seed: int, stop: threading.Event, failures: list[BaseException]) -> Callable[[], None]:
    """Changes random rows until `stop`, in transactions of several statements that may roll back."""

    def write() -> None:
        choice = random.Random(seed)
        with psycopg.connect(dsn) as connection:
            while not stop.is_set():
                try:
                    for _ in range(choice.randint(1, 3)):
                        low = choice.randint(1, ROWS + 50)
                        connection.execute(
                            choice.choice(
                                (
                                    "UPDATE orders SET status = status || 'x' WHERE id BETWEEN %(a)s AND %(a)s + 3",
                                    "DELETE FROM orders WHERE id = %(a)s",
                                    "INSERT INTO orders VALUES (%(a)s) ON CONFLICT (id) DO UPDATE SET status = 'yet'",
                                    """UPDATE orders SET id = %(b)s WHERE id = %(a)s
                                    AND NOT EXISTS (SELECT FROM orders WHERE id = %(b)s)""",
                                )
                            ),
                            {"a": low, "b": choice.randint(1, ROWS + 50)},
                        )
                    (connection.commit if choice.random() < 0.8 else connection.rollback)()
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    # Of two of these writers.
                    connection.rollback()
                except BaseException as error:
                    failures.append(error)
                    raise

    return write


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 30))])
def test_rows_are_told_as_they_stand_at_every_moment_while_writers_go_on_and_snapshots_are_killed(
    table: EventSQL, direct_dsn: str, session: Connection, until: Until, seed: int
) -> None:
    stop, failures = threading.Event(), list[BaseException]()
    writers = [threading.Thread(target=writing(direct_dsn, seed * 10 + number, stop, failures)) for number in range(3)]
    for each in writers:
        each.start()
    ended = threading.Event()

    def snapshot() -> None:
        while not ended.is_set():
            try:
                table.capture("orders", "changes")
                ended.set()
            except EventSQLError:
                continue

    choice = random.Random(seed)
    reader = threading.Thread(target=snapshot)
    reader.start()
    looked = 0
    try:
        until(table.captures.list)
        while not ended.is_set() or looked < 5:
            if choice.random() < 0.3:
                # The session that reads pages dies.
                session.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND query LIKE '%capture_page%' AND pid <> pg_backend_pid()"
                )
            if choice.random() < 0.5:
                table.transfer.run_once()
            assert all(row.endswith("not told") for row in differences(session, "orders", "id::text"))
            looked += 1
            assert not failures
    finally:
        stop.set()
        ended_in_time = ended.wait(60)
        ended.set()
        for each in (*writers, reader):
            each.join(60)
    assert ended_in_time
    assert not failures
    assert differences(session, "orders", "id::text") == []
    assert replayed(events(session))
