"""The sensors of consumers: a tick claims the next range of a partition and requests one run for it.

A tick makes a claim, because a row lock would be gone before the run exists. The table lists each possible end of the
tick or the run, and the next tick's reaction:

| the tick or the run ends | what is left | what the next tick does |
|---|---|---|
| before the claim | nothing | claims |
| after the claim, before the tick is stored | a claim without a run | waits for its lease to end, claims again |
| after the tick is stored, before the launch | a run that Dagster still launches | waits, prolonging the lease |
| while the run waits or starts | a queued run | waits, prolonging the lease |
| in a batch, and Dagster notices | a failed run | releases the claim, claims from the offset reached |
| in a batch, and Dagster does not notice | a run that seems alive | waits for the lease to end, then the same |
| after the effects, before the offset | impossible: both are one transaction | |
| after the offset | a committed claim | claims the next events |

A run that starts after another run got its claim finds the claim lost, and ends.

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
