"""A timeline tells what happened to a resource, in the order in which it was appended."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
import sqlalchemy

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import InvalidNameError, ValidationError, ViewNotFoundError
from eventsql_orchestration.views import Timeline, TimelineEntry, TimelineView, Views
from tests.plans import custom_plan
from tests.views.conftest import DAY, MINUTE, NOON

ORDERS = Timeline("orders")


@pytest.fixture
def orders(views: Views) -> TimelineView:
    views.declare(ORDERS)
    return views.timeline(ORDERS)


def append(database: Database, timeline: TimelineView, *entries: tuple[str, dict[str, Any], datetime]) -> None:
    with database.transaction() as connection:
        assert timeline.append(connection, iter(entries)) == len(entries)


def numbers(timeline: TimelineView, resource: str = "1", **bounds: Any) -> list[int]:
    return [entry.data["number"] for entry in timeline.read(resource, **bounds)]


def test_a_resource_is_read_in_the_order_of_its_entries_whatever_their_times(
    database: Database, orders: TimelineView
) -> None:
    append(
        database, orders,
        ("1", {"status": "placed"}, NOON),
        ("2", {"status": "placed"}, NOON),
        ("1", {"status": "accepted"}, NOON + 400 * DAY),
    )  # fmt: skip
    append(database, orders, ("1", {"status": "reported late"}, NOON - 90 * DAY))
    entries = orders.read("1")
    assert [(entry.data["status"], entry.occurred_at) for entry in entries] == [
        ("placed", NOON), ("accepted", NOON + 400 * DAY), ("reported late", NOON - 90 * DAY),
    ]  # fmt: skip
    assert entries[0] == TimelineEntry(entries[0].id, "1", {"status": "placed"}, NOON)


def test_many_entries_are_appended_in_their_order(database: Database, orders: TimelineView) -> None:
    append(database, orders, *((str(number % 3), {"number": number}, NOON) for number in range(3_000)))
    append(database, orders)
    assert numbers(orders) == list(range(1, 3_000, 3))


def test_a_tenant_has_entries_of_its_own(database: Database, orders: TimelineView) -> None:
    with database.transaction() as connection:
        for tenant in ("acme", "globex"):
            orders.append(connection, [("1", {"of": tenant}, NOON)], tenant=tenant)
    assert [entry.data["of"] for entry in orders.read("1", tenant="globex")] == ["globex"]
    assert orders.read("1") == []


def test_entries_of_many_tenants_are_appended_in_one_call(database: Database, orders: TimelineView) -> None:
    entries = [("1", {"number": number}, NOON) for number in range(6)]
    with database.transaction() as connection:
        assert orders.append(connection, iter(entries), tenant=["acme", "globex", "acme", "", "globex", "acme"]) == 6
    found = {tenant: numbers(orders, tenant=tenant) for tenant in ("acme", "globex", "")}
    assert found == {"acme": [0, 2, 5], "globex": [1, 4], "": [3]}


@pytest.mark.parametrize(
    ("tenants", "error"),
    [
        (["acme"], ValidationError),
        (["acme"] * 3, ValidationError),
        (["acme", "a\nb"], InvalidNameError),
        ("a\nb", InvalidNameError),
    ],
)
def test_tenants_that_do_not_fit_the_entries_are_refused_before_anything_is_written(
    database: Database, orders: TimelineView, tenants: str | list[str], error: type[Exception]
) -> None:
    with database.transaction() as connection, pytest.raises(error):
        orders.append(connection, [("1", {}, NOON)] * 2, tenant=tenants)
    assert orders.read("1", tenant="acme") == []


def test_the_newest_entries_are_read_page_by_page(database: Database, orders: TimelineView) -> None:
    append(database, orders, *(("1", {"number": number}, NOON + number * 40 * DAY) for number in range(5)))
    append(database, orders, ("2", {"number": 9}, NOON))
    pages: list[list[int]] = []
    before: int | None = None
    while page := orders.read_newest("1", before=before, limit=2):
        pages.append([entry.data["number"] for entry in page])
        before = page[-1].id
    assert pages == [[4, 3], [2, 1], [0]]
    assert orders.read_newest("1", tenant="acme") == []


def test_a_reader_goes_on_after_the_entry_that_it_saw_last(database: Database, orders: TimelineView) -> None:
    append(database, orders, *(("1", {"number": number}, NOON + number * 40 * DAY) for number in range(5)))
    seen: list[int] = []
    last = 0
    while page := orders.read("1", after=last, limit=2):
        assert len(page) <= 2
        seen += [entry.data["number"] for entry in page]
        last = page[-1].id
    assert seen == [0, 1, 2, 3, 4]


def test_a_reader_misses_nothing_of_a_resource_whose_writers_take_turns(
    database: Database, orders: TimelineView
) -> None:
    """Others write to other resources meanwhile. The next test shows an entry that such a reader misses."""
    append(database, orders, ("first", {}, NOON))
    with psycopg.connect(database.dsn) as elsewhere:
        orders.append(elsewhere, [("other", {"number": 0}, NOON)])
        seen: list[int] = []
        last = 0
        for number in range(3):
            append(database, orders, ("1", {"number": number}, NOON))
            page = orders.read("1", after=last)
            seen, last = [*seen, *(entry.data["number"] for entry in page)], page[-1].id
    assert seen == [0, 1, 2]


def test_an_entry_that_commits_late_is_missed_by_going_on_and_found_by_reading_the_whole(
    database: Database, orders: TimelineView
) -> None:
    append(database, orders, ("first", {}, NOON))
    with psycopg.connect(database.dsn) as late:
        orders.append(late, [("1", {"number": 0}, NOON)])
        append(database, orders, ("1", {"number": 1}, NOON))
        (read,) = orders.read("1")
        late.commit()
    assert orders.read("1", after=read.id) == []
    assert numbers(orders) == [0, 1]


def test_a_transaction_of_sqlalchemy_appends(database: Database, orders: TimelineView) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for number, ending in enumerate((connection.rollback, connection.commit)):
            orders.append(connection, [("1", {"number": number}, NOON)])
            ending()
    engine.dispose()
    assert numbers(orders) == [1]


def test_nothing_is_appended_without_a_connection(orders: TimelineView) -> None:
    nothing: Any = None
    with pytest.raises(ValidationError, match="connection is needed"):
        orders.append(nothing, [("1", {}, NOON)])
    assert orders.read("1") == []


def test_a_timeline_that_nobody_declared_is_named(database: Database, views: Views) -> None:
    unknown = views.timeline(Timeline("unknown"))
    with pytest.raises(ViewNotFoundError, match="unknown"):
        unknown.read("1")
    with database.transaction() as connection, pytest.raises(ViewNotFoundError, match="unknown"):
        unknown.append(connection, [("1", {}, NOON)])


def test_a_rollback_appends_nothing_and_the_next_append_finds_its_partition(
    database: Database, orders: TimelineView
) -> None:
    with database.connection() as connection, connection.transaction(force_rollback=True):
        orders.append(connection, [("1", {"number": 0}, NOON)])
    assert orders.read("1") == []
    append(database, orders, ("1", {"number": 1}, NOON))
    assert numbers(orders) == [1]


def test_data_and_times_come_back_as_they_were(database: Database, orders: TimelineView) -> None:
    data = {"quote": '"', "escape": "\\u0000", "deep": [{"emoji": "🚕"}, None, 1.5, True]}
    at = datetime(2024, 11, 20, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    append(database, orders, ("%(timeline)s", data, at))
    (entry,) = orders.read("%(timeline)s")
    assert (entry.data, entry.occurred_at) == (data, at)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (("", {}, NOON), InvalidNameError),
        (("a\nb", {}, NOON), InvalidNameError),
        ((7, {}, NOON), InvalidNameError),
        (("r" * 201, {}, NOON), InvalidNameError),
        (("1", [], NOON), ValidationError),
        (("1", {"nan": math.nan}, NOON), ValidationError),
        (("1", {"text": "a\x00b"}, NOON), ValidationError),
        (("1", {"text": "\ud800"}, NOON), ValidationError),
        (("1", {"at": NOON}, NOON), ValidationError),
        (("1", {}, NOON.replace(tzinfo=None)), ValidationError),
        (("1", {}, "2024-11-20"), ValidationError),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(
    database: Database, orders: TimelineView, entry: Any, error: type[Exception]
) -> None:
    with database.transaction() as connection, pytest.raises(error):
        orders.append(connection, [("1", {}, NOON), entry])
    assert orders.read("1") == []


def test_reading_a_resource_goes_through_an_index_of_each_partition(database: Database, orders: TimelineView) -> None:
    with database.connection() as connection:
        for month in range(3):
            append(database, orders, ("first", {}, NOON + month * 31 * DAY))
            connection.execute(
                "INSERT INTO eventsql.view_orders (eql_tenant, eql_resource, eql_data, eql_occurred_at) "
                "SELECT '', (number %% 2000)::text, '{}', %s FROM generate_series(1, 6000) AS number",
                [NOON + month * 31 * DAY],
            )
        connection.execute("VACUUM ANALYZE eventsql.view_orders")
        values = {"tenant": "", "resource": "7", "after": 0, "before": 2**63 - 1, "limit": 20}
        for statement in ("read_timeline", "read_timeline_back"):
            plan = custom_plan(connection, orders._table.query(statement), values)
            assert plan.count("eql_resource = '7'") >= 3
            assert not re.search(r"Seq Scan on view_orders_p202[45]", plan)
    assert len(orders.read("7")) == len(orders.read_newest("7")) == 9


def test_entries_older_than_the_retention_are_left_out(database: Database, views: Views) -> None:
    short = Timeline("short", retention=timedelta(days=3), period=timedelta(days=1))
    views.declare(short)
    timeline = views.timeline(short)
    now = datetime.now(NOON.tzinfo)
    with database.transaction() as connection:
        stored = timeline.append(
            connection, [("1", {"number": 0}, NOON), ("1", {"number": 1}, now), ("1", {"number": 2}, now + MINUTE)]
        )
    assert stored == 2
    assert numbers(timeline) == [1, 2]
