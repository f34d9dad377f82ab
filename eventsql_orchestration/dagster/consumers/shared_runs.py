"""Consumers that share their runs, where a run costs more to start than to work: one Spark session for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import dagster as dg

from eventsql_orchestration.dagster.consumer_watch import ConsumerWatch
from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.sensors import build_shared_sensor
from eventsql_orchestration.dagster.tags import (
    CONSUMER_TAG,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    SHARED_TAG,
    TOPIC_TAG,
)
from eventsql_orchestration.errors import ValidationError

_OF_ONE = (TOPIC_TAG, CONSUMER_TAG)
"""Tags of a consumer's own runs, which those of several do not carry."""


def share_runs(
    name: str,
    consumers: Sequence[ConsumerDefinition],
    *,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> tuple[ConsumerDefinition, ...]:
    """The consumers as they are, but with one job and one sensor for all of them, both called `name`.

    The sensor claims for one of them and requests a run, whose process consumes that claim and then, one consumer after
    the other, what waits for each. What starts once for a process, such as a Spark session and its workers, starts once
    for all. There is one run at a time (on each shard, where there are several), so what comes for a consumer that had
    its turn waits until the run has ended: the `drain_seconds` of all of them, at most. A consumer that fails keeps no
    other from its turn.

    Raises `ValidationError` for fewer than two consumers, and where one of them reads what another materializes, whose
    step would have to come first: such consumers have runs of their own.
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
        ConsumerWatch(each.topic, each.consumer, "_".join(each.key.path), each.limits, sensor=name)
        for each in consumers
    ]
    sensor = build_shared_sensor(members=members, job=job, default_status=default_status)
    return tuple(replace(consumer, job=job, sensors=(sensor,)) for consumer in consumers)
