"""Housekeeping: applies the retention of topics, and deletes old runs and ticks of this package."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dagster as dg
from dagster_shared.check import CheckError

from eventsql_orchestration import Shard
from eventsql_orchestration.dagster.housekeeping.prune import (
    delete_claims,
    delete_publications,
    delete_reports,
    delete_runs,
    delete_windows,
    purge_ticks,
)
from eventsql_orchestration.dagster.instigators import states_of
from eventsql_orchestration.dagster.monitoring.checks import ReportedCheck
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.shards import on_each
from eventsql_orchestration.dagster.tags import (
    HOUSEKEEPING_BACKFILL,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_INTERNAL,
    HOUSEKEEPING_TAG,
    INTERNAL_RUN,
)
from eventsql_orchestration.model import MAX_AGE
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.limits import check_not_negative
from eventsql_orchestration.validation import counted
from eventsql_orchestration.views import Views


@dataclass(frozen=True, slots=True)
class HistoryRetention:
    """How many hours old history is kept; `math.inf` keeps it. Raises `ValidationError` for a negative number.

    - `internal_hours`: runs of the transfer and of housekeeping, and ticks that did not fail;
    - `failure_hours`: ticks that failed;
    - `consumer_hours`: consuming runs, which materialize assets;
    - `observation_hours`: reports of the lag sensor, which are observations and results of checks, if Dagster's storage
      is PostgreSQL. The newest observation of an asset and the newest result of a check stay;
    - `publication_hours`: records of assets' publications. They stay longer while a run could repeat one;
    - `backfill_hours`: runs of backfills. The partitions of an ended backfill go with its last run;
    - `claim_hours`: claims that ended.
    """

    internal_hours: float = 24.0
    failure_hours: float = 720.0
    consumer_hours: float = 168.0
    observation_hours: float = 72.0
    publication_hours: float = 720.0
    backfill_hours: float = 720.0
    claim_hours: float = 720.0

    def __post_init__(self) -> None:
        check_not_negative(self)


DEFAULT_HISTORY: Final = HistoryRetention()


def build_housekeeping_schedule(
    retention: HistoryRetention = DEFAULT_HISTORY,
    *,
    checks: Collection[ReportedCheck] = (),
    name: str = "housekeeping",
    cron_schedule: str = "17 * * * *",
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.RUNNING,
) -> dg.ScheduleDefinition:
    """A schedule that applies the retention of topics and deletes the old history of this package.

    `retention` says how long history is kept, `checks` are the checks whose results are deleted. Runs and events of
    other code are not touched. A shard that is down keeps its history until the next run: the other shards are cleared,
    then the run fails and names the shard.
    """
    delete_old_history = _history_op(retention, tuple(check.key for check in checks))
    delete_old_claims = _shard_op(
        "delete_old_claims",
        "Deletes claims that ended long ago.",
        lambda _, shard: _deleted(delete_claims(shard, before=_ago(retention.claim_hours)), "claim"),
    )
    delete_old_publications = _shard_op(
        "delete_old_publications",
        "Deletes the records of publications that nothing can repeat any more.",
        lambda context, shard: _deleted(
            delete_publications(shard, context.instance, before=_ago(retention.publication_hours)), "record"
        ),
        after_history=True,
    )

    description = "Applies the retention of topics, and deletes old runs, ticks and reports of the platform."

    @dg.job(name=name, description=description, executor_def=dg.in_process_executor, tags=INTERNAL_RUN)
    def housekeeping() -> None:
        drop_old_segments()
        drop_old_views()
        delete_old_claims()
        # Delete runs first: a deleted run repeats no publication and no window.
        history = delete_old_history()
        delete_old_publications(history)
        delete_old_windows(history)

    return dg.ScheduleDefinition(
        name=name, job=housekeeping, cron_schedule=cron_schedule, default_status=default_status, tags=INTERNAL_RUN,
        description=description,
    )  # fmt: skip


def _history_op(retention: HistoryRetention, checks: Collection[dg.AssetCheckKey]) -> dg.OpDefinition:
    kept = {
        HOUSEKEEPING_INTERNAL: retention.internal_hours,
        HOUSEKEEPING_CONSUMER: retention.consumer_hours,
        HOUSEKEEPING_BACKFILL: retention.backfill_hours,
    }

    @dg.op(description="Deletes finished runs of this package's jobs, and old ticks.")
    def delete_old_history(context: dg.OpExecutionContext) -> None:
        deleted = {kind: delete_runs(context.instance, kind, before=_ago(hours)) for kind, hours in kept.items()}
        if own := _own_states(context):
            before, failures_before = _ago(retention.internal_hours), _ago(retention.failure_hours)
            purge_ticks(context.instance, own, before=before, failures_before=failures_before)
        reports = delete_reports(context.instance, checks, before=_ago(retention.observation_hours))
        context.log.info(
            "deleted %s, %s",
            ", ".join(counted(count, f"{kind} run") for kind, count in deleted.items()),
            "no reports, because Dagster's storage is not PostgreSQL"
            if reports is None
            else counted(reports, "report"),
        )
        context.add_output_metadata(
            {**{f"{kind} runs deleted": count for kind, count in deleted.items()}, "reports deleted": reports or 0}
        )

    return delete_old_history


def _shard_op(
    name: str, description: str, clear: Callable[[dg.OpExecutionContext, Shard], str], *, after_history: bool = False
) -> dg.OpDefinition:
    """An op that clears one shard after the other and logs the message that `clear` gives, if any."""

    @dg.op(name=name, description=description, ins={"done": dg.In(dg.Nothing)} if after_history else {})
    def clear_shards(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        found = on_each(eventsql.shards, lambda shard: clear(context, shard))
        for shard, message in found.of.items():
            if message:
                context.log.info("%s%s", "" if shard is None else f"shard {shard}: ", message)
        found.require_all(context.log)

    return clear_shards


def _deleted(number: int, noun: str) -> str:
    return f"deleted {counted(number, noun)}"


def _drop_segments(_: dg.OpExecutionContext, shard: Shard) -> str:
    try:
        dropped = [
            f"topic {each.topic} lost {counted(each.segments, 'segment')} (about {counted(each.events, 'event')}, "
            f"{counted(each.bytes, 'byte')})"
            + (f"; the next one stays, because {each.held_by} has not passed it" if each.held_by else "")
            for each in shard.retention.run_once()
        ]
    finally:
        # A topic that keeps its old segments must not keep all topics from their compaction.
        compacted = [
            f"the log of topic {each.topic} has {each.into} blocks instead of {each.blocks} small blocks"
            for each in shard.compactor.run_once()
            if each.blocks
        ]
    return "; ".join(dropped + compacted)


drop_old_segments = _shard_op(
    "drop_old_segments",
    "Drops the segments of topics that are beyond their retention, and merges small blocks.",
    _drop_segments,
)


def _keep_views(_: dg.OpExecutionContext, shard: Shard) -> str:
    views = Views(shard)
    dropped = [(f"view {each.view} lost {counted(each.dropped, 'partition')}", each.busy) for each in views.retain()]
    in_order = [
        (f"logs {each.view} have {counted(each.partitions, 'partition')} sorted", each.busy)
        for each in views.sort()
        if each.partitions or each.busy
    ]
    return "; ".join(text + (f", {busy} are in use" if busy else "") for text, busy in dropped + in_order)


drop_old_views = _shard_op(
    "drop_old_views",
    "Drops the partitions of views that are beyond their retention, and sorts the partitions of logs.",
    _keep_views,
)


@dg.op(
    description="Deletes the partitions of backfills that are over and whose runs are deleted.",
    ins={"done": dg.In(dg.Nothing)},
)
def delete_old_windows(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
    """Needs all shards at once: a backfill may be over on one of them only."""
    registered = on_each(eventsql.shards, lambda shard: Backfills([shard]).registered())
    repository = _repository(context)
    assets = {} if repository is None else repository.assets_defs_by_key
    specs = [spec for asset in {id(each): each for each in assets.values()}.values() for spec in asset.specs]
    for asset, deleted in delete_windows(registered, context.instance, specs, now=datetime.now(UTC)).items():
        context.log.info("%s of asset %s", _deleted(deleted, "partition"), asset)
    registered.require_all(context.log)


def _ago(hours: float) -> datetime:
    """So many hours ago, a hundred years at most: Python has no time for `math.inf` hours ago."""
    return datetime.now(UTC) - timedelta(hours=min(hours, MAX_AGE / timedelta(hours=1)))


def _own_states(context: dg.OpExecutionContext) -> list[Any]:
    """The stored states of this package's sensors and schedules in the code location of a job."""
    repository, job = _repository(context), context.run.remote_job_origin
    if repository is None or job is None:
        context.log.info("no ticks are deleted: this job was executed by itself, outside of a code location")
        return []
    own: list[dg.SensorDefinition | dg.ScheduleDefinition] = [*repository.sensor_defs, *repository.schedule_defs]
    names = {each.name for each in own if HOUSEKEEPING_TAG in each.tags}
    origin = job.repository_origin
    states = states_of(context.instance, origin.code_location_origin, origin.repository_name)
    return [state for state in states if state.instigator_name in names]


def _repository(context: dg.OpExecutionContext) -> dg.RepositoryDefinition | None:
    """The code location of a job; None if the job is executed by itself."""
    try:
        return context.repository_def
    except CheckError:
        return None
