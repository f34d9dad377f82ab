"""The sensor of a consumer partition: a tick claims the next range and requests one run for it.

A tick can only claim: its row lock is gone before the run exists. What may happen between the two, and what follows:

| the tick or the run ends | what is left | what the next tick does |
|---|---|---|
| before the claim | nothing | claims |
| after the claim, before the tick is stored | a claim without a run | waits for its lease to end, claims again |
| after the tick is stored, before the launch | a run that Dagster still launches | waits, prolonging the lease |
| while the run waits or starts | a queued run | waits, prolonging the lease |
| in mid-batch, seen by Dagster | a failed run | releases the claim, claims from the offset reached |
| in mid-batch, not seen by Dagster | a run that seems alive | waits for the lease to end, then the same |
| after the effects, before the offset | cannot be: they are one transaction | |
| after the offset | a committed claim | claims what comes next |

A run that starts after its claim was given to another finds it lost, and ends.

Where the platform is on several databases, a tick looks at each of them; a claim and its run are of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Topic
from eventsql_orchestration.dagster.consumer_watch import ConsumerWatch, SharedWatch
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.lingering import evaluate_and_linger
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import HOUSEKEEPING_CONSUMER, HOUSEKEEPING_TAG
from eventsql_orchestration.dagster.ticks import Watch
from eventsql_orchestration.dagster.watch import TICK_TIMEOUT, PartitionWatch

MIN_INTERVAL: Final = 1
"""Dagster looks at sensors every 5 s; asking for just as much would skip every second look."""


def build_partition_sensor(
    *,
    topic: Topic,
    consumer: Consumer,
    partition: int,
    job: dg.UnresolvedAssetJobDefinition | dg.JobDefinition,
    op_name: str,
    limits: Limits,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """The sensor of one consumer partition, called like its job, with the partition's number where it has one."""
    name = job.name if partition == NOT_PARTITIONED else f"{job.name}_{partition}"
    watch = PartitionWatch(topic, consumer, partition, op_name, limits, sensor=name)
    description = f"Claims events of {watch.label} for consumer {consumer.name}, and requests a run for them."
    return _build(name, watch, job, default_status, description)


def build_consumer_sensor(
    *,
    topic: Topic,
    consumer: Consumer,
    job: dg.UnresolvedAssetJobDefinition | dg.JobDefinition,
    op_name: str,
    limits: Limits,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """One sensor for all partitions of a consumer, called like its job: a tick requests a run per lagging partition."""
    description = (
        f"Claims events of {topic.name} for consumer {consumer.name}, partition by partition, and requests a run for "
        "each that has some."
    )
    watch = ConsumerWatch(topic, consumer, op_name, limits, sensor=job.name)
    return _build(job.name, watch, job, default_status, description)


def build_shared_sensor(
    *,
    members: Sequence[ConsumerWatch],
    job: dg.UnresolvedAssetJobDefinition,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """One sensor for consumers that share their runs, called like their job: at most one run at a time on a shard."""
    description = (
        f"Claims events for one of {', '.join(member.label for member in members)}, and requests a run of all, unless "
        "one is under way."
    )
    return _build(job.name, SharedWatch(tuple(members)), job, default_status, description)


def _build(
    name: str,
    watch: Watch,
    job: dg.UnresolvedAssetJobDefinition | dg.JobDefinition,
    default_status: dg.DefaultSensorStatus,
    description: str,
) -> dg.SensorDefinition:
    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=MIN_INTERVAL,
        default_status=default_status,
        description=description,
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER},
    )
    def tick(context: dg.SensorEvaluationContext, eventsql: EventSQLResource) -> dg.SensorResult:
        with eventsql.bounded(TICK_TIMEOUT) as platform:
            return evaluate_and_linger(watch, platform, context)

    return tick
