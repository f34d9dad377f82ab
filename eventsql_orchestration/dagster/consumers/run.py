"""A step of a consuming run: its config and its run decide which events it consumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import dagster as dg

from eventsql_orchestration import Consumer, Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.consumers.batch import ReplayError
from eventsql_orchestration.dagster.consumers.definition import ClaimConfig
from eventsql_orchestration.dagster.consumers.drain import Draining
from eventsql_orchestration.dagster.consumers.owners import owner_of_run
from eventsql_orchestration.dagster.consumers.reexecution import (
    ancestors,
    forbid_retries,
    is_automatic_retry,
    repeats_success,
)
from eventsql_orchestration.dagster.consumers.reporting import name_of
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import LATE_TAG, REPLAY_BEGUN_TAG, REPLAY_TAG, SHARD_TAG, SHARED_TAG
from eventsql_orchestration.errors import DatabaseUnavailableError

DrainingOn: TypeAlias = Callable[[Shard], Draining]
"""Returns the `Draining` for a shard."""


def drain(
    context: dg.AssetExecutionContext,
    eventsql: EventSQLResource,
    draining_on: DrainingOn,
    config: ClaimConfig,
    consumer: Consumer,
) -> None:
    """Consume the step's claim; without a claim, the waiting events; or replay a range.

    The run's tag names its shard. A run without the tag, launched by hand, visits all shards and skips those that are
    down. Raises `ReplayError`, `ForeignClaimError` for a claim of another consumer, and
    `ShardSetError` for a claim whose shard is not known.
    """
    shards = _shards(context, eventsql, config)
    down: list[str] = []
    for shard in shards:
        draining = draining_on(shard)
        try:
            _drain(context, draining, config, consumer)
        except DatabaseUnavailableError as error:
            down.append(shard.name or str(shard.database))
            if len(down) == len(shards):
                raise
            context.log.warning("shard %s is down: %s", down[-1], error)
            draining.drained.note = f"not all is consumed of {', '.join(down)}, which is down"
        if draining.drained.over:
            return


def _shards(context: dg.AssetExecutionContext, eventsql: EventSQLResource, config: ClaimConfig) -> Sequence[Shard]:
    shard, claim = config.shard or context.run.tags.get(SHARD_TAG), config.claim
    if SHARED_TAG in context.run.tags and (requested := _requested(context)):
        shard, claim = shard or requested.get("shard"), requested["claim"]
    return eventsql.shards if shard is None and claim is None else (eventsql.shard(shard),)


def _drain(context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig, consumer: Consumer) -> None:
    shared = SHARED_TAG in context.run.tags
    requested_for = _requested(context).get("claim") if shared else None
    if config.claim is not None:
        if draining.is_another_claim(config.claim, context.run.tags):
            if _replays(context, config):
                raise ReplayError(f"there is nothing to replay: {draining.drained.note}")
            return
        draining.require_claim_of(consumer, config.claim)
        if _replays(context, config) and _replay(context, draining, config):
            return
        claim = draining.take_over(config.claim)
        if claim is None:
            _come_too_late(context, draining, config.claim)
        else:
            context.log.info("%s is taken over by this run", claim)
            draining.run(claim)
        if shared and not draining.drained.over:
            # The sensor claims one partition only.
            _claim_and_drain(context, draining, config, consumer)
    elif config.succeeds is not None and _replays(context, config):
        _replay_successor(context, draining, config, consumer)
    elif requested_for is None:
        _claim_and_drain(context, draining, config, consumer)
    elif _replays(context, config):
        context.log.info("this run consumes a range once more: what waits for this asset is none of it")
    else:
        with draining.keeping(requested_for, context.run.tags):
            _claim_and_drain(context, draining, config, consumer)


def _requested(context: dg.AssetExecutionContext) -> Mapping[str, Any]:
    """The config of the step with the claim that a shared run was requested for; empty if the run has no claim."""
    run_config: Mapping[str, Any] = context.run.run_config
    configs = (step.get("config", {}) for step in run_config.get("ops", {}).values())
    return next((config for config in configs if config.get("claim") is not None), {})


def _claim_and_drain(
    context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig, consumer: Consumer
) -> None:
    """Consume the waiting events of one partition, or of each partition of the consumer."""
    for partition in draining.partitions(consumer) if config.partition is None else (config.partition,):
        if config.succeeds is None:
            found = draining.claim(consumer.topic, consumer.name, partition)
        else:
            found = draining.succeed(
                config.succeeds,
                consumer.topic,
                consumer.name,
                partition,
                is_over=partial(_is_over, context, config.succeeds),
            )
        if isinstance(found, Claim):
            draining.run(found)
        else:
            on = "" if draining.shard is None else f" on shard {draining.shard!r}"
            context.log.info("nothing to consume of %s%s: %s", name_of(consumer, partition), on, found)
        if draining.drained.over:
            return


def _come_too_late(context: dg.AssetExecutionContext, draining: Draining, claim_id: int) -> None:
    """Record that the run's claim had ended before the run could take it over, and whether the run lost it.

    A re-execution has no claim to lose, and a committed claim is not lost. But a run that was reported as dead must not
    overwrite the report with a success.
    """
    instance, run_id = context.instance, context.run.run_id
    late = context.run.parent_run_id is None and not draining.is_committed(claim_id)
    if late:
        # Runs that a tick requests from the same offset get longer.
        instance.add_run_tags(run_id, {LATE_TAG: "true"})
    run = instance.get_run_by_id(run_id)
    if late or (run is not None and run.is_finished):
        draining.drained.lost = draining.drained.note


def _is_over(context: dg.AssetExecutionContext, run_id: str) -> bool:
    run = context.instance.get_run_by_id(run_id)
    return run is None or run.is_finished


def _replays(context: dg.AssetExecutionContext, config: ClaimConfig) -> bool:
    """Whether a run replays its range if the range was committed.

    A retry of a failed run, by Dagster or by hand, must not repeat committed events. A re-execution of a run that had
    succeeded can only mean a replay. Raises `ReplayError` for an automatic retry of a run whose config asks for a
    replay.
    """
    if config.replay is None:
        return repeats_success(context.run, context.instance)
    if config.replay and is_automatic_retry(context.run, context.instance):
        raise _no_second_replay(context, "this is Dagster's automatic retry of a run that was to replay a range")
    return config.replay


def _no_second_replay(context: dg.AssetExecutionContext, why: str) -> ReplayError:
    """The error for a second replay of a partly replayed range that no person requested. Forbids further retries."""
    forbid_retries(context.run, context.instance)
    return ReplayError(
        f"nothing is replayed: {why}, and a part of it may have taken effect. To replay the whole range, execute the "
        "run that had succeeded again"
    )


def _replay_successor(
    context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig, consumer: Consumer
) -> None:
    """Replay the first range that a successor had claimed. A successor is requested without a claim."""
    assert config.partition is not None, "a partition is taken over"
    firsts = (
        draining.first_of(run_id, consumer, config.partition) for run_id in ancestors(context.run, context.instance)
    )
    claim_id = next((first for first in firsts if first is not None), None)
    if claim_id is None:
        raise ReplayError(
            "there is nothing to replay: the run that is executed again had committed no range, or its claims are "
            "deleted by now; its materialization names what it consumed, and `eventsql backfill` replays any range"
        )
    _replay(context, draining, config.model_copy(update={"claim": claim_id}))


def _replay(context: dg.AssetExecutionContext, draining: Draining, config: ClaimConfig) -> bool:
    """Replay a run's range.

    False if no person requested a replay, and the range was never committed, or this run committed it and its step is
    retried.
    """
    assert config.claim is not None, "a replay is that of a claim"
    claim, run_id = draining.committed(config.claim), context.run.run_id
    if config.replay is None and (claim is None or claim.owner == owner_of_run(run_id)):
        return False
    if claim is None:
        raise ReplayError(
            f"claim {config.claim} was not committed, so there is nothing to replay: its events are consumed, if they "
            "were not yet, by the next run that the consumer's sensor requests"
        )
    begun = f"{run_id}/{claim.id}"
    run = context.instance.get_run_by_id(run_id)
    if run is not None and run.tags.get(REPLAY_BEGUN_TAG) == begun:
        # A RetryPolicy has begun the step anew, or a launcher has started the run anew.
        raise _no_second_replay(context, f"this run has begun to replay {claim} before")
    context.instance.add_run_tags(run_id, {REPLAY_TAG: "true", REPLAY_BEGUN_TAG: begun})
    forbid_retries(context.run, context.instance)
    context.log.info("%s was committed and is replayed: its effects happen again, the offset stays", claim)
    draining.replay(claim)
    return True
