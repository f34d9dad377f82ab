"""Rollups estimate how many texts differ, and the quantiles of their values, whatever the batches and slots."""

from __future__ import annotations

import random
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql
from psycopg.rows import dict_row

from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import DatabaseError, MissingExtraError, ValidationError, ViewConflictError
from eventsql_orchestration.views import Rollup, RollupBucket, RollupEntry, RollupView, Views
from eventsql_orchestration.views.definitions import Definition
from eventsql_orchestration.views.sketches import (
    merge_distinct,
    merge_quantiles,
    read_distinct,
    read_quantiles,
    same_distinct,
    same_quantiles,
    sketch_distinct,
    sketch_quantiles,
)
from tests.fixtures import UntilBlocked
from tests.views.conftest import DAY, MINUTE, NOON, SKETCHES
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(not SKETCHES, reason="no datasketches")

HOUR = timedelta(hours=1)
VISITS = Rollup("visits", MINUTE, ("page",), ("ms",), distinct=("visitor",), quantiles=("ms",))


def visit(visitor: str = "ann", ms: Any = 1, at: int = 0, page: str = "home") -> RollupEntry:
    return RollupEntry(NOON + at * MINUTE, {"page": page}, {"ms": ms}, {"visitor": visitor})


@pytest.fixture
def visits(views: Views) -> RollupView:
    views.declare(VISITS)
    return views.rollup(VISITS)


def add(database: Database, rollup: RollupView, *entries: RollupEntry, **where: Any) -> None:
    with database.transaction() as connection:
        rollup.add(connection, entries, **where)


def visitors(bucket: RollupBucket) -> float:
    found = bucket.distinct["visitor"]
    assert found is not None
    assert found.low <= found.estimate <= found.high
    return found.estimate


def times(bucket: RollupBucket, *ranks: float) -> list[float]:
    found = bucket.quantiles["ms"]
    assert found is not None
    return [found.at(rank) for rank in ranks]


def test_visitors_are_counted_once_and_quantiles_are_those_of_all(database: Database, visits: RollupView) -> None:
    add(database, visits, *(visit(f"v{number % 3}", number) for number in range(1, 11)))
    add(database, visits, visit("v9", 11), visit("v0", 1, page="help"))
    home, help_ = (next(each for each in visits.read() if each.dimensions["page"] == page) for page in ("home", "help"))
    assert (visitors(home), visitors(help_)) == (4, 1)
    assert times(home, 0, 0.5, 1) == [1, 6, 11]
    assert (home.count, home.values["ms"].sum) == (11, Decimal(66))


def test_slots_buckets_and_dimensions_are_merged_when_they_are_read(database: Database, visits: RollupView) -> None:
    for slot in range(3):
        entries = (visit(f"v{slot} {at % 4}", at, at // 2, f"page {at % 2}") for at in range(10))
        add(database, visits, *entries, slot=slot)
    add(database, visits, visit("other", 99), tenant="acme")
    (hour,) = visits.read(every=HOUR, by=())
    assert (hour.count, visitors(hour), times(hour, 0, 1)) == (30, 12, [0, 9])
    assert [visitors(each) for each in visits.read(every=HOUR)] == [6, 6]
    assert [visitors(each) for each in visits.read(every=HOUR, tenant="acme")] == [1]


def test_sketches_of_many_tenants_are_merged_in_one_call(database: Database, visits: RollupView) -> None:
    # The first tenant by name has the last bucket.
    visited = [visit("a", 5, at=9), visit("b", 6, at=2), visit("c", 7, at=2)]
    add(database, visits, *visited, tenant=["acme", "globex", "globex"])
    add(database, visits, *visited, visit("d", 8, at=2), tenant=["globex", "globex", "acme", "globex"])
    found = {
        tenant: [(each.bucket, visitors(each), times(each, 0, 1)) for each in visits.read(tenant=tenant)]
        for tenant in ("acme", "globex")
    }
    second, ninth = NOON + 2 * MINUTE, NOON + 9 * MINUTE
    assert found == {
        "acme": [(second, 1, [7, 7]), (ninth, 1, [5, 5])], "globex": [(second, 3, [6, 8]), (ninth, 1, [5, 5])],
    }  # fmt: skip


def test_a_late_event_is_merged_into_its_bucket(database: Database, visits: RollupView) -> None:
    add(database, visits, visit("a", 5, at=3))
    add(database, visits, visit("b", 7, at=9))
    add(database, visits, visit("b", 6, at=3), visit("a", 1, at=3))
    third = visits.read()[0]
    assert (visitors(third), times(third, 0, 0.5, 1)) == (2, [1, 5, 6])


def test_transactions_that_share_a_bucket_are_merged_one_after_the_other(
    database: Database, visits: RollupView, until_blocked: UntilBlocked
) -> None:
    add(database, visits, visit("zero", 0))
    with ThreadPoolExecutor(1) as executor:
        with database.transaction() as connection:
            visits.add(connection, [visit("one", 1)])
            second = executor.submit(add, database, visits, visit("two", 2))
            until_blocked()
        second.result(PATIENCE)
    (bucket,) = visits.read()
    assert (visitors(bucket), times(bucket, 0, 0.5, 1)) == (3, [0, 1, 2])


def test_a_transaction_that_is_rolled_back_leaves_no_trace(database: Database, visits: RollupView) -> None:
    add(database, visits, visit("one", 1))
    with database.transaction() as connection, connection.transaction(force_rollback=True):
        visits.add(connection, [visit("two", 2)])
    (bucket,) = visits.read()
    assert (visitors(bucket), times(bucket, 0, 1)) == (1, [1, 1])


def test_many_buckets_and_partitions_are_written_in_one_call(database: Database, visits: RollupView) -> None:
    entries = [visit(f"v{at}", at, at * 24 * 60, page) for at in range(90) for page in "ab"]
    for _ in range(2):
        add(database, visits, *entries)
    found = visits.read(every=MINUTE)
    assert len(found) == 180
    assert {visitors(each) for each in found} == {1}
    assert {each.count for each in found} == {2}


# Declaring


def test_sketches_can_be_declared_later(database: Database, views: Views) -> None:
    plain = Rollup("visits", MINUTE, ("page",), ("ms",))
    views.declare(plain)
    add(database, views.rollup(plain), RollupEntry(NOON, {"page": "home"}, {"ms": 5}))
    assert views.declare(VISITS) == ["visits"]
    assert views.declare(VISITS) == []
    assert views.definition("visits") == VISITS
    rollup = views.rollup(VISITS)
    assert [(each.distinct, each.quantiles) for each in rollup.read()] == [({"visitor": None}, {"ms": None})]
    add(database, rollup, visit("ann", 7))
    (bucket,) = rollup.read()
    assert (bucket.count, visitors(bucket), times(bucket, 0, 1)) == (2, 1, [7, 7])


@pytest.mark.parametrize(
    "other",
    [
        Rollup("visits", MINUTE, ("page",), ("ms",)),
        Rollup("visits", MINUTE, ("page",), ("ms",), distinct=("guest",), quantiles=("ms",)),
    ],
)
def test_sketches_are_not_taken_away(views: Views, visits: RollupView, other: Definition) -> None:
    with pytest.raises(ViewConflictError):
        views.declare(other)


def test_wrong_definitions_and_entries_are_refused(database: Database, visits: RollupView) -> None:
    with pytest.raises(ValidationError):
        Rollup("visits", MINUTE, values=("ms",), quantiles=("cents",))
    with pytest.raises(ValidationError):
        Rollup("visits", MINUTE, distinct=("a", "a"))
    with pytest.raises(ValidationError):
        visit("")
    with pytest.raises(ValidationError):
        add(database, visits, RollupEntry(NOON, {"page": "home"}, {"ms": 1}))
    assert visits.read() == []


@pytest.mark.parametrize("rank", [-0.1, 1.1, float("nan"), True, "0.5", None])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    found = read_quantiles([sketch_quantiles([1.0])])
    assert found is not None
    with pytest.raises(ValidationError):
        found.at(rank)


def test_without_the_package_the_extra_is_named_and_nothing_is_counted(
    database: Database, visits: RollupView, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.transaction() as connection:
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "datasketches", None)
            with pytest.raises(MissingExtraError) as error:
                visits.add(connection, [visit()])
        assert error.value.extra == "sketches"
    assert visits.read() == []


def _forged(column: str) -> list[bytes]:
    """Sketches with changed bytes."""
    if column == "eql_distinct_visitor":
        whole = sketch_distinct("abc")
        return [b"", whole[:-1], whole[:8] + b"\xff" * 4 + whole[12:], sketch_quantiles([1.0])]
    whole = sketch_quantiles(map(float, range(3_000)))
    one, nan = sketch_quantiles([1.0]), struct.pack("<d", float("nan"))
    ends = whole[:20] + b"\xff\xff\xff\x7f" + whole[24:]
    falling = whole[:24] + bytes(4) + whole[28:]
    return [
        b"",
        sketch_quantiles([]),
        whole[:-1],
        whole + bytes(8),
        ends,
        falling,
        whole[:-8] + nan,
        one[:8] + nan,
        one[:2] + b"\0" + one[3:],
    ]


@pytest.mark.parametrize("column", ["eql_distinct_visitor", "eql_quantiles_ms"])
def test_a_damaged_sketch_is_refused(database: Database, visits: RollupView, column: str) -> None:
    add(database, visits, visit())
    for forged in _forged(column):
        with database.connection() as connection:
            connection.execute(
                sql.SQL("UPDATE eventsql.view_visits SET {} = %s").format(sql.Identifier(column)), [forged]
            )
        with pytest.raises(DatabaseError, match="damaged"):
            visits.read()
        with pytest.raises(DatabaseError, match="damaged"):
            add(database, visits, visit())
    with database.connection() as connection:
        assert connection.execute("SELECT eql_count FROM eventsql.view_visits").fetchall() == [(1,)]


def test_without_a_transaction_counts_and_sketches_are_written_together(database: Database, visits: RollupView) -> None:
    add(database, visits, visit())
    forged = _forged("eql_distinct_visitor")[0]
    with database.connection() as connection:
        connection.execute("UPDATE eventsql.view_visits SET eql_distinct_visitor = %s", [forged])
        with pytest.raises(DatabaseError, match="damaged"):
            visits.add(connection, [visit()])
        assert connection.execute("SELECT eql_count FROM eventsql.view_visits").fetchall() == [(1,)]


def test_numbers_beyond_floats_keep_their_order(database: Database, visits: RollupView) -> None:
    add(database, visits, visit(ms=Decimal("1e400")), visit(ms=-1), visit(ms=Decimal("-1e400")))
    (bucket,) = visits.read()
    assert times(bucket, 0, 0.5, 1) == [float("-inf"), -1, float("inf")]


# The error of estimates


TEXTS = st.lists(st.lists(st.text(min_size=1, max_size=3), max_size=30), max_size=6)


@settings(max_examples=60, deadline=None)
@given(batches=TEXTS)
def test_a_number_of_few_texts_is_exact(batches: list[list[str]]) -> None:
    found = read_distinct([sketch_distinct(batch) for batch in batches] or [sketch_distinct([])])
    assert found is not None
    assert found.estimate == found.low == found.high == len({text for batch in batches for text in batch})


@pytest.mark.parametrize("count", [2_048, 2_049, 5_000, 50_000])
def test_the_sketch_of_texts_follows_from_the_set_alone(count: int) -> None:
    texts = [f"text {number}" for number in range(count)]
    whole = sketch_distinct(texts)
    for seed in range(4):
        chosen = random.Random(seed)
        mixed = chosen.sample(texts, count)
        cuts = [0, *sorted(chosen.sample(range(count), 3)), count]
        parts = [sketch_distinct(mixed[begin:end]) for begin, end in pairwise(cuts)]
        assert merge_distinct(parts) == merge_distinct([merge_distinct(parts[:2]), *parts[1:]]) == whole
        assert same_distinct(parts, [whole])
        assert not same_distinct(parts, [sketch_distinct([*texts, "one more", "and another", "and more", *mixed[:9]])])
    found = read_distinct([whole])
    assert found is not None
    assert abs(found.estimate - count) <= 0.1 * count
    assert len(whole) < 17_000


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(st.integers(-1_000, 1_000), min_size=1, max_size=40), min_size=1, max_size=4))
def test_quantiles_of_few_numbers_are_exact(batches: list[list[int]]) -> None:
    found = read_quantiles([sketch_quantiles(map(float, batch)) for batch in batches])
    numbers = sorted(number for batch in batches for number in batch)
    assert found is not None
    assert (found.count, found.rank_error) == (len(numbers), 0)
    assert [found.at(0), found.at(0.5), found.at(1)] == [numbers[0], numbers[(len(numbers) - 1) // 2], numbers[-1]]


def test_the_rank_of_a_quantile_of_many_numbers_is_nearly_right() -> None:
    count = 40_000
    numbers = random.Random(3).sample(range(count), count)
    merged: list[bytes] = []
    for first in range(0, count, 1_000):
        merged = [merge_quantiles([*merged, sketch_quantiles(map(float, numbers[first : first + 1_000]))])]
    found = read_quantiles(merged)
    assert found is not None
    assert found.count == count
    # Five times the error: one of 99 in 100 cases would fail now and then.
    assert all(abs(found.at(rank) / count - rank) <= 5 * found.rank_error for rank in (0.01, 0.25, 0.5, 0.9, 0.99))
    assert len(merged[0]) < 6_000
    whole = sketch_quantiles(map(float, range(count)))
    assert same_quantiles(merged, [whole])
    assert not same_quantiles(merged, [sketch_quantiles(float(number) * 1.3 for number in range(count))])
    assert not same_quantiles(merged, [sketch_quantiles(map(float, range(count - 1)))])


def test_a_callers_connection_may_have_its_own_rows(database: Database, visits: RollupView) -> None:
    for _ in range(2):
        with database.transaction() as connection:
            connection.row_factory = dict_row  # type: ignore[assignment]  # as handlers do
            visits.add(connection, [visit()])
    (bucket,) = visits.read()
    assert (bucket.count, visitors(bucket)) == (2, 1)


def test_a_retention_leaves_sketches_of_old_entries_out(database: Database, views: Views) -> None:
    kept = Rollup("kept", MINUTE, distinct=("visitor",), retention=DAY)
    views.declare(kept)
    add(database, views.rollup(kept), RollupEntry(NOON, distinct={"visitor": "ann"}))
    assert views.rollup(kept).read() == []
