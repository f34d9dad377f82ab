"""Where events come fast, a consumer's partitions rest between two passes; where they come slowly, they do not."""

from __future__ import annotations

import time

import pytest

from eventsql_orchestration.log.pacing import LEAST_REST, MOST_PASSES, MOST_REST, REST_RATE, Pace, Paces


def rests(pace: Pace, *, rate: float, events: int, seconds: float = 2.0) -> list[float]:
    """The rests after passes over so many events each, which come at a rate, from when that has been so for a while."""
    began = time.monotonic()
    passes = [began + number * events / rate for number in range(round(seconds * rate / events))]
    found = [(now, pace.rest(events, now)) for now in passes]
    return [0.0 if due is None else due - now for now, due in found[len(found) // 2 :]]


@pytest.mark.parametrize("rate", [10.0, 1_000.0, 0.9 * REST_RATE])
def test_where_events_come_slowly_a_partition_does_not_rest(rate: float) -> None:
    pace = Pace()
    pace.join(10)
    assert max(rests(pace, rate=rate, events=1)) == 0.0


@pytest.mark.parametrize(
    ("partitions", "rest"),
    [(1, LEAST_REST), (10, LEAST_REST), (30, 30 / MOST_PASSES), (500, MOST_REST)],
)
def test_where_they_come_fast_it_rests_so_long_that_passes_are_few(partitions: int, rest: float) -> None:
    pace = Pace()
    pace.join(partitions)
    found = rests(pace, rate=10 * REST_RATE, events=100)
    assert min(found) >= rest / 2 - 1e-6
    assert max(found) <= rest * 3 / 2 + 1e-6
    assert sum(found) / len(found) == pytest.approx(rest, rel=0.2)


def test_partitions_that_rest_are_due_together() -> None:
    pace = Pace()
    pace.join(10)
    rests(pace, rate=10 * REST_RATE, events=100)
    now = time.monotonic() + 2.0
    first = pace.rest(10_000, now)
    assert first is not None
    assert pace.rest(10_000, first - LEAST_REST * 0.9) == pytest.approx(first)


def test_a_pass_that_found_nothing_does_not_make_it_faster() -> None:
    pace = Pace()
    pace.join(1)
    now = time.monotonic()
    assert [pace.rest(0, now + number / 1_000) for number in range(1_000)] == [None] * 1_000


def test_partitions_that_are_not_consumed_any_more_do_not_count() -> None:
    pace = Pace()
    pace.join(500)
    pace.join(-490)
    assert max(rests(pace, rate=10 * REST_RATE, events=100)) <= LEAST_REST * 3 / 2 + 1e-6


def test_one_consumer_has_one_pace_as_long_as_somebody_keeps_it() -> None:
    paces = Paces()
    one = paces.of("orders", "mailer")
    one.join(7)
    assert paces.of("orders", "mailer") is one
    assert paces.of("orders", "fares") is not one
    del one
    assert max(rests(paces.of("orders", "mailer"), rate=10 * REST_RATE, events=100)) <= LEAST_REST * 3 / 2 + 1e-6
