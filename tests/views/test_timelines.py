"""A timeline tells what happened to a resource, in the order in which it was appended."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
import sqlalchemy

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.views import TimelineEntry, Timelines
from tests.plans import custom_plan

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def timelines(database: Database) -> Timelines:
    return Timelines(database)


def test_a_resource_is_read_in_the_order_of_its_entries(database: Database, timelines: Timelines) -> None:
    with database.transaction() as connection:
        timelines.append(connection, "orders", "1", {"status": "placed"}, NOON)
        timelines.append(connection, "orders", "2", {"status": "placed"}, NOON)
        timelines.append(connection, "orders", "1", {"status": "accepted"}, NOON + MINUTE)
        timelines.append(connection, "riders", "1", {"status": "registered"}, NOON)
        timelines.append(connection, "orders", "1", {"status": "reported late"}, NOON - MINUTE)
    entries = timelines.read("orders", "1")
    assert [(entry.data["status"], entry.occurred_at) for entry in entries] == [
        ("placed", NOON),
        ("accepted", NOON + MINUTE),
        ("reported late", NOON - MINUTE),
    ]
    assert entries[0] == TimelineEntry(entries[0].id, "1", {"status": "placed"}, NOON)


def test_many_entries_are_appended_in_their_order(database: Database, timelines: Timelines) -> None:
    with database.transaction() as connection:
        entries = ((str(number % 3), {"number": number}, NOON) for number in range(3_000))
        assert timelines.append_all(connection, "orders", entries) == 3_000
        assert timelines.append_all(connection, "orders", []) == 0
    assert [entry.data["number"] for entry in timelines.read("orders", "1")] == list(range(1, 3_000, 3))


def test_a_reader_goes_on_after_the_entry_that_it_saw_last(database: Database, timelines: Timelines) -> None:
    with database.transaction() as connection:
        timelines.append_all(connection, "orders", [("1", {"number": number}, NOON) for number in range(5)])
    seen: list[int] = []
    last = 0
    while page := timelines.read("orders", "1", after=last, limit=2):
        assert len(page) <= 2
        seen += [entry.data["number"] for entry in page]
        last = page[-1].id
    assert seen == [0, 1, 2, 3, 4]


def test_a_reader_misses_nothing_of_a_resource_whose_writers_take_turns(
    database: Database, timelines: Timelines
) -> None:
    """Whoever writes to other resources meanwhile; see the next for what that leaves out."""
    with psycopg.connect(database.dsn) as elsewhere:
        timelines.append(elsewhere, "orders", "other", {"number": 0}, NOON)
        seen: list[int] = []
        last = 0
        for number in range(3):
            with database.transaction() as connection:
                timelines.append(connection, "orders", "1", {"number": number}, NOON)
            page = timelines.read("orders", "1", after=last)
            seen, last = [*seen, *(entry.data["number"] for entry in page)], page[-1].id
    assert seen == [0, 1, 2]


def test_what_commits_late_lies_before_what_was_read_already_and_is_found_by_reading_the_whole(
    database: Database, timelines: Timelines
) -> None:
    with psycopg.connect(database.dsn) as late:
        timelines.append(late, "orders", "1", {"number": 0}, NOON)
        with database.transaction() as early:
            timelines.append(early, "orders", "1", {"number": 1}, NOON)
        (read,) = timelines.read("orders", "1")
        late.commit()
    assert timelines.read("orders", "1", after=read.id) == []
    assert [entry.data["number"] for entry in timelines.read("orders", "1")] == [0, 1]


def test_a_transaction_of_sqlalchemy_appends(database: Database, timelines: Timelines) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for number, ending in enumerate((connection.rollback, connection.commit)):
            timelines.append(connection, "orders", "1", {"number": number}, NOON)
            ending()
    engine.dispose()
    assert [entry.data["number"] for entry in timelines.read("orders", "1")] == [1]


def test_nothing_is_appended_without_a_connection(timelines: Timelines) -> None:
    nothing: Any = None
    with pytest.raises(ValidationError, match="connection is needed"):
        timelines.append(nothing, "orders", "1", {}, NOON)
    assert timelines.read("orders", "1") == []


def test_an_unknown_timeline_or_resource_is_empty(timelines: Timelines) -> None:
    assert timelines.read("orders", "1") == []


def test_a_rollback_appends_nothing(database: Database, timelines: Timelines) -> None:
    with database.connection() as connection, connection.transaction(force_rollback=True):
        timelines.append(connection, "orders", "1", {}, NOON)
    assert timelines.read("orders", "1") == []


def test_data_and_times_come_back_as_they_were(database: Database, timelines: Timelines) -> None:
    data = {"quote": '"', "escape": "\\u0000", "deep": [{"emoji": "🚕"}, None, 1.5, True]}
    at = datetime(2024, 11, 20, 12, 0, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    with database.transaction() as connection:
        timelines.append(connection, "{schema} %s", "%(timeline)s", data, at)
    (entry,) = timelines.read("{schema} %s", "%(timeline)s")
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
        (("1", {}, NOON.date()), ValidationError),
        (("1", {}, datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))), ValidationError),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(
    nowhere: Database, entry: Any, error: type[Exception]
) -> None:
    connection: Any = None
    with pytest.raises(error):
        Timelines(nowhere).append_all(connection, "orders", [("1", {}, NOON), entry])


@pytest.mark.parametrize("bounds", [{"after": -1}, {"limit": 0}, {"limit": True}, {"limit": 2**63}, {"after": 1.0}])
def test_bounds_that_make_no_sense_are_refused(nowhere: Database, bounds: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Timelines(nowhere).read("orders", "1", **bounds)


@pytest.mark.parametrize("limit", [None, 10])
def test_reading_a_resource_goes_through_its_index(database: Database, limit: int | None) -> None:
    values = {"timeline": "orders", "resource": "7", "after": 100, "limit": limit}
    composed = Queries("views", "eventsql")("read_timeline")
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.timeline_entry (eql_timeline, eql_resource, eql_data, eql_occurred_at) "
            "SELECT 'orders', number % 1000, '{}', now() FROM generate_series(1, 20000) AS number"
        )
        connection.execute("VACUUM ANALYZE eventsql.timeline_entry")
        plan = custom_plan(connection, composed, values)
    assert "timeline_entry_resource" in plan
    assert "Seq Scan" not in plan
