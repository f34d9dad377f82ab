"""A consumer's backfills in Dagster: an asset whose partitions are windows, and the jobs that plan and replay them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.consumers.reporting import results, without_retries
from eventsql_orchestration.dagster.metadata_keys import CONSUMED_TOPIC
from eventsql_orchestration.dagster.register import failing_if_unregistered
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.steps import job_of_assets, log_materialization, step_of_assets
from eventsql_orchestration.dagster.tags import (
    BACKFILL_OF_TAG,
    BACKFILL_RUN,
    BACKFILL_TAG,
    CONSUMER_TAG,
    DAGSTER_PARTITION_TAG,
    PRIORITY_TAG,
    SHARED_TAG,
    TOPIC_TAG,
    shard_tags,
)
from eventsql_orchestration.dagster.topics import KINDS, topic_key
from eventsql_orchestration.errors import EventSQLError, ValidationError
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.orchestration.backfills.replay import WindowReplay
from eventsql_orchestration.orchestration.backfills.windows import ReplayRange, new_id, read_key
from eventsql_orchestration.orchestration.drain import Drained
from eventsql_orchestration.orchestration.errors import WindowGoneError
from eventsql_orchestration.orchestration.owners import owner_of_run, run_of_owner
from eventsql_orchestration.topics.positions import parse_place
from eventsql_orchestration.validation import counted

SUFFIX: Final = "_backfill"

BACKFILL_PRIORITY: Final = "-10"
"""The priority of a backfill's runs in Dagster's queue; other runs have 0."""

ASSETS_METADATA: Final = "eventsql/assets"
"""Metadata of a backfill's asset: the assets that its runs materialize."""

BACKFILL_GROUP: Final = "backfills"
"""The group of all backfills, which the graph shows as one box."""

_OF_LIVE_RUNS: Final = (TOPIC_TAG, CONSUMER_TAG, SHARED_TAG)
"""Tags by which a consumer's sensor finds its live runs. Runs of backfills do not have these tags."""


@dataclass(frozen=True)
class BackfillDefinition:
    """The asset and the two jobs that a code location needs for backfills of a consumer."""

    consumer: ConsumerDefinition
    asset: dg.AssetsDefinition
    job: "dg.UnresolvedAssetJobDefinition"
    plan_job: dg.JobDefinition
    partitions: dg.DynamicPartitionsDefinition

    @property
    def jobs(self) -> "list[dg.UnresolvedAssetJobDefinition | dg.JobDefinition]":
        return [self.job, self.plan_job]


class ReplayConfig(dg.Config):
    """The limits of a window's run.

    The run claims at most `max_events` at once, by default as many as the consumer's other runs. It fails when the
    whole backfill has `max_failures` dead letters, 10 by default.
    """

    max_events: int | None = None
    max_failures: int | None = None


class PlanConfig(dg.Config):
    """The range of a backfill, and its windows.

    `start` is `earliest`, the offset of the first event, or a time with its zone (2026-05-01T12:00:00Z): the range has
    the events that entered the log at this time or later. `end` is `latest`, the offset of the last event, or a time:
    the range has the events that entered the log before it.
    """

    start: str = "earliest"
    end: str = "latest"
    window_events: int | None = None
    window_seconds: float | None = None
    into: str | None = None

    def range(self) -> ReplayRange:
        """The range and its windows. Raises `ValidationError`."""
        try:
            window = None if self.window_seconds is None else timedelta(seconds=self.window_seconds)
        except (OverflowError, ValueError):
            raise ValidationError(f"window_seconds is not a possible length of time: {self.window_seconds}") from None
        return ReplayRange(parse_place(self.start), parse_place(self.end), self.window_events, window)


def build_backfill(consumer: ConsumerDefinition) -> BackfillDefinition:
    """Define backfills of a consumer, for `eventsql backfill` and Dagster's UI.

    A backfill cuts its range into windows; if the consumer is partitioned, it cuts each partition separately. The asset
    `<name>_backfill` has a Dagster partition for each window, and the same prefix in its key as the consumer's asset.
    The job `backfill_<name>` replays one window, with the consumer's function, limits and tags. It also reports its
    materialization for the consumer's own asset and for the topics that the consumer publishes to. `eventsql backfill`
    creates the Dagster partitions; in the UI, the job `plan_<name>_backfill` creates them. The asset's page can then
    materialize the missing and the failed partitions.
    """
    name = consumer.asset.op.name + SUFFIX
    key = dg.AssetKey([*consumer.key.path[:-1], name])
    # Dagster's instance has one set of names for all code locations.
    partitions = dg.DynamicPartitionsDefinition(name=key.to_user_string())
    spec = _spec(consumer, key, partitions)

    def compute(context: dg.AssetExecutionContext, config: ReplayConfig, resources: Mapping[str, Any]) -> Any:
        yield from _replay(context, config, consumer, spec.key, resources)

    asset = step_of_assets(
        name, [spec], consumer.computation.user.as_compute(ReplayConfig, compute), pool=consumer.asset.op.pool
    )
    job = job_of_assets(
        f"backfill_{consumer.asset.op.name}",
        asset.keys,
        description=f"Replays a window of topic {consumer.topic.name} through {consumer.consumer.name}.",
        tags={
            **{name: value for name, value in (consumer.job.tags or {}).items() if name not in _OF_LIVE_RUNS},
            # Live runs go first in the queue.
            PRIORITY_TAG: BACKFILL_PRIORITY,
            BACKFILL_OF_TAG: backfill_of(consumer.topic.name, consumer.consumer.name),
            **BACKFILL_RUN,
        },
    )
    return BackfillDefinition(consumer, asset, job, _plan_job(consumer, partitions), partitions)


def _spec(consumer: ConsumerDefinition, key: dg.AssetKey, partitions: dg.DynamicPartitionsDefinition) -> dg.AssetSpec:
    own = consumer.asset.get_asset_spec(consumer.key)
    materialized = [each.to_user_string() for each in (consumer.key, *consumer.computation.publishes)]
    return dg.AssetSpec(
        key=key,
        # A run whose window is already replayed materializes nothing.
        skippable=True,
        deps=[topic_key(consumer.topic.name)],
        description=f"Ranges of topic {consumer.topic.name} that are replayed through {consumer.consumer.name}.",
        group_name=BACKFILL_GROUP,
        owners=own.owners,
        kinds={*KINDS, *own.kinds},
        metadata={
            CONSUMED_TOPIC: consumer.topic.name,
            "consumer": consumer.consumer.name,
            "replays": dg.MetadataValue.asset(consumer.key),
            ASSETS_METADATA: dg.MetadataValue.json(materialized),
        },
        partitions_def=partitions,
    )


def backfill_of(topic: str, consumer: str) -> str:
    """The value of the tag that marks the job and the runs of a consumer's backfills."""
    return f"{topic}/{consumer}"


def _plan_job(consumer: ConsumerDefinition, partitions: dg.DynamicPartitionsDefinition) -> dg.JobDefinition:
    name, topic = f"plan_{consumer.asset.op.name}{SUFFIX}", consumer.topic.name

    # Ops and jobs of a code location share one set of names.
    @dg.op(name=f"{name}_windows")
    def plan(context: dg.OpExecutionContext, config: PlanConfig, eventsql: EventSQLResource) -> None:
        backfills = Backfills(eventsql.shards)
        with failing_if_unregistered(eventsql.platform, consumer.topic, consumer.consumer):
            planned = backfills.plan(topic, consumer.consumer.name, config.range())
        for remark in planned.remarks:
            context.log.warning(remark)
        backfill_id = new_id()
        keys = [run.key(backfill_id) for run in planned.runs]
        assert partitions.name is not None, "given above"
        # Add the partitions before the windows. If this job dies between the two steps, housekeeping deletes partitions
        # without windows. Windows without partitions would hold back retention.
        context.instance.add_dynamic_partitions(partitions.name, keys)
        try:
            backfills.register(planned, backfill_id, into=config.into)
        except EventSQLError:
            for each in keys:
                context.instance.delete_dynamic_partition(partitions.name, each)
            raise
        context.log.info(
            "backfill %s of %s has %s: materialize the missing partitions of asset %s",
            backfill_id, counted(planned.events, "event"), counted(len(keys), "window"), partitions.name,
        )  # fmt: skip

    @dg.job(
        name=name,
        description=f"Makes a backfill of {consumer.consumer.name} and its windows; replays nothing yet.",
        executor_def=dg.in_process_executor,
        tags=BACKFILL_RUN,
    )
    def plan_job() -> None:
        plan()

    return plan_job


def _replay(
    context: dg.AssetExecutionContext,
    config: ReplayConfig,
    consumer: ConsumerDefinition,
    key: dg.AssetKey,
    resources: Mapping[str, Any],
) -> Iterator[dg.MaterializeResult[Any]]:
    eventsql: EventSQLResource = resources[RESOURCE_KEY]
    try:
        backfill_id, window, partition = read_key(context.partition_key)
    except dg.DagsterInvariantViolationError:
        raise dg.Failure(
            f"a run replays one window, and this run has none or several: materialize each partition of {key.path[-1]} "
            "in a run of its own",
            allow_retries=False,
        ) from None
    shard = eventsql.shard(window.shard)
    replay = WindowReplay(
        shard, consumer.topic.name, consumer.consumer.name, consumer.computation.consume(context, shard, resources),
        consumer.limits, backfill_id, window, partition, owner_of_run(context.run.run_id), context.log,
        config.max_events, config.max_failures,
    )  # fmt: skip
    of = backfill_of(consumer.topic.name, consumer.consumer.name)
    tags = {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: of, **BACKFILL_RUN}
    context.instance.add_run_tags(context.run.run_id, {**tags, **shard_tags(window.shard)})
    try:
        with without_retries():
            try:
                # A run that is resumed does not wait for the lease of its own claim.
                replay.take_back()
                backfill = replay.run(lambda owner: _has_ended(context.instance, owner))
            except WindowGoneError:
                if not replay.is_finished() and not _was_replayed(context, of):
                    raise
                context.log.info("another run has replayed this window")
                return
    finally:
        # A failing run has committed the events that it replayed.
        if replay.drained.events:
            for asset, metadata in _results(consumer, replay.drained, backfill_id):
                log_materialization(context, asset, metadata)
    context.log.info("%s replayed", counted(replay.drained.events, "event"))
    finished = replay.finish(backfill)
    _, own = next(_results(consumer, replay.drained, backfill_id))
    yield dg.MaterializeResult(asset_key=key, metadata={**own, "backfill is done": finished})


def _was_replayed(context: dg.AssetExecutionContext, of: str) -> bool:
    """Whether another run of this run's window has succeeded. The backfill may be deleted since then."""
    tags = {DAGSTER_PARTITION_TAG: context.partition_key, BACKFILL_OF_TAG: of}
    succeeded = dg.RunsFilter(tags=tags, statuses=[dg.DagsterRunStatus.SUCCESS])
    return bool(context.instance.get_runs(succeeded, limit=1))


def _has_ended(instance: dg.DagsterInstance, owner: str) -> bool:
    """Whether the owner is a run of this instance that has ended; False for any other owner."""
    run_id = run_of_owner(owner)
    run = None if run_id is None else instance.get_run_by_id(run_id)
    return run is not None and run.is_finished


def _results(
    consumer: ConsumerDefinition, drained: Drained, backfill_id: str
) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:
    """The metadata of the consumer's own asset, and of each topic that it publishes to."""
    for key, metadata in results(consumer.key, consumer.consumer, consumer.computation.publishes, drained):
        yield key, {**metadata, "backfill": backfill_id}
