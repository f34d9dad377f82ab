"""Retention bounds a log by age, size and number, or by nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eventsql_orchestration import Topic
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import MAX_AGE, Retention


def test_retention_without_a_bound_is_for_ever() -> None:
    assert Retention().for_ever
    for bounded in (
        Retention(seconds=0.5),
        Retention(bytes=1),
        Retention(events=1),
        Retention(MAX_AGE.total_seconds()),
    ):
        assert not bounded.for_ever


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Retention(seconds=0), "above 0"),
        (lambda: Retention(seconds=-1), "above 0"),
        (lambda: Retention(seconds=4e9), "at most a hundred years"),
        (lambda: Retention(seconds=float("nan")), "a number of seconds"),
        (lambda: Retention(seconds=float("inf")), "a number of seconds"),
        (lambda: Retention(seconds="7d"), "a number of seconds"),  # type: ignore[arg-type]  # refused
        (lambda: Retention(bytes=0), "size in bytes"),
        (lambda: Retention(bytes=1.5), "size in bytes"),  # type: ignore[arg-type]  # refused
        (lambda: Retention(events=0), "number of events"),
        (lambda: Retention(events=2**63), "number of events"),
    ],
)
def test_impossible_bounds_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make()


def test_a_topic_is_the_same_whatever_is_kept_of_it() -> None:
    assert Topic("orders", 3, retention=Retention(events=1)) == Topic("orders", 3)
