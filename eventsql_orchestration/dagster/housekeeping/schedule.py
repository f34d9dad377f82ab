"""Housekeeping: keeps topics to their retention, and this package's own frequent runs and ticks in bounds."""

import json
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dagster as dg
from dagster_shared.check import CheckError

from eventsql_orchestration.dagster.backfill_history import delete_windows
from eventsql_orchestration.dagster.backfills import Backfills
from eventsql_orchestration.dagster.checks import ConsumerCheck
from eventsql_orchestration.dagster.claim_history import delete_claims
from eventsql_orchestration.dagster.history import EventHistory
from eventsql_orchestration.dagster.publications import delete_publications
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import on_each
from eventsql_orchestration.dagster.tags import (
    FINISHED,
    HOUSEKEEPING_BACKFILL,
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
    keep_observation_hours: float = 72.0,
    keep_publication_hours: float = 720.0,
    keep_failure_hours: float = 720.0,
    keep_backfill_hours: float = 720.0,
    keep_claim_hours: float = 720.0,
    checks: Collection[ConsumerCheck] = (),
    cron_schedule: str = "17 * * * *",
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """A schedule that drops what topics need not keep, by the retention of each, and deletes old history.

    History is this package's own finished runs, with their logs, old ticks of its sensors, and what these report
    without a run. Runs of the transfer and of housekeeping itself, and ticks, are kept `keep_hours`, ticks that
    failed `keep_failure_hours`; consuming runs, which materialize assets, `keep_consumer_hours`; what the lag sensor
    reports, observations and the results of `checks`, `keep_observation_hours`, where Dagster's storage is PostgreSQL.
    No other run or event is touched, and the newest observation of an asset and result of a check stay. The records by
    which a publication is not repeated are kept `keep_publication_hours`, and longer as long as a run or a stream could
    repeat it. Runs of backfills are kept `keep_backfill_hours`, and the partitions of one that is over as long as its
    runs; claims that are over `keep_claim_hours`, on each shard.

    A shard that is down keeps what it has until the next run. The others are cleared all the same; then the run fails,
    and names that shard.
    """
    kept_for = (
        keep_hours, keep_consumer_hours, keep_observation_hours, keep_publication_hours, keep_failure_hours,
        keep_backfill_hours, keep_claim_hours,
    )  # fmt: skip
    if min(kept_for) < 0:
        raise ValidationError("keep_hours and the other times to keep must not be negative")
    judged = tuple(check.key for check in checks)
    kept = {
        HOUSEKEEPING_INTERNAL: keep_hours,
        HOUSEKEEPING_CONSUMER: keep_consumer_hours,
        HOUSEKEEPING_BACKFILL: keep_backfill_hours,
    }

    @dg.op(name="delete_old_history", description="Deletes finished runs of this package's jobs, and old ticks.")
    def delete_old_history(context: dg.OpExecutionContext) -> None:
        now = datetime.now(UTC)
        deleted = {
            kind: delete_runs(context.instance, kind, before=now - timedelta(hours=hours))
            for kind, hours in kept.items()
        }
        if own := _own_instigators(context):
            purge_ticks(
                context.instance,
                own,
                before=now - timedelta(hours=keep_hours),
                failures_before=now - timedelta(hours=keep_failure_hours),
            )
        reported = delete_reports(context.instance, judged, before=now - timedelta(hours=keep_observation_hours))
        context.log.info(
            "deleted %s, %s",
            ", ".join(f"{count} {kind} runs" for kind, count in deleted.items()),
            "no reports: only those in PostgreSQL can be" if reported is None else f"{reported} reports",
        )
        context.add_output_metadata(
            {**{f"{kind} runs deleted": count for kind, count in deleted.items()}, "reports deleted": reported or 0}
        )

    @dg.op(name="drop_old_segments", description="Drops the segments of topics that are beyond their retention.")
    def drop_old_segments(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        found = on_each(eventsql.shards, lambda shard: shard.retention.run_once())
        for shard, segments in found.of.items():
            for dropped in segments:
                held = f"; {dropped.held_by} has not passed the next that is due" if dropped.held_by else ""
                context.log.info(
                    "topic %s%s lost %d segments (about %d events, %d bytes)%s",
                    dropped.topic, "" if shard is None else f" on shard {shard}", dropped.segments, dropped.events,
                    dropped.bytes, held,
                )  # fmt: skip
        found.require_all(context.log)

    @dg.op(
        name="delete_old_publications",
        description="Deletes the records of publications that nothing repeats any more.",
        ins={"done": dg.In(dg.Nothing)},
    )
    def delete_old_publications(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        before = datetime.now(UTC) - timedelta(hours=keep_publication_hours)
        found = on_each(eventsql.shards, lambda shard: delete_publications(shard, context.instance, before=before))
        context.log.info("deleted the records of %d publications", sum(found.of.values()))
        found.require_all(context.log)

    @dg.op(name="delete_old_claims", description="Deletes claims that ended long ago.")
    def delete_old_claims(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        before = datetime.now(UTC) - timedelta(hours=keep_claim_hours)
        found = on_each(eventsql.shards, lambda shard: delete_claims(shard, before=before))
        context.log.info("deleted %d claims", sum(found.of.values()))
        found.require_all(context.log)

    @dg.op(
        name="delete_old_windows",
        description="Deletes the partitions of backfills that are over and whose runs are deleted.",
        ins={"done": dg.In(dg.Nothing)},
    )
    def delete_old_windows(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        registered = on_each(eventsql.shards, lambda shard: Backfills(shard).registered())
        for asset, deleted in delete_windows(registered, context.instance, _own_assets(context)).items():
            context.log.info("deleted %d partitions of asset %s", deleted, asset)
        registered.require_all(context.log)

    @dg.job(
        name=name,
        description="Keeps topics to their retention, and the history of the platform's own runs in bounds.",
        executor_def=dg.in_process_executor,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )
    def housekeeping() -> None:
        drop_old_segments()
        delete_old_claims()
        # Runs that are gone repeat nothing.
        history = delete_old_history()
        delete_old_publications(history)
        delete_old_windows(history)

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


def delete_reports(
    instance: dg.DagsterInstance, checks: Collection[dg.AssetCheckKey], *, before: datetime
) -> int | None:
    """Delete what the lag sensor reported before a time; gives how much, None where the storage is not PostgreSQL."""
    history = EventHistory(instance)
    if not history.supported:
        return None
    return history.delete_events(before=before) + history.delete_evaluations(checks, before=before)


def purge_ticks(
    instance: dg.DagsterInstance, names: Collection[str], *, before: datetime, failures_before: datetime | None = None
) -> None:
    """Delete the ticks before a time of the sensors and schedules of these names.

    Those that failed are deleted before a time of their own, and stay where there is none: they are what somebody who
    looks for the reason of a gap wants to see.
    """
    for state in instance.all_instigator_state():
        if state.instigator_name in names:
            origin, selector = state.instigator_origin_id, state.selector_id
            instance.purge_ticks(origin, selector, before.timestamp(), _statuses("SKIPPED", "STARTED", "SUCCESS"))
            if failures_before is not None:
                instance.purge_ticks(origin, selector, failures_before.timestamp(), _statuses("FAILURE"))


def _statuses(*names: str) -> list[Any]:
    """Statuses of ticks, whose type Dagster does not export, as its storage has them."""
    return [dg.deserialize_value(json.dumps({"__enum__": f"TickStatus.{name}"})) for name in names]


def _own_instigators(context: dg.OpExecutionContext) -> frozenset[str]:
    if (repository := _repository(context)) is None:
        context.log.info("no ticks are deleted: this job was executed by itself, outside of a code location")
        return frozenset()
    instigators: list[dg.SensorDefinition | dg.ScheduleDefinition] = [
        *repository.sensor_defs,
        *repository.schedule_defs,
    ]
    return frozenset(each.name for each in instigators if HOUSEKEEPING_TAG in each.tags)


def _own_assets(context: dg.OpExecutionContext) -> list[dg.AssetSpec]:
    repository = _repository(context)
    assets = {} if repository is None else repository.assets_defs_by_key
    return [spec for asset in {id(each): each for each in assets.values()}.values() for spec in asset.specs]


def _repository(context: dg.OpExecutionContext) -> dg.RepositoryDefinition | None:
    """The code location of a job; None where it is executed by itself."""
    try:
        return context.repository_def
    except CheckError:
        return None
