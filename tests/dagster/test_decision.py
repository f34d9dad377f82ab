"""What a tick decides, as a table: without Dagster and without a database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration.consuming.claims import Claim, LastClaim, PartitionClaims
from eventsql_orchestration.dagster import RunLimits, TickOptions
from eventsql_orchestration.dagster.consumers.decision import (
    Decision,
    PartitionState,
    RequestSuccessor,
    RunState,
    TryClaim,
    Wait,
    decide,
    draining_run,
    needs_attention,
    needs_late_runs,
)
from eventsql_orchestration.dagster.consumers.handover import PATIENCE
from eventsql_orchestration.dagster.tags import CLAIM_TAG, PARTITION_TAG, REPLAY_TAG, SHARED_TAG
from eventsql_orchestration.model import OffsetRange

LIMITS = RunLimits(drain_seconds=20.0, drain_idle=1.0)
TICKS = TickOptions()
STATUS = dg.DagsterRunStatus
DRAINS = {PARTITION_TAG: "0", CLAIM_TAG: "1"}


def claim(owner: str = "sensor s", *, claim_id: int = 1) -> Claim:
    return Claim(
        id=claim_id, consumer="c", range=OffsetRange("orders", 0, 10, 20), events=10, owner=owner, epoch=1, position=10
    )


def run(status: STATUS = STATUS.STARTED, **known: Any) -> RunState:
    return RunState("r", status, **{"tags": DRAINS, **known})


def successor(status: STATUS, **known: Any) -> RunState:
    return RunState("s", status, **known)


def decided(**known: Any) -> Decision:
    return decide(PartitionState(**known), LIMITS, TICKS)


ADOPTED = claim("run r")
OF_PARENT = claim("run p")
"""A claim whose owner has ended and is executed again."""

LATER = claim("run r", claim_id=2)
"""A claim that the run made while it drained."""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        # No run has the partition.
        ({}, TryClaim()),
        # A claim without a run: its tick may not be stored yet.
        ({"claim": claim()}, TryClaim()),
        # A run that has adopted its claim renews the lease, as long as it lives.
        ({"claim": ADOPTED, "run": run()}, TryClaim(presumed_dead="r")),
        ({"claim": ADOPTED, "run": run(unchanged=1e6)}, TryClaim(presumed_dead="r")),
        # Its owner has died, and a retry has no process yet.
        ({"claim": OF_PARENT, "run": run(STATUS.NOT_STARTED)}, TryClaim()),
        ({"claim": OF_PARENT, "run": run(STATUS.QUEUED)}, TryClaim()),
        ({"claim": OF_PARENT, "run": run(waits=True)}, TryClaim()),
        # A retry that is launched, and does not start or does not adopt the claim.
        ({"claim": OF_PARENT, "run": run(STATUS.STARTING, unchanged=301.0)}, TryClaim(True, "r")),
        ({"claim": OF_PARENT, "run": run(unchanged=61.0)}, TryClaim(True, "r")),
        # Its run has died, and Dagster knows it.
        ({"claim": ADOPTED, "run": run(STATUS.FAILURE)}, TryClaim(release=True)),
        ({"claim": claim(), "run": run(STATUS.CANCELED)}, TryClaim(release=True)),
        ({"claim": claim(), "run": run(STATUS.SUCCESS)}, TryClaim(release=True)),
        # A run that has started and does not adopt its claim.
        ({"claim": claim(), "run": run(unchanged=61.0)}, TryClaim(release=True, presumed_dead="r")),
        ({"claim": claim(), "run": run(unchanged=121.0), "late": 1}, TryClaim(release=True, presumed_dead="r")),
        ({"claim": claim(), "run": run(unchanged=961.0), "late": 99}, TryClaim(release=True, presumed_dead="r")),
        # A run that does not start.
        ({"claim": claim(), "run": run(STATUS.STARTING, unchanged=301.0)}, TryClaim(True, "r")),
        ({"claim": claim(), "run": run(STATUS.NOT_STARTED, unchanged=301.0)}, TryClaim(True, "r")),
        # Runs that fail at the same offset: the pauses of the first two, and the longest, are over.
        ({"claim": ADOPTED, "run": run(STATUS.FAILURE), "failures": 1}, TryClaim(release=True)),
        ({"claim": ADOPTED, "run": run(STATUS.FAILURE), "failures": 2, "since_failure": 10.0}, TryClaim(release=True)),
        (
            {"claim": ADOPTED, "run": run(STATUS.FAILURE), "failures": 99, "since_failure": 600.0},
            TryClaim(release=True),
        ),
        # A run that drains near the end of its window.
        ({"drains": "r", "run": run(age=11.0)}, RequestSuccessor("r")),
        ({"drains": "r", "run": run(age=25.0)}, RequestSuccessor("r")),
        # A run that may not drain any more, or does not drain this partition alone.
        ({"drains": "r", "run": run(age=25.1)}, TryClaim()),
        ({"drains": "r"}, TryClaim()),
        ({"drains": "r", "run": run(STATUS.FAILURE)}, TryClaim()),
        ({"drains": "r", "run": run(waits=True, age=11.0)}, TryClaim()),
        ({"drains": "r", "run": run(tags={})}, TryClaim()),
        ({"drains": "r", "run": run(tags={**DRAINS, SHARED_TAG: "true"})}, TryClaim()),
        ({"drains": "r", "run": run(tags={**DRAINS, REPLAY_TAG: "true"})}, TryClaim()),
        # A successor that will not come.
        (
            {"drains": "r", "run": run(age=11.0), "successor": successor(STATUS.STARTING, unchanged=301.0)},
            RequestSuccessor("r"),
        ),
        (
            {"drains": "r", "run": run(age=11.0), "successor": successor(STATUS.STARTED, age=PATIENCE + 5.0)},
            RequestSuccessor("r"),
        ),
        # A run that drains has a further claim, and its window ends soon.
        (
            {"claim": LATER, "drains": "r", "run": run(age=11.0)},
            TryClaim(presumed_dead="r", when_leased=RequestSuccessor("r")),
        ),
    ],
)
def test_a_tick_claims_or_requests_a_successor(state: dict[str, Any], expected: Decision) -> None:
    assert decided(**state) == expected


@pytest.mark.parametrize(
    ("state", "reason", "prolongs"),
    [
        ({"claim": claim(), "run": run(STATUS.QUEUED, unchanged=1e6)}, "run r of claim 1 is queued", True),
        ({"claim": claim(), "run": run(STATUS.NOT_STARTED)}, "run r of claim 1 is not started", True),
        ({"claim": claim(), "run": run(STATUS.STARTING, unchanged=299.0)}, "run r of claim 1 is starting", True),
        ({"claim": claim(), "run": run(unchanged=60.0)}, "run r of claim 1 is started", True),
        ({"claim": claim(), "run": run(unchanged=119.0), "late": 1}, "run r of claim 1 is started", True),
        ({"claim": OF_PARENT, "run": run(STATUS.STARTING, unchanged=299.0)}, "run r of claim 1 is starting", True),
        ({"claim": OF_PARENT, "run": run(unchanged=59.0)}, "run r of claim 1 is started", True),
        (
            {"claim": ADOPTED, "run": run(STATUS.FAILURE), "failures": 2, "since_failure": 9.0},
            "2 runs failed from offset 10, the last run is r; the next is requested in 1 s",
            False,
        ),
        (
            {"claim": ADOPTED, "run": run(STATUS.FAILURE), "failures": 3, "since_failure": 5.0},
            "3 runs failed from offset 10, the last run is r; the next is requested in 15 s",
            False,
        ),
        ({"drains": "r", "run": run(age=5.0)}, "run r drains the partition, for 15 s more", False),
        ({"drains": "r", "successor": successor(STATUS.QUEUED, unchanged=1e6)}, "run s takes over from run r", False),
        ({"drains": "r", "successor": successor(STATUS.STARTING)}, "run s takes over from run r", False),
        (
            {"drains": "r", "successor": successor(STATUS.STARTED, waits=True, age=1e6)},
            "run s takes over from run r",
            False,
        ),
        (
            {"drains": "r", "run": run(age=15.0), "successor": successor(STATUS.STARTED, age=PATIENCE)},
            "run s takes over from run r",
            False,
        ),
    ],
)
def test_a_tick_waits_for_a_run_and_keeps_its_claim(state: dict[str, Any], reason: str, prolongs: bool) -> None:
    assert decided(**state) == Wait(reason, prolong=prolongs)


@pytest.mark.parametrize(
    ("window", "age", "requested"),
    [
        # A run that is younger than `lead` may still end for want of events.
        (12.0, 8.9, False),
        (12.0, 9.0, True),
        # The window lasts longer than `lead`.
        (40.0, 30.9, False),
        (40.0, 31.0, True),
    ],
)
def test_a_successor_is_requested_near_the_end_of_the_window_of_a_run_with_steady_traffic(
    window: float, age: float, *, requested: bool
) -> None:
    state = PartitionState(drains="r", run=run(age=age))
    decision = decide(state, replace(LIMITS, drain_seconds=window), TICKS)
    assert isinstance(decision, RequestSuccessor if requested else Wait)


@pytest.mark.parametrize(
    ("live", "of", "needed"),
    [
        (claim(), run(unchanged=60.1), True),
        (claim(), run(unchanged=60.0), False),
        (claim(), run(STATUS.STARTING, unchanged=301.0), False),
        (ADOPTED, run(unchanged=61.0), False),
    ],
)
def test_late_runs_are_counted_only_for_a_run_that_takes_long_to_adopt_its_claim(
    live: Claim, of: RunState, *, needed: bool
) -> None:
    assert needs_late_runs(live, of, TICKS) is needed


@pytest.mark.parametrize(
    ("live", "of", "last", "expected"),
    [
        (None, None, None, None),
        (None, None, LastClaim("run r", 6.0), "r"),
        (None, None, LastClaim("run r", 6.1), None),
        (None, None, LastClaim("sensor s", 0.0), None),
        # With a live claim, a run drains if it was requested for another claim.
        (LATER, run(age=11.0), None, "r"),
        (LATER, run(age=8.0), None, None),
        (LATER, run(STATUS.FAILURE, age=11.0), None, None),
        (ADOPTED, run(age=11.0), None, None),
        (LATER, None, None, None),
        (claim("run p", claim_id=2), run(age=11.0), None, None),
    ],
)
def test_a_run_may_be_draining_a_partition(
    live: Claim | None, of: RunState | None, last: LastClaim | None, expected: str | None
) -> None:
    standing = PartitionClaims(0, waiting=True, leased=live is not None, claim=live, last=last)
    assert draining_run(standing, of, LIMITS, TICKS) == expected


@pytest.mark.parametrize(
    ("standing", "of", "expected"),
    [
        (PartitionClaims(0, waiting=False, leased=False, claim=None), None, False),
        (PartitionClaims(0, waiting=True, leased=False, claim=None), None, True),
        (PartitionClaims(0, waiting=True, leased=True, claim=None), None, False),
        (PartitionClaims(0, waiting=False, leased=False, claim=None, last=LastClaim("run r", 1.0)), None, True),
        (PartitionClaims(0, waiting=True, leased=True, claim=ADOPTED), run(), False),
        (PartitionClaims(0, waiting=True, leased=False, claim=ADOPTED), run(), True),
        (PartitionClaims(0, waiting=True, leased=True, claim=claim()), None, False),
        (PartitionClaims(0, waiting=True, leased=True, claim=claim()), run(STATUS.QUEUED), True),
        (PartitionClaims(0, waiting=True, leased=True, claim=ADOPTED), run(STATUS.FAILURE), True),
        (PartitionClaims(0, waiting=True, leased=True, claim=OF_PARENT), run(STATUS.QUEUED), False),
        (PartitionClaims(0, waiting=True, leased=True, claim=OF_PARENT), run(STATUS.STARTING), True),
        (PartitionClaims(0, waiting=True, leased=True, claim=LATER), run(age=11.0), True),
    ],
)
def test_a_look_is_enough_for_most_partitions(standing: PartitionClaims, of: RunState | None, expected: bool) -> None:
    assert needs_attention(standing, of, LIMITS, TICKS) is expected


@pytest.mark.parametrize("tags", [{PARTITION_TAG: "0", SHARED_TAG: "true"}, {}], ids=["shared", "by hand"])
def test_a_run_that_drains_several_partitions_has_no_successor(tags: dict[str, str]) -> None:
    draining = PartitionClaims(0, waiting=True, leased=True, claim=LATER)
    assert not needs_attention(draining, run(age=11.0, tags=tags), LIMITS, TICKS)
