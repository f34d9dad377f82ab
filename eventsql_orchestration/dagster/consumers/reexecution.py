"""Runs that execute another run again: Dagster's automatic retries, and people's re-executions.

The parent's status in Dagster cannot tell the two apart. If the process of a run stands still, the run is reported as
failed and retried. Later, the process may still write its own end over that report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.tags import FORMER, HIDDEN

RETRY_NUMBER_TAG: Final = "dagster/retry_number"
"""The tag that Dagster's daemon gives each run that it launches as an automatic retry."""

AUTO_RETRY_TAG: Final = "dagster/auto_retry_run_id"
"""The tag that Dagster's daemon gives a run that it retries; its value is the retry."""

FROM_FAILURE_TAG: Final = "dagster/is_resume_retry"
"""The tag of runs that are executed again from failure: the parent had failed when they were launched."""

MAX_RETRIES_TAG: Final = "dagster/max_retries"

_REPORTED_DEAD: Final = {dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_CANCELED}


def is_automatic_retry(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether Dagster launched a run automatically because another run failed.

    A person's run that copies the tags of a retry counts as a retry, and replays nothing.
    """
    if RETRY_NUMBER_TAG in run.tags:
        return True
    parent = _parent_of(run, instance)
    return parent is not None and parent.tags.get(AUTO_RETRY_TAG) == run.run_id


def repeats_success(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether a run is a person's re-execution of a run that had succeeded.

    A parent that was once reported as failed or canceled does not count: the person may have executed it again before
    its success replaced that report. A parent that succeeded only after the person had executed it again, such as a run
    that stood still, does not count either.
    """
    if FROM_FAILURE_TAG in run.tags or is_automatic_retry(run, instance):
        return False
    parent = _parent_of(run, instance)
    if parent is None or parent.status is not dg.DagsterRunStatus.SUCCESS:
        return False
    if instance.get_records_for_run(parent.run_id, of_type=_REPORTED_DEAD, limit=1).records:
        return False
    success = instance.get_records_for_run(parent.run_id, of_type=dg.DagsterEventType.RUN_SUCCESS, limit=1).records
    first = instance.get_records_for_run(run.run_id, limit=1).records
    return not (success and first) or success[0].timestamp <= first[0].timestamp


def ancestors(run: dg.DagsterRun, instance: dg.DagsterInstance) -> Iterator[str]:
    """The runs that a run executes again: its parent, the parent's parent and so on, up to the first run."""
    seen = {run.run_id}
    current: dg.DagsterRun | None = run
    while current is not None and (parent := current.parent_run_id) is not None and parent not in seen:
        seen.add(parent)
        yield parent
        current = instance.get_run_by_id(parent)
    # A run in between may have been deleted from history.
    if run.root_run_id is not None and run.root_run_id not in seen:
        yield run.root_run_id


def requested_tags(run: dg.DagsterRun, instance: dg.DagsterInstance) -> Mapping[str, str]:
    """A run's tags, and the tags of the runs that it executes again.

    Dagster's UI copies tags to a re-execution of selected steps, but it does not get hidden tags. Older runs, from
    before tags were hidden, have the tags with their former names.
    """
    tags = dict(run.tags)
    for run_id in ancestors(run, instance):
        if (ancestor := instance.get_run_by_id(run_id)) is not None:
            tags = {**ancestor.tags, **tags}
    hidden = {HIDDEN + name.removeprefix(FORMER): value for name, value in tags.items() if name.startswith(FORMER)}
    return {**hidden, **tags}


def forbid_retries(run: dg.DagsterRun, instance: dg.DagsterInstance) -> None:
    """Keep Dagster from launching an automatic retry of a run that is about to fail."""
    instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: "0"})


def _parent_of(run: dg.DagsterRun, instance: dg.DagsterInstance) -> dg.DagsterRun | None:
    return None if run.parent_run_id is None else instance.get_run_by_id(run.parent_run_id)
