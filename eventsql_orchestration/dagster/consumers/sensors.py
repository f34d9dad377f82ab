"""The sensors of consumers: a tick claims the next range of a partition and requests one run for it.

A tick makes a claim, because a row lock would be gone before the run exists. docs/dagster_failures.md lists each
possible end of the tick or the run, and the next tick's reaction.

If there are several shards, a tick looks at each shard; a claim and its run belong to one shard.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from eventsql_orchestration.dagster.consumers.long_poll import evaluate_and_linger
from eventsql_orchestration.dagster.consumers.tick import Answer, Watch
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import CONSUMER_RUN

MIN_INTERVAL: Final = 1
"""Dagster looks at sensors every 5 s. An interval of exactly 5 s would skip every second look."""


def build_sensor(
    watch: Watch,
    job: dg.UnresolvedAssetJobDefinition | dg.JobDefinition,
    default_status: dg.DefaultSensorStatus,
) -> dg.SensorDefinition:
    """The sensor of a partition, of a consumer, or of consumers that share their runs."""

    @dg.sensor(
        name=watch.sensor,
        job=job,
        minimum_interval_seconds=MIN_INTERVAL,
        default_status=default_status,
        description=watch.description,
        tags=CONSUMER_RUN,
    )
    def tick(context: dg.SensorEvaluationContext, eventsql: EventSQLResource) -> Answer:
        with eventsql.for_tick(watch.options.statement_timeout) as platform:
            return evaluate_and_linger(watch, platform, context)

    return tick
