"""What a step of a consuming run consumes, by its config and the run that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from eventsql_orchestration import Consumer
from eventsql_orchestration.dagster.definition import ClaimConfig
from eventsql_orchestration.dagster.draining import Draining, ReplayError
from eventsql_orchestration.dagster.reporting import name_of
from eventsql_orchestration.dagster.tags import REPLAY_TAG, SHARED_TAG
from eventsql_orchestration.log.claims import Claim


def drain(context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig, consumer: Consumer) -> None:
    """Consume what a step of a run is to consume: its claim, what waits where it has none, or a range once more.

    Raises `ReplayError`, and `ForeignClaimError` for a claim of another consumer.
    """
    shared = SHARED_TAG in context.run.tags
    requested_for = _requested_for(context) if shared else None
    if config.claim is not None:
        if draining.is_another_claim(config.claim, context.run.tags):
            if _replays(context, config):
                raise ReplayError(f"there is nothing to replay: {draining.drained.lost}")
            return
        draining.require_claim_of(consumer, config.claim)
        if _replays(context, config) and _replay(context, draining, config):
            return
        claim = draining.take_over(config.claim)
        if claim is not None:
            context.log.info("%s is taken over by this run", claim)
            draining.run(claim)
        if shared and draining.drained.failure is None:
            # The sensor claims for one partition only.
            _claim_and_drain(context, draining, config, consumer)
    elif requested_for is None:
        _claim_and_drain(context, draining, config, consumer)
    elif _replays(context, config):
        context.log.info("this run consumes a range once more: what waits for this asset is none of it")
    else:
        with draining.keeping(requested_for, context.run.tags):
            _claim_and_drain(context, draining, config, consumer)


def _requested_for(context: dg.AssetExecutionContext) -> int | None:
    """The claim that a shared run was requested for, which one of its steps has in its config."""
    run_config: Mapping[str, Any] = context.run.run_config
    claims = [step.get("config", {}).get("claim") for step in run_config.get("ops", {}).values()]
    return next((claim for claim in claims if claim is not None), None)


def _claim_and_drain(
    context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig, consumer: Consumer
) -> None:
    """Consume what waits, of one partition or of each that the consumer has now."""
    for partition in draining.partitions(consumer) if config.partition is None else (config.partition,):
        found = draining.claim(consumer.topic, consumer.name, partition)
        if isinstance(found, Claim):
            draining.run(found)
        else:
            context.log.info("nothing to consume of %s: %s", name_of(consumer, partition), found)
        if draining.drained.failure is not None:
            return


def _replays(context: dg.AssetExecutionContext, config: ClaimConfig) -> bool:
    """Whether a run is to consume its range once more, if that was committed.

    Dagster tries failed runs again by itself, and so do people who only want them to have run: neither may repeat what
    was committed. Somebody who executes a run again that had succeeded wants nothing else.
    """
    if config.replay is not None:
        return config.replay
    if context.run.parent_run_id is None:
        return False
    parent = context.instance.get_run_by_id(context.run.parent_run_id)
    return parent is not None and parent.status is dg.DagsterRunStatus.SUCCESS


def _replay(context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig) -> bool:
    """Consume a run's range once more; False where it was never committed and nobody asked for a replay."""
    assert config.claim is not None, "a replay is that of a claim"
    claim = draining.committed(config.claim)
    if claim is None:
        if config.replay is None:
            return False
        raise ReplayError(
            f"claim {config.claim} was not committed, so there is nothing to replay: its events are consumed, if they "
            "were not yet, by the next run that the consumer's sensor requests"
        )
    context.instance.add_run_tags(context.run.run_id, {REPLAY_TAG: "true"})
    context.log.info("%s was committed and is replayed: its effects happen again, the offset stays", claim)
    draining.replay(claim)
    return True
