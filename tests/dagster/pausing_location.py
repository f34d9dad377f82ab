"""A code location whose runs stop in the window that their consumer is named after.

It changes the package for the whole process that imports it, so no test may.
"""

from __future__ import annotations

import os
from typing import Any

import dagster as dg

from eventsql_orchestration.dagster import EventSQLResource, batches, consumers, draining, handover, watch
from eventsql_orchestration.dagster.steps import drain
from eventsql_orchestration.log.claims import Claim, Claims, NoClaim, Processed
from eventsql_orchestration.log.side_consumers import MARK
from tests.dagster import windows
from tests.dagster.pausing_consumers import CONSUMERS, RETRIED, replayed, replayed_backfill
from tests.dagster.stopping import fork_runs, stop_at

fork_runs(__name__)

handover.LEAD = windows.LEAD  # type: ignore[misc]  # the same for all of the window's second half
watch.ADOPT_TIMEOUT = 2 * windows.LEASE  # type: ignore[misc]  # a minute is too long for a test
batches.STALLED_AFTER = windows.LEASE  # type: ignore[misc]  # five minutes are

adopt, claim, process, process_batch = Claims.adopt, Claims.claim, Claims.process, Claims._process_batch
succeed = draining.Draining.succeed


def pausing_adopt(claims: Claims, claim_id: int, **options: Any) -> Claim:
    window = claims.get(claim_id)[0].consumer
    if window == windows.BEFORE_ADOPTION:
        stop_at(window)
    adopted = adopt(claims, claim_id, **options)
    if window == windows.AFTER_ADOPTION:
        stop_at(window)
    return adopted


def pausing_claim(claims: Claims, topic: str, consumer: str, *given: Any, **options: Any) -> Claim | NoClaim:
    by_run = options["owner"].startswith(draining.OWNER_PREFIX)
    if by_run and consumer == windows.BEFORE_NEXT_CLAIM:
        stop_at(consumer)
    found = claim(claims, topic, consumer, *given, **options)
    if by_run and consumer == windows.AFTER_NEXT_CLAIM and isinstance(found, Claim):
        stop_at(consumer)
    return found


def pausing_process(claims: Claims, claim: Claim, *given: Any, **options: Any) -> Processed:
    processed = process(claims, claim, *given, **options)
    if claim.consumer == windows.AFTER_LAST_COMMIT:
        stop_at(claim.consumer)
    return processed


def pausing_process_batch(claims: Claims, claim: Claim, *given: Any, **options: Any) -> Any:
    window = claim.consumer.partition(MARK)[0]
    if claim.position > claim.range.after and window in {
        windows.BETWEEN_BATCHES, windows.SHARED, windows.REPLAYED,
    }:  # fmt: skip
        stop_at(window)
    return process_batch(claims, claim, *given, **options)


def pausing_succeed(self: draining.Draining, *given: Any, **options: Any) -> Claim | str:
    found = succeed(self, *given, **options)
    if isinstance(found, Claim):
        stop_at(found.consumer)
    return found


def pausing_drain(context: dg.AssetExecutionContext, *given: Any) -> None:
    if context.run.parent_run_id is not None:
        stop_at(windows.retry_of(given[-1].name))
    drain(context, *given)


for name, pausing in (
    ("adopt", pausing_adopt), ("claim", pausing_claim), ("process", pausing_process),
    ("_process_batch", pausing_process_batch),
):  # fmt: skip
    setattr(Claims, name, pausing)
draining.Draining.succeed = pausing_succeed  # type: ignore[method-assign]  # the forced interleaving
consumers.drain = pausing_drain  # type: ignore[assignment, attr-defined]  # the same


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
