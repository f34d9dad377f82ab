"""Rollups count and sum per bucket; additions commute and are never lost."""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal, localcontext
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import ValidationError, ViewNotFoundError
from eventsql_orchestration.views import Measure, Rollup, RollupBucket, RollupEntry, RollupView, Views
from eventsql_orchestration.views.rollup_sql import selection
from tests.fixtures import Sessions
from tests.plans import custom_plan
from tests.views.conftest import DAY, MINUTE, NOON

ORDERS = Rollup("orders", MINUTE, ("kind",), ("cents",))


def entry(at: datetime = NOON, kind: str = "placed", cents: Any = 0) -> RollupEntry:
    return RollupEntry(at, {"kind": kind}, {"cents": cents})


@pytest.fixture
def orders(views: Views) -> RollupView:
    views.declare(ORDERS)
    return views.rollup(ORDERS)


def add(database: Database, rollup: RollupView, *batches: list[RollupEntry], **where: Any) -> None:
    for batch in batches:
        with database.transaction() as connection:
            rollup.add(connection, batch, **where)


def measured(total: int, low: int, high: int) -> dict[str, Measure]:
    return {"cents": Measure(Decimal(total), Decimal(low), Decimal(high))}


def test_entries_of_a_bucket_are_counted_and_measured(database: Database, orders: RollupView) -> None:
    add(
        database, orders,
        [entry(cents=300), entry(NOON + timedelta(seconds=59), cents=50), entry(kind="cancelled")],
        [entry(cents=100), entry(NOON + MINUTE, cents=500)],
    )  # fmt: skip
    assert orders.read() == [
        RollupBucket(NOON, {"kind": "cancelled"}, 1, measured(0, 0, 0)),
        RollupBucket(NOON, {"kind": "placed"}, 3, measured(450, 50, 300)),
        RollupBucket(NOON + MINUTE, {"kind": "placed"}, 1, measured(500, 500, 500)),
    ]


def test_a_rollup_may_do_without_dimensions_and_values(database: Database, views: Views) -> None:
    plain = Rollup("plain", timedelta(hours=1))
    views.declare(plain)
    add(database, views.rollup(plain), [RollupEntry(NOON + number * MINUTE) for number in range(90)])
    assert views.rollup(plain).read() == [
        RollupBucket(NOON, {}, 60, {}), RollupBucket(NOON + timedelta(hours=1), {}, 30, {}),
    ]  # fmt: skip


def test_buckets_are_read_by_range_dimension_and_tenant(database: Database, orders: RollupView) -> None:
    entries = [entry(NOON + number * MINUTE, kind) for number in range(5) for kind in "ab" for _ in range(number)]
    add(database, orders, entries)
    add(database, orders, [entry(kind="a")] * 9, tenant="acme")

    def counts(**bounds: Any) -> list[int]:
        return [bucket.count for bucket in orders.read(**bounds)]

    assert counts() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert counts(since=NOON + 3 * MINUTE, where={"kind": "a"}) == [3, 4]
    assert counts(until=NOON + 2 * MINUTE, where={"kind": "b"}) == [1]
    assert counts(since=NOON + MINUTE, until=NOON + 2 * MINUTE) == [1, 1]
    assert counts(where={"kind": "c"}) == []
    assert counts(tenant="acme") == [9]
    assert counts(by=()) == [2, 4, 6, 8]


def test_entries_of_many_tenants_are_counted_in_one_call(database: Database, orders: RollupView) -> None:
    tenants = ["globex", "acme", "acme", "", "globex"]
    with database.transaction() as connection:
        assert orders.add(connection, [entry(NOON + number * MINUTE) for number in range(5)], tenant=tenants) == 5
    found = {tenant: [each.bucket for each in orders.read(tenant=tenant)] for tenant in ("acme", "globex", "")}
    assert found == {
        "acme": [NOON + MINUTE, NOON + 2 * MINUTE], "globex": [NOON, NOON + 4 * MINUTE], "": [NOON + 3 * MINUTE],
    }  # fmt: skip


def test_coarser_buckets_are_sums_of_the_stored_ones(database: Database, orders: RollupView) -> None:
    add(database, orders, [entry(NOON + number * MINUTE, cents=number) for number in range(24 * 60)])
    hours = orders.read(every=timedelta(hours=1), by=())
    assert [bucket.count for bucket in hours] == [60] * 24
    assert hours[1] == RollupBucket(NOON + 60 * MINUTE, {}, 60, measured(sum(range(60, 120)), 60, 119))
    days = orders.read(every=DAY)
    assert [(bucket.bucket.hour, bucket.count) for bucket in days] == [(0, 720), (0, 720)]


def test_handlers_with_slots_of_their_own_do_not_wait_for_each_other(
    database: Database, orders: RollupView, sessions: Sessions
) -> None:
    add(database, orders, [entry()])
    held = sessions()
    orders.add(held, [entry(cents=5)], slot=1)
    # It would wait for the transaction above in the same slot.
    with database.transaction() as connection:
        connection.execute("SET LOCAL lock_timeout TO '1s'")
        orders.add(connection, [entry(cents=7)], slot=2)
    held.commit()
    assert orders.read() == [RollupBucket(NOON, {"kind": "placed"}, 3, measured(12, 0, 7))]


def test_decimal_fractions_are_added_exactly(database: Database, orders: RollupView) -> None:
    add(database, orders, *([entry(cents=0.1)] for _ in range(3)), [entry(cents=Decimal("0.0000000001"))])
    assert orders.read()[0].values["cents"].sum == Decimal("0.3000000001")


def test_a_float_of_numpy_is_the_number_that_it_shows() -> None:
    assert entry(cents=np.float64(0.1)).values["cents"] == Decimal("0.1")


def test_dimensions_too_long_for_an_index_are_refused(database: Database, views: Views) -> None:
    wide = Rollup("wide", MINUTE, tuple(f"d{number}" for number in range(20)))
    views.declare(wide)
    characters = random.Random(1)
    texts = {name: "".join(map(chr, characters.choices(range(32, 127), k=200))) for name in wide.dimensions}
    with database.transaction() as connection, pytest.raises(ValidationError, match="wide"):
        views.rollup(wide).add(connection, [RollupEntry(NOON, texts)])


def test_adding_no_entries_changes_nothing(database: Database, orders: RollupView) -> None:
    add(database, orders, [])
    assert orders.read() == []


def test_a_bucket_is_a_moment_whatever_its_time_zone(database: Database, orders: RollupView) -> None:
    add(database, orders, [entry(), entry(NOON.astimezone(timezone(timedelta(hours=9))))])
    assert [(bucket.bucket, bucket.count) for bucket in orders.read()] == [(NOON, 2)]


def test_the_two_hours_of_a_clock_set_back_are_two_buckets(database: Database, orders: RollupView) -> None:
    twice = datetime(2024, 10, 27, 2, tzinfo=ZoneInfo("Europe/Berlin"))
    add(database, orders, [entry(twice), entry(twice.replace(fold=1)), entry(twice.replace(fold=1))])
    assert [bucket.count for bucket in orders.read()] == [1, 2]


entries = st.builds(
    entry,
    st.sampled_from([NOON + number * MINUTE for number in range(3)]),
    st.sampled_from(["", "a", "Ä", "ä"]),
    st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False, width=32)),
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(entries, max_size=6), min_size=1, max_size=5), data=st.data())
def test_additions_commute(
    database: Database, orders: RollupView, batches: list[list[RollupEntry]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(batches))
    at_once = data.draw(st.permutations([each for batch in batches for each in batch]))
    tenants = [uuid.uuid4().hex for _ in range(3)]
    add(database, orders, *batches, tenant=tenants[0])
    for slot, batch in enumerate(shuffled):
        add(database, orders, batch, tenant=tenants[1], slot=slot)
    add(database, orders, at_once, tenant=tenants[2])
    first, second, third = (orders.read(tenant=tenant) for tenant in tenants)
    assert first == second == third
    assert sum(bucket.count for bucket in first) == len(at_once)
    with localcontext(prec=300):
        total = sum(Decimal(str(each.values["cents"])) for each in at_once)
        assert sum(bucket.values["cents"].sum for bucket in first) == total


def test_writers_at_once_neither_lose_an_addition_nor_deadlock(database: Database, orders: RollupView) -> None:
    batch = [entry(NOON + number * MINUTE, kind, 10) for number in range(10) for kind in "abc"] * 2
    tenants = ["acme"] * 30 + ["globex"] * 30

    def write(writer: int) -> None:
        step = 1 if writer % 2 else -1
        for _ in range(20):
            add(database, orders, batch[::step], tenant=tenants[::step])

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, range(6)))
    for tenant in ("acme", "globex"):
        buckets = orders.read(tenant=tenant)
        assert {(bucket.count, bucket.values["cents"].sum) for bucket in buckets} == {(120, Decimal(1200))}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: entry(NOON.replace(tzinfo=None)),
        lambda: RollupEntry("2024-11-20", {"kind": ""}, {"cents": 1}),  # type: ignore[arg-type]
        lambda: RollupEntry(NOON, {"kind": None}, {"cents": 1}),  # type: ignore[dict-item]
        lambda: entry(kind="a\x00b"),
        lambda: entry(kind="\ud800"),
        lambda: entry(kind="d" * 201),
        lambda: RollupEntry(NOON, {}, {"cents": 1}),
        lambda: RollupEntry(NOON, {"kind": "", "other": ""}, {"cents": 1}),
        lambda: RollupEntry(NOON, {"kind": ""}),
        lambda: entry(cents=True),
        lambda: entry(cents="1"),
        lambda: entry(cents=math.nan),
        lambda: entry(cents=math.inf),
        lambda: entry(cents=Decimal("1e2000")),
        lambda: entry(cents=Decimal("1." + "1" * 1_000)),
        lambda: entry(cents=10**1_000),
        lambda: (NOON, "", 1, 1),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused_before_any_of_its_batch_is_written(
    database: Database, orders: RollupView, wrong: Callable[[], Any]
) -> None:
    with database.transaction() as connection, pytest.raises(ValidationError):
        orders.add(connection, [entry(), wrong()])
    assert orders.read() == []


@pytest.mark.parametrize(
    "question",
    [
        {"since": NOON.replace(tzinfo=None)}, {"until": NOON.replace(tzinfo=None)}, {"every": timedelta(seconds=90)},
        {"every": timedelta(0)}, {"every": 10_000_000 * DAY}, {"by": ["place"]}, {"where": {"place": "a"}},
        {"tenant": "a\nb"},
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_is_refused(nowhere: Database, question: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RollupView(nowhere, ORDERS).read(**question)


def test_a_rollup_that_nobody_declared_is_named(database: Database) -> None:
    with database.transaction() as connection, pytest.raises(ViewNotFoundError, match="orders"):
        RollupView(database, ORDERS).add(connection, [entry()])


def test_reading_a_range_goes_through_the_key_of_its_partitions(database: Database, orders: RollupView) -> None:
    add(database, orders, [entry(NOON - 60 * DAY), entry(NOON), entry(NOON + 60 * DAY)])
    query = selection(ORDERS, database.schema, (), ("kind",), since=True, until=True)
    values = {
        "tenant": "", "since": NOON, "until": NOON + 60 * MINUTE, "every": MINUTE, "dimension_0": "a",
    }  # fmt: skip
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.view_orders (eql_tenant, eql_bucket, kind, eql_slot, eql_count) "
            "SELECT '', %s + number * interval '1 min', 'a', 0, 1 FROM generate_series(1, 8000) AS number",
            [NOON],
        )
        connection.execute("VACUUM ANALYZE eventsql.view_orders")
        plan = custom_plan(connection, sql.SQL(query.decode()), values)
    assert "eql_bucket >=" in plan
    assert "Seq Scan" not in plan
    assert "_p202409" not in plan


def test_reading_one_of_many_values_of_an_indexed_dimension_goes_through_its_index(
    database: Database, views: Views
) -> None:
    tasks = Rollup("tasks", MINUTE, ("state", "task"), indexed=("task",))
    views.declare(tasks)
    view = views.rollup(tasks)
    add(database, view, [RollupEntry(NOON, {"state": "done", "task": "7"})], tenant="acme")
    asked: dict[str, Any] = {"tenant": "acme", "since": NOON, "until": NOON + 60 * MINUTE, "where": {"task": "7"}}
    query = selection(tasks, database.schema, ("state",), ("task",), since=True, until=True)
    values = {**asked, "every": MINUTE, "dimension_1": "7"}
    with database.connection() as connection:
        connection.execute(
            "INSERT INTO eventsql.view_tasks (eql_tenant, eql_bucket, state, task, eql_slot, eql_count) "
            "SELECT 'acme', %s + minute * interval '1 min', 'done', task::text, 1, 1 "
            "FROM generate_series(0, 59) AS minute, generate_series(1, 300) AS task",
            [NOON],
        )
        connection.execute("VACUUM ANALYZE eventsql.view_tasks")
        plan = custom_plan(connection, sql.SQL(query.decode()), values)
    assert "eql_tenant_task_eql_bucket_idx" in plan
    assert [bucket.count for bucket in view.read(**asked)] == [2, *[1] * 59]


def test_a_transaction_of_sqlalchemy_writes(database: Database, orders: RollupView) -> None:
    engine = sqlalchemy.create_engine(database.url)
    with engine.connect() as connection:
        for number, ending in enumerate((connection.rollback, connection.commit)):
            orders.add(connection, [entry(cents=number)])
            ending()
    engine.dispose()
    assert [bucket.values["cents"].sum for bucket in orders.read()] == [1]


def test_entries_older_than_the_retention_are_left_out(database: Database, views: Views) -> None:
    short = Rollup("short", MINUTE, retention=DAY, period=DAY)
    views.declare(short)
    with database.transaction() as connection:
        assert views.rollup(short).add(connection, [RollupEntry(NOON), RollupEntry(datetime.now(UTC))]) == 1
    assert [bucket.count for bucket in views.rollup(short).read()] == [1]


def test_an_entry_within_the_retention_counts_in_a_bucket_that_began_before(database: Database, views: Views) -> None:
    long = Rollup("long", 3_660 * DAY, retention=timedelta(hours=1), period=3_660 * DAY)
    views.declare(long)
    with database.transaction() as connection:
        assert views.rollup(long).add(connection, [RollupEntry(datetime.now(UTC))]) == 1
