"""Durations, sizes, times and starts as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from eventsql_orchestration.cli import main
from eventsql_orchestration.cli.parameters import DURATION, MOMENT, PLACE, SIZE, TIME, Number, Seconds
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.topics.positions import AtOffset, AtTime, Back, Earliest, Latest
from tests.cli.test_plans import commands

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)

READ: list[tuple[click.ParamType[Any], dict[str, object]]] = [
    (DURATION, {
        "15m": timedelta(minutes=15), "2h": timedelta(hours=2), "1h30m": timedelta(minutes=90), "7d": timedelta(days=7),
        "2w3d": timedelta(days=17), "90s": timedelta(seconds=90), "0.5s": timedelta(seconds=0.5),
        "1.5h": timedelta(minutes=90), "PT1H": timedelta(hours=1), "PT1H30M": timedelta(minutes=90),
        "P7D": timedelta(days=7), "P2W": timedelta(days=14), "P1DT0.5S": timedelta(days=1, seconds=0.5),
    }),
    (Seconds(0.1, 3_600), {"90": 90.0, "0.5": 0.5, "90s": 90.0, "1m30s": 90.0, "PT1H": 3_600.0}),
    (SIZE, {
        "4096": 4096, "1B": 1, "10GiB": 10 * 2**30, "10 gib": 10 * 2**30, "500MB": 500_000_000, "1.5kB": 1_500,
        "2TiB": 2**41, "9007199254740993": 9007199254740993,
    }),
    (TIME, {
        "2026-05-01T12:00:00Z": NOON, "2026-05-01T14:00:00+02:00": NOON, "2026-05-01 12:00Z": NOON,
        "20260501T120000Z": NOON,
    }),
    (PLACE, {
        "earliest": Earliest(), "latest": Latest(), "0": AtOffset(0), "123": AtOffset(123),
        "2026-05-01T12:00:00Z": AtTime(NOON), "1h30m": Back(timedelta(minutes=90)), "PT1H": Back(timedelta(hours=1)),
    }),
]  # fmt: skip

REFUSED: list[tuple[click.ParamType[Any], tuple[str, ...]]] = [
    (DURATION, (
        "", "15", "m", "15 m", "-15m", "15M", "m15", "30m1h", "P", "PT", "P1DT", "P1Y", "P1M", "pt1h", "1e3s", "٣m",
        f"{'9' * 400}d",
    )),
    (Seconds(0.1, 3_600), ("", "0", "0s", "2h", "3601", "nan", "1y", "soon")),
    (SIZE, ("", "GiB", "-1", "10 G", "10GBit", "1e9", "1,000")),
    (TIME, ("2026-05-01T12:00:00", "2026-05-01", "noon", "2026-13-01T00:00:00Z", "")),
    (MOMENT, ("", "now", "-2h", "1000000d", "2026-05-01")),
    (PLACE, ("", "now", "Earliest", "1.5", "2026-05-01", "PT", "1h of them", "²")),
    (Number(0, min_open=True), ("nan", "inf", "1e400", "-1", "0", "x")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), READ, ids=lambda value: getattr(value, "name", ""))
def test_a_value_is_read(kind: click.ParamType[Any], values: dict[str, object]) -> None:
    assert {text: kind.convert(text, None, None) for text in values} == values


@pytest.mark.parametrize(
    ("kind", "text"),
    [pytest.param(kind, text, id=f"{kind.name} {text[:20]}") for kind, texts in REFUSED for text in texts],
)
def test_a_text_that_is_no_value_is_refused(kind: click.ParamType[Any], text: str) -> None:
    with pytest.raises(click.BadParameter):
        kind.convert(text, None, None)


def options() -> dict[str, click.Option]:
    """The options of the program's commands, by command and option; `bench` measures for a number of seconds."""
    return {
        f"{name} {option.opts[0]}": option
        for name, command in commands(main)
        for option in command.params
        if isinstance(option, click.Option) and not name.startswith("bench ")
    }


def test_every_option_of_one_meaning_takes_the_same_forms() -> None:
    # A person gives times and durations of each command in the same way.
    found = options()
    seconds = {name: option.type for name, option in found.items() if option.metavar == "SECONDS"}
    assert {type(kind) for kind in seconds.values()} == {Seconds}, seconds
    ends = {name: option.type for name, option in found.items() if name.split()[-1] in {"--since", "--until"}}
    assert set(ends.values()) == {MOMENT}, ends


@pytest.mark.parametrize(("kind", "text"), [(TIME, "0001-01-01T00:00:00+02:00"), (PLACE, "-1"), (PLACE, str(2**63))])
def test_a_value_out_of_bounds_is_refused(kind: click.ParamType[Any], text: str) -> None:
    with pytest.raises(ValidationError):
        kind.convert(text, None, None)
