"""Views are declared once, change within limits, and lose whole partitions to their retention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.database import Connection, Database
from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.database.rows import fetch_one
from eventsql_orchestration.errors import InvalidNameError, ValidationError, ViewConflictError, ViewNotFoundError
from eventsql_orchestration.views import (
    Definition,
    LogEntry,
    Logs,
    Measure,
    Retained,
    Rollup,
    RollupEntry,
    Timeline,
    Views,
)
from eventsql_orchestration.views.definitions import start_of
from tests.fixtures import Sessions, UntilBlocked
from tests.views.conftest import DAY, MINUTE, NOON

ALL: tuple[Definition, ...] = (
    Timeline("parcels", retention=90 * DAY),
    Rollup("moves", timedelta(hours=1), ("place",), ("weight",)),
    Logs("tracking", language="english", retention=30 * DAY),
)


def partitions(database: Database, view: str) -> list[str]:
    with database.connection() as connection:
        rows = connection.execute(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = %s::regclass AND c.relkind = 'r' ORDER BY 1",
            [f"eventsql.view_{view}"],
        )
        return [str(name) for (name,) in rows]


def test_a_declaration_makes_each_view_once(views: Views) -> None:
    assert views.declare(*ALL) == ["parcels", "moves", "tracking"]
    assert views.declare(*ALL) == []
    assert sorted(views.definitions(), key=lambda view: view.name) == sorted(ALL, key=lambda view: view.name)
    assert views.open("moves").definition == ALL[1]


def test_processes_that_declare_at_once_make_each_view_once(database: Database) -> None:
    changed: list[list[str]] = []

    def declare() -> None:
        changed.append(Views(database).declare(*ALL))

    threads = [threading.Thread(target=declare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, changed)) == [0, 0, 0, 3]


def test_a_retention_a_value_and_a_language_may_be_added(database: Database, views: Views) -> None:
    views.declare(Rollup("moves", MINUTE), Logs("tracking"))
    with database.transaction() as connection:
        views.rollup(Rollup("moves", MINUTE)).add(connection, [RollupEntry(NOON)])
    wider = Rollup("moves", MINUTE, values=("weight",), retention=None)
    assert views.declare(wider, Logs("tracking", language="simple", retention=DAY)) == ["moves", "tracking"]
    (older,) = views.rollup(wider).read()
    assert (older.count, older.values["weight"]) == (1, Measure(Decimal(0), None, None))
    with database.transaction() as connection:
        views.rollup(wider).add(connection, [RollupEntry(NOON, values={"weight": 7})])
        views.rollup(wider).add(connection, [RollupEntry(NOON + MINUTE, values={"weight": 2})], slot=3)
    first, second = views.rollup(wider).read()
    assert (first.count, first.values["weight"]) == (2, Measure(Decimal(7), Decimal(7), Decimal(7)))
    assert (second.count, second.values["weight"].min) == (1, Decimal(2))


def test_another_retention_of_logs_with_a_language_builds_no_second_index(database: Database, views: Views) -> None:
    def indexes() -> list[str]:
        with database.connection() as connection:
            found = connection.execute("SELECT indexname FROM pg_indexes WHERE tablename = 'view_tracking' ORDER BY 1")
            return [name for (name,) in found]

    views.declare(Logs("tracking", language="english"))
    before = indexes()
    assert views.declare(Logs("tracking", language="english", retention=DAY)) == ["tracking"]
    assert indexes() == before


def test_an_index_of_dimensions_may_be_added_and_not_taken_away(database: Database, views: Views) -> None:
    plain = Rollup("moves", MINUTE, ("place", "task"))
    indexed = Rollup("moves", MINUTE, ("place", "task"), indexed=("task",))
    views.declare(plain)
    with database.transaction() as connection:
        views.rollup(plain).add(connection, [RollupEntry(NOON, {"place": "Lodz", "task": "7"})])
    assert [views.declare(indexed), views.declare(indexed)] == [["moves"], []]
    assert views.definition("moves") == indexed
    with database.connection() as connection:
        found = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'view_moves_p%' ORDER BY 1")
        assert sum("(eql_tenant, task, eql_bucket)" in definition for (definition,) in found) == 3
    with pytest.raises(ViewConflictError):
        views.declare(plain)
    with pytest.raises(ValidationError):
        Rollup("moves", MINUTE, ("place",), indexed=("weight",))


def test_the_servers_clock_says_what_a_retention_keeps(
    database: Database, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, lines, steps = (
        Rollup("counts", MINUTE, retention=DAY),
        Logs("lines", retention=DAY),
        Timeline("steps", retention=DAY),
    )
    views.declare(counts, lines, steps)
    with database.connection() as connection:
        (now,) = fetch_one(connection, SQL("SELECT clock_timestamp()"))

    class Ahead(datetime):
        """The clock of a client that is ahead by two days."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now + 2 * DAY

    for module in ("rollups", "logs", "timelines", "view_table"):
        monkeypatch.setattr(f"eventsql_orchestration.views.{module}.datetime", Ahead)
    times = (now, now - DAY)
    with database.transaction() as connection:
        assert views.rollup(counts).add(connection, map(RollupEntry, times)) == 1
        assert views.logs(lines).write(connection, [LogEntry("1", "line", time) for time in times]) == 1
        assert views.timeline(steps).append(connection, [("1", {}, time) for time in times]) == 1


def test_overdue_partitions_are_counted_with_one_connection(database: Database, views: Views) -> None:
    views.declare(Timeline("steps", retention=DAY))
    with database.transaction() as connection:
        connection.execute(
            "SELECT eventsql.make_view_periods('steps', ARRAY[%s]::timestamptz[])",
            [start_of(Timeline("steps"), NOON - 365 * DAY)],
        )
    with Database(database.dsn, pool_size=1, max_overflow=0) as narrow:
        narrow.engine.pool._timeout = 0.0  # type: ignore[attr-defined]  # a second connection fails at once
        assert Views(narrow).overdue() == {"steps": 1}


@pytest.mark.parametrize(
    "other",
    [
        Timeline("moves"),
        Rollup("moves", timedelta(minutes=2), ("place",), ("weight", "price")),
        Rollup("moves", MINUTE, (), ("weight", "price")),
        Rollup("moves", MINUTE, ("place",), ("weight",)),
        Rollup("moves", MINUTE, ("place",), ("price", "weight")),
        Rollup("moves", MINUTE, ("place",), ("weight", "price"), period=DAY),
    ],
    ids=["kind", "grain", "dimensions", "values", "order of values", "period"],
)
def test_another_form_is_refused_and_changes_nothing(views: Views, other: Definition) -> None:
    held = Rollup("moves", MINUTE, ("place",), ("weight", "price"))
    views.declare(held)
    with pytest.raises(ViewConflictError, match="moves"):
        views.declare(Timeline("new"), other)
    assert views.definitions() == [held]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Timeline("Parcels"), lambda: Timeline(""), lambda: Timeline("p" * 41), lambda: Timeline("orders_event"),
        lambda: Timeline("orders_segment_3"), lambda: Timeline("a_p202601010000"), lambda: Timeline('a"; DROP'),
        lambda: Timeline("a", period=timedelta(seconds=90 * 60 + 1)), lambda: Timeline("a", period=MINUTE),
        lambda: Timeline("a", retention=timedelta(0)), lambda: Rollup("a", timedelta(minutes=7)),
        lambda: Rollup("a", MINUTE, ("x", "x")), lambda: Rollup("a", MINUTE, "place"),  # type: ignore[arg-type]
        lambda: Rollup("a", MINUTE, ("eql tenant",)), lambda: Rollup("a", MINUTE, ("eql_tenant",)),
        lambda: Rollup("a", MINUTE, ("sum_x",), ("x",)), lambda: Logs("a", language="english'); --"),
    ],
)  # fmt: skip
def test_an_impossible_definition_is_refused_before_anything_is_made(make: Callable[[], Definition]) -> None:
    with pytest.raises((InvalidNameError, ValidationError)):
        make()


def test_a_view_may_be_named_after_events(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("view_step")).register_topic(Topic("view_metric", storage="rows"))
    views = Views(platform.database)
    named = (Timeline("step_events"), Rollup("metric_events", MINUTE), Logs("blocks_read"))
    assert views.declare(*named) == ["step_events", "metric_events", "blocks_read"]
    assert set(views.definitions()) == set(named)


def test_a_language_that_the_server_lacks_is_named_and_makes_nothing(views: Views) -> None:
    with pytest.raises(ValidationError, match="klingon"):
        views.declare(Logs("runs", language="klingon"))
    assert views.definitions() == []


def test_a_dropped_view_is_gone(database: Database, views: Views) -> None:
    views.declare(*ALL)
    views.drop("parcels")
    with pytest.raises(ViewNotFoundError):
        views.open("parcels")
    with pytest.raises(ViewNotFoundError):
        views.drop("parcels")
    assert views.declare(*ALL) == ["parcels"]


def fill(database: Database, views: Views, *ages: timedelta) -> Timeline:
    """A timeline of days with an entry of each age, and a retention that it gets afterwards."""
    everything = Timeline("parcels", period=DAY)
    views.declare(everything)
    now = datetime.now(UTC)
    with database.transaction() as connection:
        views.timeline(everything).append(connection, [("1", {"age": age.days}, now - age) for age in ages])
    kept = Timeline("parcels", period=DAY, retention=10 * DAY)
    views.declare(kept)
    return kept


def test_retention_drops_the_partitions_whose_entries_are_all_too_old(database: Database, views: Views) -> None:
    kept = fill(database, views, 30 * DAY, 20 * DAY, 9 * DAY, 0 * DAY)
    assert views.retain() == [Retained("parcels", dropped=2, busy=0)]
    assert [entry.data["age"] for entry in views.timeline(kept).read("1")] == [9, 0]
    assert views.retain() == [Retained("parcels", dropped=0, busy=0)]


def test_the_partition_after_the_current_one_is_made_ahead(database: Database, views: Views) -> None:
    fill(database, views)
    before = partitions(database, "parcels")
    views.retain(now=datetime.now(UTC) + DAY)
    assert len(partitions(database, "parcels")) == len(before) + 1


def test_a_partition_that_a_transaction_reads_stays_for_the_next_run(
    database: Database, views: Views, sessions: Sessions
) -> None:
    fill(database, views, 30 * DAY, 0 * DAY)
    reader = sessions()
    reader.execute("SELECT FROM eventsql.view_parcels")
    assert views.retain() == [Retained("parcels", dropped=0, busy=1)]
    reader.rollback()
    assert views.retain() == [Retained("parcels", dropped=1, busy=0)]


def test_a_view_in_use_is_waited_for_once_whatever_the_number_of_partitions(
    database: Database, views: Views, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database, views, 40 * DAY, 30 * DAY, 20 * DAY, 0 * DAY)
    tried: list[str] = []
    drop = Views._drop_partition

    def noted(self: Views, connection: Connection, partition: str) -> bool:
        tried.append(partition)
        return drop(self, connection, partition)

    monkeypatch.setattr(Views, "_drop_partition", noted)
    sessions().execute("SELECT FROM eventsql.view_parcels")
    assert views.retain() == [Retained("parcels", dropped=0, busy=3)]
    assert len(tried) == 1


def test_retention_passes_over_a_view_that_is_dropped_meanwhile(
    database: Database, views: Views, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = fill(database, views, 0 * DAY)
    monkeypatch.setattr(Views, "definitions", lambda self: [Timeline("gone", retention=DAY), kept])
    assert views.retain() == [Retained("parcels", dropped=0, busy=0)]


def test_retention_leaves_partitions_of_others_alone(database: Database, views: Views) -> None:
    fill(database, views, 30 * DAY)
    with database.connection() as connection:
        connection.execute("CREATE TABLE eventsql.view_parcels_rest PARTITION OF eventsql.view_parcels DEFAULT")
    assert views.retain() == [Retained("parcels", dropped=1, busy=0)]


def test_a_name_that_another_table_has_is_refused(views: Views) -> None:
    with pytest.raises(ViewConflictError, match="view_definition"):
        views.declare(Timeline("definition"))
    assert views.definitions() == []


@pytest.mark.parametrize(
    "other", [Timeline("moves"), Rollup("moves", MINUTE, period=DAY), Rollup("moves", MINUTE, ("x",))]
)
def test_a_handle_of_another_form_than_the_view_is_refused(database: Database, views: Views, other: Definition) -> None:
    views.declare(Rollup("moves", MINUTE))
    with database.transaction() as connection, pytest.raises(ViewConflictError, match="moves"):
        if isinstance(other, Timeline):
            views.timeline(other).append(connection, [("1", {}, NOON)])
        elif isinstance(other, Rollup):
            views.rollup(other).add(connection, [RollupEntry(NOON, dict.fromkeys(other.dimensions, ""))])


def test_the_bounds_of_a_partition_do_not_depend_on_the_formats_of_the_session(
    database: Database, views: Views, sessions: Sessions
) -> None:
    views.declare(Timeline("parcels", period=DAY))
    session = sessions()
    # Servers before 18 read the abbreviation that this shows, IST, as another zone's.
    session.execute("SET datestyle TO 'SQL, DMY'")
    session.execute("SET timezone TO 'Asia/Kolkata'")
    session.execute("SELECT eventsql.make_view_periods('parcels', ARRAY['2024-11-20 00:00+00'::timestamptz])")
    session.commit()
    with database.connection() as connection:
        connection.execute("SET timezone TO 'UTC'")
        bounds = connection.execute(
            "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE relname = 'view_parcels_p202411200000'"
        ).fetchone()
    assert bounds == ("FOR VALUES FROM ('2024-11-20 00:00:00+00') TO ('2024-11-21 00:00:00+00')",)


def test_times_at_the_ends_of_the_calendar_are_stored_or_refused(database: Database, views: Views) -> None:
    timeline = Timeline("parcels")
    views.declare(timeline)
    for at in (datetime(1, 2, 1, tzinfo=UTC), datetime(1969, 12, 31, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        with database.transaction() as connection:
            views.timeline(timeline).append(connection, [("1", {}, at)])
    with database.transaction() as connection, pytest.raises(ValidationError, match="year 1"):
        views.timeline(timeline).append(connection, [("1", {}, datetime.min.replace(tzinfo=UTC))])
    assert len(views.timeline(timeline).read("1")) == 3
    assert views.retain() == []


def test_a_time_that_is_far_from_the_servers_is_refused(views: Views) -> None:
    views.declare(Timeline("steps", retention=DAY))
    for now in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        with pytest.raises(ValidationError):
            views.retain(now=now)
    for by, shown in ((timedelta(days=40_000), "40,000 d"), (-DAY, "-1 d")):
        with pytest.raises(ValidationError, match=f" {shown}$"):
            views.overdue(by=by)


def test_transactions_that_need_the_same_new_partition_make_it_once(
    database: Database, views: Views, sessions: Sessions, until_blocked: UntilBlocked
) -> None:
    orders = Timeline("orders")
    views.declare(orders)
    first, second = sessions(), sessions()
    timeline = views.timeline(orders)
    timeline.append(first, [("1", {"number": 1}, NOON)])

    def append() -> None:
        timeline.append(second, [("2", {"number": 2}, NOON)])
        second.commit()

    other = threading.Thread(target=append)
    other.start()
    until_blocked()
    first.commit()
    other.join()
    assert len(partitions(database, "orders")) == 3
    assert [len(timeline.read(resource)) for resource in "12"] == [1, 1]


def test_entries_of_too_many_periods_in_one_call_are_refused(database: Database, views: Views) -> None:
    views.declare(Timeline("orders", period=DAY))
    timeline = views.timeline(Timeline("orders", period=DAY))
    entries: list[tuple[str, dict[str, Any], datetime]] = [("1", {}, NOON + number * DAY) for number in range(101)]
    with database.transaction() as connection, pytest.raises(ValidationError, match="101 periods"):
        timeline.append(connection, entries)


@pytest.mark.parametrize(
    ("view", "starts"),
    [
        ("parcels", "ARRAY[timestamptz '2024-11-20 12:00:01+00']"),
        ("parcels", "ARRAY[NULL::timestamptz]"),
        ("parcels", "ARRAY['infinity'::timestamptz]"),
        ("parcels", "ARRAY['10000-01-01 00:00+00'::timestamptz]"),
        ("parcels", "ARRAY['0044-03-15 00:00+00 BC'::timestamptz]"),
        ("parcels", "array_fill('2024-11-20 00:00+00'::timestamptz, ARRAY[101])"),
        ("pg_class", "ARRAY['2024-11-20 00:00+00'::timestamptz]"),
        ("parcels; DROP TABLE x", "ARRAY['2024-11-20 00:00+00'::timestamptz]"),
    ],
)
def test_the_function_of_the_database_makes_nothing_but_partitions_of_views(
    database: Database, views: Views, view: str, starts: str
) -> None:
    views.declare(Timeline("parcels", period=DAY))
    before = partitions(database, "parcels")
    with database.connection() as connection, pytest.raises(psycopg.Error):
        connection.execute(f"SELECT eventsql.make_view_periods(%s, {starts})".encode(), [view])
    assert partitions(database, "parcels") == before


@pytest.mark.parametrize("number", [0, 1])
def test_a_connection_to_another_database_is_refused_whether_or_not_there_are_entries(
    views: Views, server: EmbeddedPostgres, number: int
) -> None:
    parcels, moves, tracking = Timeline("parcels"), Rollup("moves", timedelta(hours=1)), Logs("tracking")
    views.declare(parcels, moves, tracking)
    with psycopg.connect(server.start().dsn) as elsewhere:
        writers: tuple[Callable[[], int], ...] = (
            lambda: views.timeline(parcels).append(elsewhere, [("parcel", {}, NOON)] * number),
            lambda: views.rollup(moves).add(elsewhere, [RollupEntry(NOON)] * number),
            lambda: views.logs(tracking).write(elsewhere, [LogEntry("parcel", "line", NOON)] * number),
        )
        for write in writers:
            with pytest.raises(ValidationError):
                write()
