"""Rollups count and sum per bucket; additions commute and are never lost."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventsql_orchestration.database import Database, Queries
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.views import RollupBucket, Rollups
from tests.plans import custom_plan

NOON = datetime(2024, 11, 20, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)

Row = tuple[datetime, str, int, int]


@pytest.fixture
def rollups(database: Database) -> Rollups:
    return Rollups(database)


def add(database: Database, rollup: str, *batches: list[Row]) -> None:
    for batch in batches:
        with database.transaction() as connection:
            Rollups(database).add(connection, rollup, batch)


def test_additions_to_a_bucket_add_up(database: Database, rollups: Rollups) -> None:
    add(
        database,
        "orders",
        [(NOON, "placed", 2, 300), (NOON, "placed", 1, 50), (NOON, "cancelled", 1, 0)],
        [(NOON, "placed", 1, 100), (NOON + MINUTE, "placed", 5, 500)],
    )
    assert rollups.read("orders") == [
        RollupBucket(NOON, "cancelled", 1, 0),
        RollupBucket(NOON, "placed", 4, 450),
        RollupBucket(NOON + MINUTE, "placed", 5, 500),
    ]


def test_a_rollup_may_do_without_dimensions_and_may_take_back(database: Database, rollups: Rollups) -> None:
    add(database, "orders", [(NOON, "", 3, 30)], [(NOON, "", -1, -10)])
    assert rollups.read("orders", dimension="") == [RollupBucket(NOON, "", 2, 20)]


def test_rollups_are_read_by_range_and_dimension(database: Database, rollups: Rollups) -> None:
    add(database, "orders", [(NOON + number * MINUTE, kind, number, 0) for number in range(5) for kind in "ab"])
    add(database, "other", [(NOON, "a", 99, 0)])

    def counts(**bounds: Any) -> list[int]:
        return [bucket.count for bucket in rollups.read("orders", **bounds)]

    assert counts() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert counts(since=NOON + 3 * MINUTE, dimension="a") == [3, 4]
    assert counts(until=NOON + 2 * MINUTE, dimension="b") == [0, 1]
    assert counts(since=NOON + MINUTE, until=NOON + 2 * MINUTE) == [1, 1]
    assert counts(dimension="c") == []
    assert rollups.read("unknown") == []


def test_adding_nothing_is_nothing(database: Database, rollups: Rollups) -> None:
    add(database, "orders", [])
    assert rollups.read("orders") == []


def test_a_rollback_adds_nothing(database: Database, rollups: Rollups) -> None:
    with database.connection() as connection, connection.transaction(force_rollback=True):
        rollups.add(connection, "orders", [(NOON, "placed", 1, 1)])
    assert rollups.read("orders") == []


def test_a_bucket_is_a_moment_whatever_its_time_zone(database: Database, rollups: Rollups) -> None:
    add(database, "orders", [(NOON, "", 1, 0), (NOON.astimezone(timezone(timedelta(hours=9))), "", 1, 0)])
    assert rollups.read("orders") == [RollupBucket(NOON, "", 2, 0)]


def test_the_two_hours_of_a_clock_set_back_are_two_buckets(database: Database, rollups: Rollups) -> None:
    twice = datetime(2024, 10, 27, 2, tzinfo=ZoneInfo("Europe/Berlin"))
    add(database, "orders", [(twice, "", 1, 0), (twice.replace(fold=1), "", 2, 0)])
    assert [bucket.count for bucket in rollups.read("orders")] == [1, 2]


rows = st.tuples(
    st.sampled_from([NOON + number * MINUTE for number in range(3)]),
    st.sampled_from(["", "a", "Ä", "ä"]),
    st.integers(-5, 5),
    st.integers(-(2**40), 2**40),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(rows, max_size=6), min_size=1, max_size=5), data=st.data())
def test_additions_commute(database: Database, rollups: Rollups, batches: list[list[Row]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(batches))
    every_row = data.draw(st.permutations([row for batch in batches for row in batch]))
    as_they_came, otherwise, at_once = (uuid.uuid4().hex for _ in range(3))
    add(database, as_they_came, *batches)
    add(database, otherwise, *shuffled)
    add(database, at_once, every_row)
    assert rollups.read(as_they_came) == rollups.read(otherwise) == rollups.read(at_once)


def test_writers_at_once_neither_lose_an_addition_nor_deadlock(database: Database, rollups: Rollups) -> None:
    batch = [(NOON + number * MINUTE, kind, 1, 10) for number in range(10) for kind in "abc"]

    def write(writer: int) -> None:
        for _ in range(20):
            add(database, "orders", batch if writer % 2 else batch[::-1])

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, range(6)))
    assert {(bucket.count, bucket.sum) for bucket in rollups.read("orders")} == {(120, 1200)}


@pytest.mark.parametrize(
    "row",
    [
        (NOON.replace(tzinfo=None), "", 1, 1),
        ("2024-11-20", "", 1, 1),
        (NOON, None, 1, 1),
        (NOON, "a\x00b", 1, 1),
        (NOON, "\ud800", 1, 1),
        (NOON, "d" * 201, 1, 1),
        (NOON, "", 1.5, 1),
        (NOON, "", True, 1),
        (NOON, "", 1, None),
        (NOON, "", 2**63, 1),
        (NOON, "", 1, 2**63 - 1),  # with the sum of the row before it
    ],
)
def test_a_row_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(nowhere: Database, row: Any) -> None:
    connection: Any = None
    with pytest.raises(ValidationError):
        Rollups(nowhere).add(connection, "orders", [(NOON, "", 1, 1), row])


def test_a_name_or_a_range_that_cannot_be_used_is_refused(nowhere: Database) -> None:
    rollups = Rollups(nowhere)
    connection: Any = None
    with pytest.raises(InvalidNameError, match="rollup"):
        rollups.add(connection, "", [])
    with pytest.raises(InvalidNameError, match="rollup"):
        rollups.read("a\nb")
    with pytest.raises(ValidationError, match="since"):
        rollups.read("orders", since=NOON.replace(tzinfo=None))
    with pytest.raises(ValidationError, match="until"):
        rollups.read("orders", until=NOON.replace(tzinfo=None))


def test_reading_a_range_goes_through_the_key(database: Database) -> None:
    values = {"rollup": "rollup 7", "since": NOON, "until": None, "dimension": "a"}
    composed = Queries("views", "eventsql")("read_rollup")
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.rollup_bucket "
            "SELECT 'rollup ' || number % 50, timestamptz '2024-11-20 00:00+00' + make_interval(mins => number), "
            "'a', 1, 1 "
            "FROM generate_series(1, 20000) AS number"
        )
        connection.execute("VACUUM ANALYZE eventsql.rollup_bucket")
        plan = custom_plan(connection, composed, values)
    assert "rollup_bucket_pkey" in plan
    assert "eql_bucket >=" in plan
    assert "Seq Scan" not in plan


def test_a_transaction_of_sqlalchemy_writes(database: Database, rollups: Rollups) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for number, ending in enumerate((connection.rollback, connection.commit)):
            rollups.add(connection, "orders", [(NOON, "", 1, number)])
            ending()
    engine.dispose()
    assert [bucket.sum for bucket in rollups.read("orders")] == [1]
