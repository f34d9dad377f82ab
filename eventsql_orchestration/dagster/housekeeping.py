"""Housekeeping: keeps topics to their retention, and this package's own frequent runs and ticks in bounds."""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.resources import EventSQLResource
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
    """A schedule that drops what topics need not keep, by the retention of each, and deletes old history.

    History is this package's own finished runs, with their logs, and old ticks of its sensors.
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
            kind: delete_runs(context.instance, kind, before=now - timedelta(hours=hours))
            for kind, hours in kept.items()
        }
        if own := _own_instigators(context):
            purge_ticks(context.instance, own, before=now - timedelta(hours=keep_hours))
        context.log.info("deleted %s", ", ".join(f"{count} {kind} runs" for kind, count in deleted.items()))
        context.add_output_metadata({f"{kind} runs deleted": count for kind, count in deleted.items()})

    @dg.op(name="drop_old_segments", description="Drops the segments of topics that are beyond their retention.")
    def drop_old_segments(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        for dropped in eventsql.platform.retention.run_once():
            held = f"; {dropped.held_by} has not passed the next that is due" if dropped.held_by else ""
            context.log.info(
                "topic %s lost %d segments (about %d events, %d bytes)%s",
                dropped.topic, dropped.segments, dropped.events, dropped.bytes, held,
            )  # fmt: skip

    @dg.job(
        name=name,
        description="Keeps topics to their retention, and the history of the platform's own runs in bounds.",
        executor_def=dg.in_process_executor,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )
    def housekeeping() -> None:
        drop_old_segments()
        delete_old_history()

    return dg.ScheduleDefinition(
        name=name,
        job=housekeeping,
        cron_schedule=cron_schedule,
        default_status=default_status,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )


def delete_runs(instance: dg.DagsterInstance, kind: str, *, before: datetime) -> int:
    """Delete the finished runs of a kind that ended before a time, with their logs; gives their number."""
    old = dg.RunsFilter(tags={HOUSEKEEPING_TAG: kind}, statuses=list(FINISHED), updated_before=before)
    deleted = 0
    while runs := instance.get_run_records(old, limit=PAGE):
        for run in runs:
            run_id = run.dagster_run.run_id
            instance.compute_log_manager.delete_logs(prefix=[run_id])
            instance.delete_run(run_id)
            deleted += 1
    return deleted


def purge_ticks(instance: dg.DagsterInstance, names: Collection[str], *, before: datetime) -> None:
    """Delete the ticks before a time of the sensors and schedules of these names."""
    for state in instance.all_instigator_state():
        if state.instigator_name in names:
            instance.purge_ticks(state.instigator_origin_id, state.selector_id, before.timestamp())


def _own_instigators(context: dg.OpExecutionContext) -> frozenset[str]:
    try:
        repository = context.repository_def
    except Exception:  # noqa: BLE001 - a job that is executed by itself, as in a test, belongs to no location
        return frozenset()
    instigators: list[dg.SensorDefinition | dg.ScheduleDefinition] = [
        *repository.sensor_defs,
        *repository.schedule_defs,
    ]
    return frozenset(each.name for each in instigators if HOUSEKEEPING_TAG in each.tags)
