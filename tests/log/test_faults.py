"""The fault run in small, and that its verdict names what it looks for."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from tests.log import faults, plan, verdict
from tests.log.plan import Settings
from tests.log.verdict import AS_A_QUEUE, CONSUMERS
from tests.poolers.pgbouncer import MISSING, PROGRAM

SMALL = Settings(events=15_000, seed=20250613, partitions=4, kills=11, restarts=2, repartitionings=3)
CHANGING = replace(SMALL, events=6_000, changes=3)

SHARDED = replace(
    SMALL, events=4_000, seed=20261121, shards=2, partitions=3, kills=6, restarts=1, repartitionings=2, additions=2
)

AS_QUEUE = replace(CHANGING, events=2_000, restarts=4, consumers=AS_A_QUEUE)


@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(
    "settings",
    [
        # Most of a run's processor time is that of its faults: all its processes go on meanwhile.
        pytest.param(
            replace(SHARDED, events=1_200, repartitionings=1, changes=2, additions=1),
            id="a shard that is added, and changes of the form",
        ),
        pytest.param(
            replace(SHARDED, events=2_500, changes=2),
            id="shards that are added, and changes of the form",
            marks=pytest.mark.nightly,
        ),
        pytest.param(SHARDED, id="shards that are added", marks=pytest.mark.nightly),
        pytest.param(CHANGING, id="changes of the form", marks=pytest.mark.nightly),
        pytest.param(SMALL, id="more events", marks=pytest.mark.nightly),
        pytest.param(replace(SMALL, changes=9), id="more changes of the form", marks=pytest.mark.nightly),
        pytest.param(
            replace(SMALL, storage="rows", seed=20261123, changes=8),
            id="changes of the form from rows",
            marks=pytest.mark.nightly,
        ),
        pytest.param(replace(SMALL, storage="rows"), id="rows", marks=pytest.mark.nightly),
        pytest.param(AS_QUEUE, id="as a queue", marks=pytest.mark.nightly),
        pytest.param(
            replace(SHARDED, events=2_000, consumers=AS_A_QUEUE), id="as a queue on shards", marks=pytest.mark.nightly
        ),
        pytest.param(
            replace(CHANGING, restarts=0, changes=1, standby=True, consumers={**CONSUMERS, **AS_A_QUEUE}),
            id="a standby that is promoted",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            replace(AS_QUEUE, pooled=True),
            id="as a queue behind a pooler",
            marks=[pytest.mark.nightly, pytest.mark.skipif(PROGRAM is None, reason=MISSING)],
        ),
    ],
)
def test_nothing_is_lost_repeated_or_reordered_though_processes_are_killed_and_servers_restart(
    settings: Settings,
) -> None:
    figures = faults.run(settings)
    assert figures.violations == [], f"repeat it with --seed {settings.seed}"
    assert figures.restarts.total() == settings.restarts + settings.standby
    assert figures.changes == settings.changes
    assert len(figures.layouts) >= settings.repartitionings
    # One that has published everything is not killed any more.
    assert figures.kills.total() >= settings.kills - 2
    assert figures.shards == settings.shards + settings.additions
    # Some keys moved in the middle of their events.
    assert bool(figures.moved) == (settings.shards > 1)


def test_a_seed_decides_all_faults() -> None:
    names = {player.name: player.kind for player in plan.players(SMALL, Path("home"))}
    planned = plan.faults(SMALL, names)
    assert planned == plan.faults(SMALL, names)
    assert planned != plan.faults(replace(SMALL, seed=1), names)
    assert [fault.at for fault in planned] == sorted(fault.at for fault in planned)
    killed = [names[fault.name] for fault in planned if fault.name not in (plan.SERVER, plan.PARTITIONS)]
    assert sorted(killed) == sorted(set(names.values())), "eleven kills are one of each kind"
    assert len(planned) == SMALL.kills + SMALL.restarts + SMALL.repartitionings


def test_publishers_share_all_events() -> None:
    for events in (1_000, 15_000, 1_000_001):
        publishers = plan.publishers(replace(SMALL, events=events))
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
    found = list(verdict.wrong_order("the log", rows, {"a": 3}))
    assert len(found) == len(said)
    for violation, expected in zip(found, said, strict=True):
        assert violation.startswith(f"the log: {expected}")


def test_the_verdict_names_events_that_nobody_published() -> None:
    assert list(verdict.wrong_order("the log", [("b", 0, 0, 7)], {})) == [
        "the log: nobody publishes key 'b', which is at offset 7"
    ]


@pytest.mark.parametrize(("seen", "place"), [([1, 3, 2], 1), ([1, 2], 2), ([1, 2, 3, 3], 3), ([], 0)])
def test_the_verdict_names_where_a_reader_saw_something_else(seen: list[int], place: int) -> None:
    (said,) = verdict.difference("the reader", array("q", seen), array("q", [1, 2, 3]))
    assert said.startswith(f"the reader: at place {place} is offset")


def test_a_reader_that_saw_the_log_is_no_violation() -> None:
    assert list(verdict.difference("the reader", array("q", [1, 2]), array("q", [1, 2]))) == []


@pytest.mark.parametrize(
    ("parts", "violates"),
    [
        ([(0, [0, 1]), (1, [2, 3])], False),
        ([(0, [0, 1, 2, 3])], False),
        ([(0, [0, 1]), (1, [3, 2])], True),
        ([(0, [2, 3]), (1, [0, 1])], True),
        ([(0, [0, 1, 2]), (1, [2, 3])], True),
        ([(0, [0, 1]), (1, [3])], True),
    ],
)
def test_the_verdict_names_a_key_whose_events_do_not_follow_each_other_over_its_shards(
    parts: list[tuple[int, list[int]]], violates: bool
) -> None:
    said = list(verdict.wrong_keys({"a": parts}, {"a": 4}))
    assert [each.startswith("the logs: a has") for each in said] == [True] * violates
