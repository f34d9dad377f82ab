"""The fault run in small, and that its verdict names what it looks for."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from tests.log import faults
from tests.log.faults import Settings

SMALL = Settings(events=15_000, seed=20250613, partitions=4, kills=10, restarts=2, repartitionings=3, deadline=150.0)


def test_nothing_is_lost_repeated_or_reordered_though_processes_are_killed_and_the_server_restarts() -> None:
    figures = faults.run(SMALL)
    assert figures.violations == [], f"repeat it with --seed {SMALL.seed}"
    assert figures.restarts == SMALL.restarts
    assert len(figures.layouts) > 2
    # One that has published everything is not killed any more.
    assert figures.kills.total() >= SMALL.kills - 2


def test_a_seed_decides_all_faults() -> None:
    names = {player.name: player.kind for player in faults.players(SMALL, Path("home"))}
    planned = faults.faults(SMALL, names)
    assert planned == faults.faults(SMALL, names)
    assert planned != faults.faults(replace(SMALL, seed=1), names)
    assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
    killed = [names[fault.name] for fault in planned if fault.name not in (faults.SERVER, faults.PARTITIONS)]
    assert sorted(killed) == sorted(set(names.values())), "ten kills are one of each kind"
    assert len(planned) == SMALL.kills + SMALL.restarts + SMALL.repartitionings


def test_publishers_share_all_events() -> None:
    for events in (1_000, 15_000, 1_000_001):
        publishers = faults.publishers(replace(SMALL, events=events))
        assert sum(publisher.events for publisher in publishers) == events
        assert all(sum(publisher.of_keys().values()) == publisher.events for publisher in publishers)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0, 1, 2], []),
        ([0, 2], ["number 2 of a at offset 2 comes before 1, or 1 is lost"]),
        ([0, 1, 1, 2], ["number 1 of a comes again or late, at offset 3, after 1"]),
        (
            [0, 2, 1],
            [
                "number 2 of a at offset 2 comes before 1, or 1 is lost",
                "number 1 of a comes again or late, at offset 3",
            ],
        ),
        ([0, 1], ["a ends with 2 of 3 events"]),
        ([], ["a ends with 0 of 3 events"]),
    ],
)
def test_the_verdict_names_numbers_that_are_lost_repeated_or_out_of_order(numbers: list[int], said: list[str]) -> None:
    rows = [("a", number, 0, offset) for offset, number in enumerate(numbers, start=1)]
    found = list(faults.wrong_order("the log", rows, {"a": 3}))
    assert len(found) == len(said)
    for violation, expected in zip(found, said, strict=True):
        assert violation.startswith(f"the log: {expected}")


def test_the_verdict_names_events_that_nobody_published() -> None:
    assert list(faults.wrong_order("the log", [("b", 0, 0, 7)], {})) == [
        "the log: nobody publishes key 'b', which is at offset 7"
    ]


@pytest.mark.parametrize(("seen", "place"), [([1, 3, 2], 1), ([1, 2], 2), ([1, 2, 3, 3], 3), ([], 0)])
def test_the_verdict_names_where_a_reader_saw_something_else(seen: list[int], place: int) -> None:
    (said,) = faults.difference("the reader", array("q", seen), array("q", [1, 2, 3]))
    assert said.startswith(f"the reader: at place {place} is offset")


def test_a_reader_that_saw_the_log_is_no_violation() -> None:
    assert list(faults.difference("the reader", array("q", [1, 2]), array("q", [1, 2]))) == []
