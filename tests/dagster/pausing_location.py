"""A code location whose runs stop in the window that their consumer is named after.

It changes the package for the whole process that imports it, so no test may.
"""

from __future__ import annotations

import os
from typing import Any

import dagster as dg

from eventsql_orchestration.consuming.batch import Batch, BatchResult
from eventsql_orchestration.consuming.claim_processing import ClaimSource
from eventsql_orchestration.consuming.claim_pruning import RUN_OWNER
from eventsql_orchestration.consuming.claims import Claim, Claims, NoClaim
from eventsql_orchestration.dagster import EventSQLResource
from eventsql_orchestration.dagster.consumers.handover import RunDraining
from eventsql_orchestration.dagster.consumers.run import ConsumerStep
from eventsql_orchestration.database import Connection
from eventsql_orchestration.orchestration import batch
from eventsql_orchestration.topics.side_consumers import MARK
from tests.dagster import windows
from tests.dagster.pausing_consumers import CONSUMERS, RETRIED, replayed, replayed_backfill
from tests.dagster.stopping import stop_at

batch.STALLED_AFTER = windows.LEASE  # type: ignore[misc]  # five minutes are

adopt, claim, process, open_batch = Claims.adopt, Claims.claim, Claims.process, ClaimSource.open
succeed, drain = RunDraining.succeed, ConsumerStep._drain


def pausing_adopt(claims: Claims, claim_id: int, **options: Any) -> Claim:
    window = claims.get(claim_id)[0].consumer
    if window == windows.BEFORE_ADOPTION:
        stop_at(window)
    adopted = adopt(claims, claim_id, **options)
    if window == windows.AFTER_ADOPTION:
        stop_at(window)
    return adopted


def pausing_claim(claims: Claims, topic: str, consumer: str, *given: Any, **options: Any) -> Claim | NoClaim:
    by_run = options["owner"].startswith(RUN_OWNER)
    if by_run and consumer == windows.BEFORE_NEXT_CLAIM:
        stop_at(consumer)
    found = claim(claims, topic, consumer, *given, **options)
    if by_run and consumer == windows.AFTER_NEXT_CLAIM and isinstance(found, Claim):
        stop_at(consumer)
    return found


def pausing_process(claims: Claims, claim: Claim, *given: Any, **options: Any) -> BatchResult:
    processed = process(claims, claim, *given, **options)
    if claim.consumer == windows.AFTER_LAST_COMMIT:
        stop_at(claim.consumer)
    return processed


def pausing_open(source: ClaimSource, connection: Connection, limit: int) -> Batch:
    claim = source._claim
    window = claim.consumer.partition(MARK)[0]
    if claim.position > claim.range.after and window in {
        windows.BETWEEN_BATCHES, windows.SHARED, windows.REPLAYED,
    }:  # fmt: skip
        stop_at(window)
    return open_batch(source, connection, limit)


def pausing_succeed(self: RunDraining, *given: Any, **options: Any) -> Claim | NoClaim:
    found = succeed(self, *given, **options)
    if isinstance(found, Claim):
        stop_at(found.consumer)
    return found


def pausing_drain(step: ConsumerStep, context: dg.AssetExecutionContext, *given: Any) -> None:
    if context.run.parent_run_id is not None:
        stop_at(windows.retry_of(step.consumer.name))
    drain(step, context, *given)


for name, pausing in (("adopt", pausing_adopt), ("claim", pausing_claim), ("process", pausing_process)):
    setattr(Claims, name, pausing)
ClaimSource.open = pausing_open  # type: ignore[method-assign, assignment]  # the forced interleaving
RunDraining.succeed = pausing_succeed  # type: ignore[method-assign]  # the forced interleaving
ConsumerStep._drain = pausing_drain  # type: ignore[method-assign, assignment]  # the same


@dg.sensor(
    job_name=replayed_backfill.job.name,
    default_status=dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=1,
)
def backfills(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    """A run for each partition of the backfill that a test has registered."""
    assert replayed_backfill.partitions.name is not None
    keys = context.instance.get_dynamic_partitions(replayed_backfill.partitions.name)
    return dg.SensorResult([dg.RunRequest(run_key=key, partition_key=key, tags=RETRIED) for key in keys])


chosen = [consumer for name, consumer in CONSUMERS.items() if name in os.environ[windows.CHOSEN].split()]
defs = dg.Definitions(
    assets=[*(consumer.asset for consumer in chosen), replayed.asset, replayed_backfill.asset],
    jobs=[*{consumer.job.name: consumer.job for consumer in chosen}.values(), *replayed_backfill.jobs],
    sensors=[*{sensor.name: sensor for consumer in chosen for sensor in consumer.sensors}.values(), backfills],
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
