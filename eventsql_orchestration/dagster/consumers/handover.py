"""From a run that drains to the next one: requested before the first ends, so that its partition never waits for a run.

A run that drains ends with its window, and the next one takes seconds to be there. So a tick that finds a run draining
near the end of its window requests a successor, which has no claim: it tries to claim, as the draining run does, from
the moment when it is ready. Whichever is faster has the next range. The draining run ends when it sees its successor
hold the partition, and goes on after its window while one that has left the queue has not claimed yet. Claims keep
their order, and neither can lose anything to the other.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.claim_runs import age, since_change
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.draining import PATIENCE, run_of_owner
from eventsql_orchestration.dagster.tags import CLAIM_TAG, FINISHED, PARTITION_TAG, REPLAY_TAG, SHARED_TAG, SUCCEEDS_TAG
from eventsql_orchestration.log.claims import Claim, Last

LEAD: Final = 9.0
"""Seconds before the end of a run's window from which a successor is requested: Dagster's next look at the sensor is
at most 5 away, its queue's 1, and a run takes some 2 to start."""

START_TIMEOUT: Final = 300.0
"""Seconds after which a run that was created or is starting, and never started, is given up; Dagster's own monitoring
does so after 180 where it is on. A queued run waits as long as its queue lets it."""

SLACK: Final = 5.0
"""Seconds after the end of its window in which a run that drains may still be at its last range, or about to end."""


def drained_by(last: Last | None, limits: Limits) -> str | None:
    """The run that drains a partition which has no live claim now, by its furthest claim; None where none can be.

    A run that finds nothing more ends after `drain_idle`, so one whose claim has been over for longer has ended, or has
    died.
    """
    if last is None or last.seconds > limits.drain_idle + SLACK:
        return None
    return run_of_owner(last.owner)


def decide(
    run_id: str, record: dg.RunRecord | None, limits: Limits, instance: dg.DagsterInstance, *, request: dg.RunRequest
) -> dg.SkipReason | dg.RunRequest | None:
    """What a tick does about a partition that a run drains: it leaves it alone, or requests a successor of that run
    with `request`. None where that run does not drain, as far as is known.

    A run of which `LEAD` seconds are over is under steady traffic: it would have ended otherwise.
    """
    successor = _successor_of(run_id, instance)
    if successor is not None:
        return dg.SkipReason(f"run {successor.dagster_run.run_id} takes over from run {run_id}")
    if record is None or record.dagster_run.status != dg.DagsterRunStatus.STARTED:
        return None
    if {SHARED_TAG, REPLAY_TAG} & record.dagster_run.tags.keys() or PARTITION_TAG not in record.dagster_run.tags:
        # A run of several consumers has turns, one that replays has no part of what waits, and one that somebody
        # launched goes from partition to partition.
        return None
    left = limits.drain_seconds - age(record)
    if left < -SLACK:
        return None
    if _in_last_part(record, limits):
        return request
    return dg.SkipReason(f"run {run_id} drains the partition, for {max(0.0, left):.0f} s more")


def may_hand_over(claim: Claim, run: dg.RunRecord, limits: Limits) -> bool:
    """Whether a run drains, since its live claim is not the one that it was requested for, and its window ends soon."""
    mine = run_of_owner(claim.owner) == run.dagster_run.run_id
    return mine and run.dagster_run.tags.get(CLAIM_TAG) != str(claim.id) and _in_last_part(run, limits)


def _in_last_part(record: dg.RunRecord, limits: Limits) -> bool:
    return limits.drain_seconds - age(record) <= LEAD <= age(record)


def _successor_of(run_id: str, instance: dg.DagsterInstance) -> dg.RunRecord | None:
    """The run that is to succeed another and can still be waited for: one that has died is no reason to wait."""
    runs = instance.get_run_records(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=_UNFINISHED), limit=1)
    if not runs or runs[0].dagster_run.parent_run_id is not None:
        return None
    status = runs[0].dagster_run.status
    # As with any run, the queue decides when; what was created and never starts is given up.
    if status == dg.DagsterRunStatus.STARTED:
        alive = age(runs[0]) < PATIENCE + SLACK
    else:
        alive = status == dg.DagsterRunStatus.QUEUED or since_change(runs[0]) < START_TIMEOUT
    return runs[0] if alive else None


def comes_soon(run_id: str, instance: dg.DagsterInstance) -> bool:
    """Whether the successor of a run has left the queue: in the queue it may wait for that run's own place."""
    launched = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
    return bool(instance.get_runs_count(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=launched)))


_UNFINISHED: Final = [status for status in dg.DagsterRunStatus if status not in FINISHED]
