"""The reference location's sums: of any split of a history they add up to those of the whole, as plain Python counts.

That is what lets a consumer work by claimed ranges, and a backfill go over all history with the same code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from assets.churn.counting import count
from assets.churn.sums import changes_of, churn
from assets.rides.counting import count_fares, count_utilisation
from assets.rides.sums import fares, orders_of, utilisation
from eventsql_orchestration.spark import spark_config
from eventsql_orchestration.spark.java import ensure_java

START = datetime(2026, 3, 1, 23, 40, tzinfo=UTC)

Sums = Mapping[tuple[Any, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    home = tmp_path_factory.mktemp("spark")
    ensure_java(home)
    chosen = {"spark.sql.shuffle.partitions": "1", "spark.sql.warehouse.dir": str(home / "warehouse")}
    session = SparkSession.Builder().config(map={**spark_config(**chosen)}).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@st.composite
def rides(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The events of one order: it is placed, perhaps accepted, perhaps ended, at any later time."""
    at = START + timedelta(seconds=draw(st.integers(0, 3_600)))
    state: dict[str, Any] = {
        "order_id": "order",
        "zone": draw(st.sampled_from(["north", "söuth"])),
        "driver": None,
        "price_cents": draw(st.integers(1, 5_000)),
        "placed_at": at.isoformat(),
    }
    events = [{**state, "change": "placed", "at": at.isoformat()}]

    def later(change: str, **changed: object) -> None:
        nonlocal at
        at += timedelta(microseconds=draw(st.integers(0, 3_000_000_000)))
        state.update(changed)
        events.append({**state, "change": change, "at": at.isoformat()})

    if draw(st.booleans()):
        later("price_raised", price_cents=state["price_cents"] + 50)
    if draw(st.booleans()):
        later("accepted", driver=draw(st.sampled_from(["ann", "bob"])))
    if draw(st.booleans()):
        later("completed" if state["driver"] else "cancelled")
    elif draw(st.booleans()):
        later("cancelled")
    return events


changes = st.fixed_dictionaries(
    {
        "repo": st.sampled_from(["one", "two"]),
        "commit": st.just("0123456789ab"),
        "committed_at": st.sampled_from(["2026-01-31T23:30:00-05:00", "2026-02-01T00:30:00+00:00"]),
        "path": st.sampled_from(["README.md", "src/a.py", "src/deep/b.py", "src/deep/c.py"]),
        "added": st.none() | st.integers(0, 50),
        "deleted": st.none() | st.integers(0, 50),
    }
)


def split(events: Sequence[Any], cuts: Sequence[int]) -> list[Sequence[Any]]:
    """The events as ranges that end at the cuts; some may be empty, as ranges of offsets may be."""
    ends = sorted(min(cut, len(events)) for cut in cuts)
    return [events[start:end] for start, end in zip([0, *ends], [*ends, len(events)], strict=True)]


def computed(
    spark: SparkSession,
    compute: Callable[[DataFrame], DataFrame],
    ranges: Sequence[Sequence[Mapping[str, Any]]],
    *,
    keys: int,
) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The sums of each range, added up as the tables of the location add up what is published."""
    added: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for each in ranges:
        events = spark.createDataFrame([(json.dumps(event).encode(),) for event in each], "value binary")
        for row in compute(events).collect():
            key, counts = tuple(row[:keys]), list(row[keys:])
            before = added[key] or [0] * len(counts)
            added[key] = [one + other for one, other in zip(before, counts, strict=True)]
    return {key: tuple(counts) for key, counts in added.items()}


# Each example is several Spark jobs of about 0.2 s.
few = settings(max_examples=3, suppress_health_check=list(HealthCheck), derandomize=True)
cuts = st.lists(st.integers(0, 25), min_size=1, max_size=2)


@few
@given(orders=st.lists(rides(), min_size=3, max_size=8), shuffle=st.randoms(use_true_random=False), cuts=cuts)
def test_fares_and_demand_of_any_ranges_are_those_of_the_whole(
    spark: SparkSession, orders: list[list[dict[str, Any]]], shuffle: Any, cuts: list[int]
) -> None:
    events = interleaved(orders, shuffle)
    expected = {(zone, quarter.replace(tzinfo=None)): sums for (zone, quarter), sums in count_fares(events).items()}

    def compute(frame: DataFrame) -> DataFrame:
        rows = fares(orders_of(frame))
        return rows.selectExpr("zone", "cast(quarter_hour AS timestamp_ntz)", "orders", "rides", "fares_cents")

    assert computed(spark, compute, split(events, cuts), keys=2) == expected
    assert computed(spark, compute, [events], keys=2) == expected


@few
@given(orders=st.lists(rides(), min_size=3, max_size=8), shuffle=st.randoms(use_true_random=False), cuts=cuts)
def test_the_time_driven_in_any_ranges_is_that_of_the_whole(
    spark: SparkSession, orders: list[list[dict[str, Any]]], shuffle: Any, cuts: list[int]
) -> None:
    events = interleaved(orders, shuffle)
    expected: Sums = count_utilisation(events)

    def compute(frame: DataFrame) -> DataFrame:
        return utilisation(orders_of(frame))

    assert computed(spark, compute, split(events, cuts), keys=2) == expected
    assert computed(spark, compute, [events], keys=2) == expected


@few
@given(events=st.lists(changes, min_size=1, max_size=20), cuts=cuts)
def test_churn_of_any_ranges_is_that_of_the_whole(
    spark: SparkSession, events: list[dict[str, Any]], cuts: list[int]
) -> None:
    expected: Sums = count(events)

    def compute(frame: DataFrame) -> DataFrame:
        return churn(changes_of(frame))

    assert computed(spark, compute, split(events, cuts), keys=3) == expected
    assert computed(spark, compute, [events], keys=3) == expected


def test_a_ride_is_time_driven_from_its_acceptance_to_its_end(spark: SparkSession) -> None:
    def event(change: str, minutes: int, driver: str | None = "ann") -> dict[str, Any]:
        at = START + timedelta(minutes=minutes)
        return {"change": change, "driver": driver, "placed_at": START.isoformat(), "at": at.isoformat()}

    ride = [event("placed", 0, None), event("accepted", 5), event("completed", 35)]
    unaccepted = [event("placed", 0, None), event("cancelled", 5, None)]

    def compute(frame: DataFrame) -> DataFrame:
        return utilisation(orders_of(frame))

    # It ended after midnight, and is one of the day on which it was placed.
    expected = {("ann", START.date()): (1, 1, 1, 30 * 60 * 1_000_000)}
    assert computed(spark, compute, [[*ride, *unaccepted]], keys=2) == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda events: churn(changes_of(events)),
        lambda events: fares(orders_of(events)),
        lambda events: utilisation(orders_of(events)),
    ],
)
def test_an_erased_event_has_no_part_in_any_sum(spark: SparkSession, compute: Callable[[DataFrame], DataFrame]) -> None:
    assert compute(spark.createDataFrame([(None,)], "value binary")).collect() == []


def interleaved(orders: Sequence[Sequence[dict[str, Any]]], shuffle: Any) -> list[dict[str, Any]]:
    """The events of all orders in some order that keeps each order's own."""
    waiting = [list(events) for events in orders]
    events = []
    while waiting:
        chosen = shuffle.choice(waiting)
        events.append(chosen.pop(0))
        waiting = [each for each in waiting if each]
    return events
