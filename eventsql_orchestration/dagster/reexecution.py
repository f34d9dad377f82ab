"""Runs that execute another run again: Dagster's automatic retries, and people's re-executions.

Dagster's status of the parent cannot tell the two apart. A run whose process stood still is reported as failed and
retried, and may still write its own end over that report later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import dagster as dg

RETRY_NUMBER_TAG: Final = "dagster/retry_number"
"""Dagster's daemon gives it to each run that it launches as an automatic retry."""

AUTO_RETRY_TAG: Final = "dagster/auto_retry_run_id"
"""Dagster's daemon gives it to a run that it retries; its value is the retry."""

FROM_FAILURE_TAG: Final = "dagster/is_resume_retry"
"""Carried by runs that are executed again from their failure: the parent had failed when they were launched."""

MAX_RETRIES_TAG: Final = "dagster/max_retries"

_REPORTED_DEAD: Final = {dg.DagsterEventType.RUN_FAILURE, dg.DagsterEventType.RUN_CANCELED}


def is_automatic_retry(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether Dagster launched a run by itself, because another one failed.

    A person's run that copies the tags of a retry counts as one: that replays nothing.
    """
    if RETRY_NUMBER_TAG in run.tags:
        return True
    parent = _parent_of(run, instance)
    return parent is not None and parent.tags.get(AUTO_RETRY_TAG) == run.run_id


def repeats_success(run: dg.DagsterRun, instance: dg.DagsterInstance) -> bool:
    """Whether a person executes a run again that had succeeded.

    A run that was once reported as failed or canceled does not count: whoever executed it again may have done so
    before it wrote its success over that report.
    """
    if FROM_FAILURE_TAG in run.tags or is_automatic_retry(run, instance):
        return False
    parent = _parent_of(run, instance)
    if parent is None or parent.status is not dg.DagsterRunStatus.SUCCESS:
        return False
    return not instance.get_records_for_run(parent.run_id, of_type=_REPORTED_DEAD, limit=1).records


def ancestors(run: dg.DagsterRun, instance: dg.DagsterInstance) -> Iterator[str]:
    """The runs that a run executes again: its parent, that one's parent and so on, and the first of all."""
    seen = {run.run_id}
    current: dg.DagsterRun | None = run
    while current is not None and (parent := current.parent_run_id) is not None and parent not in seen:
        seen.add(parent)
        yield parent
        current = instance.get_run_by_id(parent)
    # A run in between may have been deleted from history.
    if run.root_run_id is not None and run.root_run_id not in seen:
        yield run.root_run_id


def forbid_retries(run: dg.DagsterRun, instance: dg.DagsterInstance) -> None:
    """Keep Dagster from launching an automatic retry of a run that is about to fail."""
    instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: "0"})


def _parent_of(run: dg.DagsterRun, instance: dg.DagsterInstance) -> dg.DagsterRun | None:
    return None if run.parent_run_id is None else instance.get_run_by_id(run.parent_run_id)
