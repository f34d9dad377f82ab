"""The handover from a draining run to its successor: the partition never waits for a run.

A draining run ends with its window, and the next run takes seconds to start. So a tick requests a successor near the
end of the window. The successor has no claim. As soon as it is ready, it tries to claim, as the draining run does, and
the faster run gets the next range. The draining run ends when it sees that its successor holds the partition. If the
successor has left the queue and has not claimed yet, the draining run goes on after its window. Claims keep their
order, and neither run can take a claimed range from the other.
"""

from __future__ import annotations

import dagster as dg

from eventsql_orchestration.dagster.tags import SUCCEEDS_TAG, UNFINISHED


def successor_of(run_id: str, instance: dg.DagsterInstance) -> dg.RunRecord | None:
    """The unfinished successor of a run."""
    runs = instance.get_run_records(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=list(UNFINISHED)), limit=1)
    return runs[0] if runs and runs[0].dagster_run.parent_run_id is None else None


def comes_soon(run_id: str, instance: dg.DagsterInstance) -> bool:
    """Whether the successor of a run has left the queue. A queued successor may wait for the slot of that run."""
    launched = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]
    return bool(instance.get_runs_count(dg.RunsFilter(tags={SUCCEEDS_TAG: run_id}, statuses=launched)))
