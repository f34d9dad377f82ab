"""Housekeeping: keeps the history of this package's own frequent runs and ticks in bounds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.tags import (
    FINISHED,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
)
from eventsql_orchestration.errors import ValidationError

PAGE: Final = 100


def build_housekeeping_schedule(
    *,
    name: str = "housekeeping",
    keep_hours: float = 24.0,
    keep_consumer_hours: float = 168.0,
    cron_schedule: str = "17 * * * *",
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """A schedule that deletes this package's own finished runs, with their logs, and old ticks of its sensors.

    Runs of the transfer and of housekeeping itself, and ticks, are kept `keep_hours`; consuming runs, which
    materialize assets, `keep_consumer_hours`. No other run is touched.
    """
    if keep_hours < 0 or keep_consumer_hours < 0:
        raise ValidationError("keep_hours and keep_consumer_hours must not be negative")
    kept = {HOUSEKEEPING_INTERNAL: keep_hours, HOUSEKEEPING_CONSUMER: keep_consumer_hours}

    @dg.op(name="delete_old_history", description="Deletes finished runs of this package's jobs, and old ticks.")
    def delete_old_history(context: dg.OpExecutionContext) -> None:
        now = datetime.now(UTC)
        deleted = {
            kind: delete_runs(context.instance, kind, before=now - timedelta(hours=hours), keep=context.run.run_id)
            for kind, hours in kept.items()
        }
        purge_ticks(context, before=now - timedelta(hours=keep_hours))
        context.log.info("deleted %s", ", ".join(f"{count} {kind} runs" for kind, count in deleted.items()))
        context.add_output_metadata({f"{kind} runs deleted": count for kind, count in deleted.items()})

    @dg.job(
        name=name,
        description="Keeps the history of the events platform's own runs in bounds.",
        executor_def=dg.in_process_executor,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )
    def housekeeping() -> None:
        delete_old_history()

    return dg.ScheduleDefinition(
        name=name,
        job=housekeeping,
        cron_schedule=cron_schedule,
        default_status=default_status,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )


def delete_runs(instance: dg.DagsterInstance, kind: str, *, before: datetime, keep: str | None = None) -> int:
    """Delete the finished runs of a kind that ended before a time, with their logs; gives their number."""
    deleted = 0
    for run_id in _old_runs(instance, kind, before):
        if run_id != keep:
            instance.delete_run(run_id)
            instance.compute_log_manager.delete_logs(prefix=[run_id])
            deleted += 1
    return deleted


def _old_runs(instance: dg.DagsterInstance, kind: str, before: datetime) -> Iterator[str]:
    cursor: str | None = None
    while True:
        runs = instance.get_run_records(
            dg.RunsFilter(tags={HOUSEKEEPING_TAG: kind}, statuses=list(FINISHED), updated_before=before),
            limit=PAGE,
            cursor=cursor,
        )
        if not runs:
            return
        cursor = runs[-1].dagster_run.run_id
        # The cursor's run is looked up by the next query, so it goes last.
        following = instance.get_run_records(
            dg.RunsFilter(tags={HOUSEKEEPING_TAG: kind}, statuses=list(FINISHED), updated_before=before),
            limit=1,
            cursor=cursor,
        )
        yield from (run.dagster_run.run_id for run in runs)
        if not following:
            return
