"""While events come fast, a consumer's partitions rest between two polls. While events come slowly, they do not."""

from __future__ import annotations

import time

import pytest

from eventsql_orchestration.consuming.throttle import LEAST_REST, MOST_POLLS, MOST_REST, REST_RATE, Throttle, Throttles


def rests(throttle: Throttle, *, rate: float, events: int, seconds: float = 2.0) -> list[float]:
    """The rests after polls of so many events each at a steady rate, without the first ones."""
    began = time.monotonic()
    polls = [began + number * events / rate for number in range(round(seconds * rate / events))]
    found = [(now, throttle.rest(events, now)) for now in polls]
    return [0.0 if due is None else due - now for now, due in found[len(found) // 2 :]]


@pytest.mark.parametrize("rate", [10.0, 1_000.0, 0.9 * REST_RATE])
def test_a_partition_does_not_rest_while_events_come_slowly(rate: float) -> None:
    throttle = Throttle()
    throttle.join(10)
    assert max(rests(throttle, rate=rate, events=1)) == 0.0


@pytest.mark.parametrize(
    ("partitions", "rest"),
    [(1, LEAST_REST), (10, LEAST_REST), (30, 30 / MOST_POLLS), (500, MOST_REST)],
)
def test_a_partition_rests_while_events_come_fast_so_that_polls_are_few(partitions: int, rest: float) -> None:
    throttle = Throttle()
    throttle.join(partitions)
    found = rests(throttle, rate=10 * REST_RATE, events=100)
    assert min(found) >= rest / 2 - 1e-6
    assert max(found) <= rest * 3 / 2 + 1e-6
    assert sum(found) / len(found) == pytest.approx(rest, rel=0.2)


def test_partitions_rest_for_longer_the_faster_events_come() -> None:
    throttle = Throttle()
    throttle.join(1)
    found = rests(throttle, rate=1.5 * REST_RATE, events=1)
    assert sum(found) / len(found) == pytest.approx(LEAST_REST / 2, rel=0.2)


def test_partitions_that_rest_are_due_together() -> None:
    throttle = Throttle()
    throttle.join(10)
    rests(throttle, rate=10 * REST_RATE, events=100)
    now = time.monotonic() + 2.0
    first = throttle.rest(10_000, now)
    assert first is not None
    assert throttle.rest(10_000, first - LEAST_REST * 0.9) == pytest.approx(first, abs=1e-6)


def test_a_first_batch_of_any_size_is_followed_by_a_rest_or_by_none() -> None:
    """A rest at exactly the rate from which partitions rest would have no length."""
    now = time.monotonic()
    resting = [Throttle().rest(events, now) is not None for events in range(1_000)]
    assert resting == sorted(resting)
    assert {*resting} == {False, True}


def test_a_poll_without_events_does_not_count_as_faster() -> None:
    throttle = Throttle()
    throttle.join(1)
    now = time.monotonic()
    assert [throttle.rest(0, now + number / 1_000) for number in range(1_000)] == [None] * 1_000


def test_partitions_that_are_not_consumed_any_more_do_not_count() -> None:
    throttle = Throttle()
    throttle.join(500)
    throttle.join(-490)
    assert max(rests(throttle, rate=10 * REST_RATE, events=100)) <= LEAST_REST * 3 / 2 + 1e-6


def test_a_consumer_has_one_throttle_while_a_consumption_uses_it() -> None:
    throttles = Throttles()
    one = throttles.of("orders", "mailer")
    one.join(500)
    assert throttles.of("orders", "mailer") is one
    assert throttles.of("orders", "fares") is not one
    del one
    assert max(rests(throttles.of("orders", "mailer"), rate=10 * REST_RATE, events=100)) <= LEAST_REST * 3 / 2 + 1e-6
