"""Closed partitions of logs are sorted by resource, and nobody loses a line by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.rows import in_copy
from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.storage import exchanging
from eventsql_orchestration.storage.exchanging import Exchange
from eventsql_orchestration.views import LogEntry, Logs, LogsView, Sorted, Views, sorting
from tests.fixtures import Sessions, Terminate, UntilBlocked
from tests.views.conftest import DAY, MINUTE, NOON, SECOND

LOGS = Logs("tracking", language="english")
CLOSED = "view_tracking_p202411200000"
NEXT_DAY = NOON + DAY
RESOURCES = 40
"""Resources with a line for each of `TURNS`: on a page lie lines of all of them, until they are sorted."""
TURNS = 20


@pytest.fixture
def tracking(database: Database, views: Views, monkeypatch: pytest.MonkeyPatch) -> LogsView:
    """Logs whose lines of a day lie in the order in which they came."""
    monkeypatch.setattr(exchanging, "EXCHANGE_SECONDS", 0.0)
    views.declare(LOGS)
    opened = views.logs(LOGS)
    write(
        database, opened,
        *(LogEntry(f"r{number:02}", f"step {turn}", NOON + turn * MINUTE, attributes={"turn": turn})
          for turn in range(TURNS) for number in range(RESOURCES)),
    )  # fmt: skip
    return opened


def write(database: Database, logs: LogsView, *entries: LogEntry) -> None:
    with database.transaction() as connection:
        logs.write(connection, entries)


def late(number: int = 0) -> LogEntry:
    return LogEntry("r07", "late", NOON + 5 * MINUTE + number * SECOND)


def content(logs: LogsView) -> list[tuple[int, str, str, str, datetime, int]]:
    found = logs.search(limit=10_000)
    return [(each.id, each.resource, each.level, each.line, each.written_at, len(each.attributes)) for each in found]


def pages_of(database: Database, resource: str) -> int:
    """The number of pages of the closed partition that have lines of a resource."""
    query = sql.SQL("SELECT count(DISTINCT (ctid::text::point)[0]) FROM eventsql.{} WHERE eql_resource = %s").format(
        sql.Identifier(CLOSED)
    )
    with database.connection() as connection:
        row = connection.execute(query, [resource]).fetchone()
    assert row is not None
    return int(row[0])


def tables(database: Database) -> set[str]:
    with database.connection() as connection:
        return {name for (name,) in connection.execute("SELECT relname FROM pg_class WHERE relname ~ '_new'")}


def done(partitions: int = 0, busy: int = 0) -> list[Sorted]:
    return [Sorted("tracking", partitions, busy)]


def test_the_lines_of_a_resource_lie_together_and_are_all_there(
    database: Database, views: Views, tracking: LogsView
) -> None:
    before, apart = content(tracking), pages_of(database, "r07")
    assert views.sort(now=NEXT_DAY) == done(1)
    assert content(tracking) == before
    assert pages_of(database, "r07") < apart
    assert len(tracking.search(resource="r07", since=NOON, words="steps")) == TURNS
    assert views.sort(now=NEXT_DAY) == done(0)
    write(database, tracking, late())
    assert len(content(tracking)) == len(before) + 1


def test_a_partition_is_sorted_once_its_time_has_passed(views: Views, tracking: LogsView) -> None:
    midnight = NOON.replace(hour=0) + DAY
    assert views.sort(now=midnight + 59 * MINUTE) == done(0)
    views.declare(Logs("tracking", language="english", sort_after=3 * DAY))
    assert views.sort(now=midnight + 2 * DAY) == done(0)
    assert views.definition("tracking") == Logs("tracking", language="english", sort_after=3 * DAY)
    views.declare(Logs("tracking", language="english", sort_after=None))
    assert views.sort(now=midnight + 9 * DAY) == done(0)
    assert views.definition("tracking") == Logs("tracking", language="english", sort_after=None)
    views.declare(Logs("tracking", language="english"))
    assert views.sort(now=midnight + 60 * MINUTE) == done(1)


def test_a_partition_beyond_the_retention_is_left_to_it(views: Views, tracking: LogsView) -> None:
    views.declare(Logs("tracking", language="english", retention=2 * DAY))
    assert views.sort(now=NOON + 4 * DAY) == done(0)


def test_a_time_to_sort_after_is_in_minutes(views: Views) -> None:
    with pytest.raises(ValidationError):
        Logs("tracking", sort_after=timedelta(seconds=1))
    with pytest.raises(ValidationError):
        views.sort(now=NOON - timedelta(days=200_000))


def after(step: str, happens: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Let something happen each time after a step of the exchange."""
    real = getattr(Exchange, step)

    def stepped(self: Exchange, *args: Any, **names: Any) -> Any:
        result = real(self, *args, **names)
        happens()
        return result

    patch.setattr(Exchange, step, stepped)


def test_a_late_line_during_the_copy_goes_first(
    database: Database, views: Views, tracking: LogsView, until_blocked: UntilBlocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = []

    def interrupt() -> None:
        writers.append(threading.Thread(target=write, args=(database, tracking, late())))
        writers[-1].start()
        until_blocked()

    before = content(tracking)
    with monkeypatch.context() as patch:
        after("copy", interrupt, patch)
        assert views.sort(now=NEXT_DAY) == done(busy=1)
    writers[0].join()
    assert len(content(tracking)) == len(before) + 1
    assert tables(database) == set()
    assert views.sort(now=NEXT_DAY) == done(1)
    assert [each.line for each in tracking.search(resource="r07", until=NOON + 6 * MINUTE, limit=2)] == [
        "late",
        "step 5",
    ]


@pytest.mark.parametrize("part", ["a copy that takes long", "its last steps"])
def test_a_late_line_ends_a_copy(
    database: Database, views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    writer = threading.Thread(target=write, args=(database, tracking, late()))

    def slow(self: Exchange, connection: Connection, source: Connection, *_args: Any, **_names: Any) -> Any:
        writer.start()
        (connection if part == "its last steps" else source).execute("SELECT pg_sleep(600)")

    monkeypatch.setattr(Exchange, "copy", slow)
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    writer.join()
    assert len(content(tracking)) == RESOURCES * TURNS + 1


@pytest.mark.parametrize("step", ["vacuum", "is_seen_by_all", "copy"])
def test_a_second_process_leaves_a_partition_that_is_being_sorted(
    views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before, others = content(tracking), list[list[Sorted]]()

    def beside() -> None:
        monkeypatch.undo()
        others.append(views.sort(now=NEXT_DAY))

    after(step, beside, monkeypatch)
    assert views.sort(now=NEXT_DAY) == done(1)
    assert others == [done(busy=1)]
    assert sorted(content(tracking)) == sorted(before)


def test_the_steps_after_the_look_at_the_index_are_planned_as_ever(
    views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where whole tables may not be scanned, the server compiles small statements, which takes it a second."""
    copy, found = Exchange.copy, list[tuple[str] | None]()

    def copied(self: Exchange, connection: Connection, *args: Any, **names: Any) -> Any:
        found.extend(connection.execute(f"SHOW enable_{name}").fetchone() for name in ("seqscan", "bitmapscan"))
        return copy(self, connection, *args, **names)

    monkeypatch.setattr(Exchange, "copy", copied)
    assert views.sort(now=NEXT_DAY) == done(1)
    assert found == [("on",), ("on",)]


@pytest.mark.usefixtures("tracking")
def test_a_copy_outlasts_the_limit_of_a_statement(direct_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[tuple[str]]()

    def looked(reading: psycopg.Cursor, read: sql.Composed, sink: partial[None]) -> None:
        for cursor in (reading, *sink.args[:1]):
            limits.extend(cursor.connection.execute("SHOW statement_timeout").fetchall())
        in_copy(reading, read, sink)

    monkeypatch.setattr(exchanging, "in_copy", looked)
    dsn = make_url(direct_dsn).update_query_dict({"options": "-c statement_timeout=60s"})
    with Database(dsn.render_as_string(False)) as limited:
        assert Views(limited).sort(now=NEXT_DAY) == done(1)
    assert limits == [("0",), ("0",)]


def test_a_run_leaves_the_partitions_that_it_has_no_time_for(
    views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "RUN_SECONDS", 0.0)
    assert views.sort(now=NEXT_DAY) == done(0)


def test_a_line_between_the_vacuum_and_the_lock_is_not_seen_too_early(
    database: Database, views: Views, tracking: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sessions()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def come() -> None:
        old.execute("SELECT pg_current_snapshot()")
        write(database, tracking, late())

    with monkeypatch.context() as patch:
        after("vacuum", come, patch)
        assert views.sort(now=NEXT_DAY) == done(busy=1)
    count = "SELECT count(*) FROM eventsql.view_tracking"
    assert old.execute(count).fetchone() == (RESOURCES * TURNS,)
    old.rollback()
    assert views.sort(now=NEXT_DAY) == done(1)
    assert old.execute(count).fetchone() == (RESOURCES * TURNS + 1,)


def test_a_line_that_is_deleted_between_the_vacuum_and_the_lock_stays_seen(
    database: Database, views: Views, tracking: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sessions()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def delete() -> None:
        old.execute("SELECT pg_current_snapshot()")
        with database.transaction() as deleting:
            deleting.execute("DELETE FROM eventsql.view_tracking WHERE eql_resource = 'r07'")

    after("vacuum", delete, monkeypatch)
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    assert old.execute("SELECT count(*) FROM eventsql.view_tracking").fetchone() == (RESOURCES * TURNS,)


def test_a_snapshot_from_before_the_copy_sees_each_line(
    views: Views, tracking: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, copy = sessions(), Exchange.copy
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def copied(self: Exchange, *args: Any, **names: Any) -> Any:
        old.execute("SELECT pg_current_snapshot()")
        return copy(self, *args, **names)

    monkeypatch.setattr(Exchange, "copy", copied)
    assert views.sort(now=NEXT_DAY) == done(1)
    assert old.execute("SELECT count(*) FROM eventsql.view_tracking").fetchone() == (RESOURCES * TURNS,)


def test_a_snapshot_from_before_the_lines_keeps_their_partition(
    database: Database, views: Views, tracking: LogsView, sessions: Sessions
) -> None:
    old = sessions()
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    old.execute("SELECT pg_current_snapshot()")
    write(database, tracking, late())
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    assert old.execute("SELECT count(*) FROM eventsql.view_tracking").fetchone() == (RESOURCES * TURNS,)


def test_a_transaction_that_reads_the_logs_keeps_their_partition(
    views: Views, tracking: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "WAIT_SECONDS", 0.05)
    reader = sessions()
    reader.execute("SELECT count(*) FROM eventsql.view_tracking")
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    reader.rollback()
    assert views.sort(now=NEXT_DAY) == done(1)


def test_a_partition_is_left_if_others_lock_its_logs_during_the_sorting(
    views: Views, tracking: LogsView, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that sorts another partition."""
    other = sessions()

    def lock() -> None:
        other.execute("LOCK TABLE ONLY eventsql.view_tracking IN ACCESS EXCLUSIVE MODE")

    with monkeypatch.context() as patch:
        patch.setattr(exchanging, "WAIT_SECONDS", 0.05)
        after("keep_writers_away", lock, patch)
        assert views.sort(now=NEXT_DAY) == done(busy=1)
    other.rollback()
    assert views.sort(now=NEXT_DAY) == done(1)


def test_a_sorting_that_is_killed_leaves_the_partition_as_it_was(
    database: Database, views: Views, tracking: LogsView, terminate: Terminate, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, replace = content(tracking), Exchange.replace

    def die(self: Exchange, connection: Connection, **names: Any) -> None:
        replace(self, connection, **names)
        terminate(connection)
        connection.execute("SELECT")

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "replace", die)
        with pytest.raises(DatabaseError):
            views.sort(now=NEXT_DAY)
    assert content(tracking) == before
    assert tables(database) == set()
    assert views.sort(now=NEXT_DAY) == done(1)
    assert content(tracking) == before


def test_retention_waits_for_a_copy_and_sorting_passes_over_what_retention_dropped(
    database: Database, views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    views.declare(Logs("tracking", language="english", retention=DAY))
    monkeypatch.setattr("eventsql_orchestration.views.catalog.LOCK_SECONDS", 0.05)
    copy, vacuum, beside = Exchange.copy, Exchange.vacuum, []
    # Making a partition would wait for the copy.
    write(database, views.logs(LOGS), *(LogEntry("other", "ahead", NOON + days * DAY) for days in (30, 31)))

    def copied(self: Exchange, *args: Any, **names: Any) -> Any:
        beside.extend(Views(database).retain(now=NOON + 30 * DAY))
        return copy(self, *args, **names)

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "copy", copied)
        assert views.sort(now=NEXT_DAY) == done(1)
    assert [each.busy for each in beside] == [1]

    write(database, views.logs(LOGS), LogEntry("r07", "another day", NOON + DAY))

    def dropped(self: Exchange, connection: Connection) -> bool:
        Views(database).retain(now=NOON + 30 * DAY)
        return vacuum(self, connection)

    monkeypatch.setattr(Exchange, "vacuum", dropped)
    assert views.sort(now=NOON + 2 * DAY) == done(busy=1)
    assert {each[3] for each in content(tracking)} == {"ahead"}


def test_a_partition_that_is_dropped_after_its_vacuum_is_passed_over(
    database: Database, views: Views, tracking: LogsView, monkeypatch: pytest.MonkeyPatch
) -> None:
    views.declare(Logs("tracking", language="english", retention=DAY))
    write(database, tracking, LogEntry("r07", "another day", NOON + 2 * DAY))
    after("vacuum", lambda: Views(database).retain(now=NOON + 3 * DAY), monkeypatch)
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    assert {each[3] for each in content(tracking)} == {"another day"}


def test_a_partition_whose_rights_and_owner_stay_and_one_with_a_trigger_is_left(
    views: Views, tracking: LogsView, session: Connection
) -> None:
    session.execute(f"CREATE ROLE reader_of_{id(session)}")
    session.execute(f"GRANT SELECT ON eventsql.{CLOSED} TO reader_of_{id(session)}")
    described = "SELECT relowner, relacl::text FROM pg_class WHERE relname = %s"
    before = session.execute(described, [CLOSED]).fetchone()
    session.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA eventsql GRANT DELETE ON TABLES TO PUBLIC")
    session.execute("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    session.execute(f"CREATE TRIGGER mine AFTER INSERT ON eventsql.{CLOSED} EXECUTE FUNCTION nothing()")
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    session.execute(f"DROP TRIGGER mine ON eventsql.{CLOSED}")
    assert views.sort(now=NEXT_DAY) == done(1)
    assert session.execute(described, [CLOSED]).fetchone() == before


def test_a_partition_that_may_be_replicated_is_left(views: Views, tracking: LogsView, session: Connection) -> None:
    session.execute("CREATE PUBLICATION every_table FOR ALL TABLES")
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    session.execute("DROP PUBLICATION every_table")
    assert views.sort(now=NEXT_DAY) == done(1)


def test_a_partition_with_a_view_on_it_is_left(views: Views, tracking: LogsView, session: Connection) -> None:
    session.execute(f"CREATE VIEW mine AS SELECT * FROM eventsql.{CLOSED}")
    assert views.sort(now=NEXT_DAY) == done(busy=1)
    session.execute("DROP VIEW mine")
    assert views.sort(now=NEXT_DAY) == done(1)


def test_the_formats_of_the_session_do_not_change_the_bounds(
    database: Database, views: Views, tracking: LogsView, session: Connection
) -> None:
    bounds = "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE relname = %s"
    before = session.execute(bounds, [CLOSED]).fetchone()
    session.execute(f"ALTER DATABASE {session.info.dbname} SET datestyle TO 'SQL, DMY'")
    session.execute(f"ALTER DATABASE {session.info.dbname} SET timezone TO 'Asia/Kolkata'")
    with Database(database.dsn) as other:
        assert Views(other).sort(now=NEXT_DAY) == done(1)
    assert session.execute(bounds, [CLOSED]).fetchone() == before
