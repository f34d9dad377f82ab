"""Consumers that share their runs, for runs that cost more to start than to work: one Spark session serves all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import dagster as dg

from eventsql_orchestration.dagster.consumers.consumer_tick import ConsumerWatch, SharedWatch
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, TickOptions
from eventsql_orchestration.dagster.consumers.sensors import build_sensor
from eventsql_orchestration.dagster.tags import (
    CONSUMER_TAG,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    SHARED_TAG,
    TOPIC_TAG,
)
from eventsql_orchestration.errors import ValidationError

_OF_ONE = (TOPIC_TAG, CONSUMER_TAG)
"""Tags of a consumer's own runs that shared runs do not have."""


def share_runs(
    name: str,
    consumers: Sequence[ConsumerDefinition],
    *,
    ticks: TickOptions = DEFAULT_TICKS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> tuple[ConsumerDefinition, ...]:
    """The consumers with one common job and one common sensor, both named `name`.

    The sensor claims for one of them and requests a run. The run consumes that claim and then the events that wait for
    each consumer, one consumer after the other, in one process: a Spark session starts once for all. There is one run
    at a time on each shard. So events that come for a consumer after its turn wait until the run has ended: at most the
    `drain_seconds` of all consumers. A consumer that fails delays no other.

    Raises `ValidationError` for fewer than two consumers. Also raises it if a consumer reads an asset that another
    materializes: their steps have an order, so each needs its own runs.
    """
    if len(consumers) < 2:
        raise ValidationError("runs are shared by two consumers at least")
    materialized = {key: consumer for consumer in consumers for key in consumer.asset.keys}
    if len(materialized) != sum(len(list(consumer.asset.keys)) for consumer in consumers):
        raise ValidationError(f"{name}: a consumer is named twice, or two of them publish to one topic")
    for consumer in consumers:
        for dependency in consumer.asset.get_asset_spec(consumer.key).deps:
            if dependency.asset_key in materialized:
                raise ValidationError(
                    f"{name}: consumer {consumer.consumer.name!r} reads {dependency.asset_key.to_user_string()}, which "
                    f"{materialized[dependency.asset_key].consumer.name!r} materializes: they cannot share runs"
                )
    job = dg.define_asset_job(
        name,
        selection=dg.AssetSelection.assets(*materialized).without_checks(),
        description=f"Consumes what waits for {', '.join(consumer.consumer.name for consumer in consumers)}, in turn.",
        executor_def=dg.in_process_executor,
        tags={
            **{
                tag: value
                for consumer in consumers
                for tag, value in (consumer.job.tags or {}).items()
                if tag not in _OF_ONE
            },
            HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER,
            SHARED_TAG: "true",
        },
    )
    members = [
        ConsumerWatch(each.topic, each.consumer, "_".join(each.key.path), each.limits, name, ticks)
        for each in consumers
    ]
    sensor = build_sensor(SharedWatch(tuple(members)), job, default_status)
    return tuple(replace(consumer, job=job, sensors=(sensor,)) for consumer in consumers)
