"""The fault run over shards in small, and that its verdict names what it looks for."""

from __future__ import annotations

import pytest

from tests.log.faults import Settings
from tests.shards import faults

SMALL = Settings(
    events=4_000, seed=20261121, partitions=3, kills=6, restarts=1, repartitionings=2, additions=2, deadline=150.0
)


def test_nothing_is_lost_repeated_or_reordered_though_processes_and_servers_are_killed_while_shards_are_added() -> None:
    outcome = faults.run(SMALL)
    assert outcome.figures.violations == [], f"repeat it with --seed {SMALL.seed}"
    assert outcome.shards == faults.FIRST + SMALL.additions
    assert outcome.figures.restarts == SMALL.restarts
    assert len(outcome.figures.layouts) > 1
    assert outcome.figures.kills.total() >= SMALL.kills - 2
    assert outcome.moved, "some keys moved in the middle of their events"


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
    said = list(faults.wrong_keys({"a": parts}, {"a": 4}))
    assert [each.startswith("the logs: a has") for each in said] == [True] * violates
