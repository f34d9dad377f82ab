"""Durations, sizes, times and starts as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from eventsql_orchestration.cli.parameters import Duration, Size, StartPlace, Time
from eventsql_orchestration.errors import ValidationError


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("1h30m", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2w3d", timedelta(days=17)),
        ("90s", timedelta(seconds=90)),
        ("0.5s", timedelta(seconds=0.5)),
        ("1.5h", timedelta(minutes=90)),
        ("PT1H", timedelta(hours=1)),
        ("PT1H30M", timedelta(minutes=90)),
        ("P7D", timedelta(days=7)),
        ("P2W", timedelta(days=14)),
        ("P1DT0.5S", timedelta(days=1, seconds=0.5)),
    ],
)
def test_a_duration_is_read(text: str, duration: timedelta) -> None:
    assert Duration().convert(text, None, None) == duration


@pytest.mark.parametrize(
    "text",
    [
        "",
        "15",
        "m",
        "15 m",
        "-15m",
        "15M",
        "m15",
        "30m1h",
        "P",
        "PT",
        "P1DT",
        "P1Y",
        "P1M",
        "pt1h",
        "1e3s",
        "٣m",
        f"{'9' * 400}d",
    ],
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="duration"):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("10GiB", 10 * 2**30),
        ("10 gib", 10 * 2**30),
        ("500MB", 500_000_000),
        ("1.5kB", 1_500),
        ("2TiB", 2**41),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "10 G", "10GBit", "1e9", "1,000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a size such as"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    "text", ["2026-05-01T12:00:00Z", "2026-05-01T14:00:00+02:00", "2026-05-01 12:00Z", "20260501T120000Z"]
)
def test_a_time_is_read_with_its_zone(text: str) -> None:
    assert Time().convert(text, None, None) == datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2026-05-01T12:00:00", "has no time zone"),
        ("2026-05-01", "has no time zone"),
        ("noon", "is not a time"),
        ("2026-13-01T00:00:00Z", "is not a time"),
        ("", "is not a time"),
    ],
)
def test_a_time_without_a_zone_and_what_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        Time().convert(text, None, None)


def test_a_time_that_lies_outside_of_all_years_is_refused() -> None:
    with pytest.raises(ValidationError, match="years 1 to 9999"):
        Time().convert("0001-01-01T00:00:00+02:00", None, None)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("0", 0),
        ("123", 123),
        ("2026-05-01T12:00:00Z", datetime(2026, 5, 1, 12, tzinfo=UTC)),
    ],
)
def test_a_start_is_read(text: str, start: Any) -> None:
    assert StartPlace().convert(text, None, None) == start


@pytest.mark.parametrize("text", ["", "now", "Earliest", "1.5", "2026-05-01"])
def test_what_is_no_start_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        StartPlace().convert(text, None, None)
