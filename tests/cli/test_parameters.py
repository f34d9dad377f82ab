"""Durations, sizes, times and starts as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest

from eventsql_orchestration.cli.parameters import Duration, LogPlace, Number, Size, Time
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.positions import AtOffset, AtTime, Back, Earliest, Latest, Place


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
    ("text", "place"),
    [
        ("earliest", Earliest()),
        ("latest", Latest()),
        ("0", AtOffset(0)),
        ("123", AtOffset(123)),
        ("2026-05-01T12:00:00Z", AtTime(datetime(2026, 5, 1, 12, tzinfo=UTC))),
        ("1h30m", Back(timedelta(minutes=90))),
        ("PT1H", Back(timedelta(hours=1))),
    ],
)
def test_a_place_in_a_log_is_read(text: str, place: Place) -> None:
    assert LogPlace().convert(text, None, None) == place


@pytest.mark.parametrize("text", ["", "now", "Earliest", "1.5", "2026-05-01", "PT", "1h of them", "²"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        LogPlace().convert(text, None, None)


def test_an_offset_that_no_event_has_is_refused() -> None:
    for text in ("-1", str(2**63)):
        with pytest.raises(ValidationError, match="an offset"):
            LogPlace().convert(text, None, None)


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "-1", "0", "x"])
def test_what_is_no_number_within_bounds_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number(0, min_open=True).convert(text, None, None)
