"""A step of a consuming run: its config and its run decide which events it consumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import dagster as dg

from eventsql_orchestration import Shard
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster.consumers.definition import ClaimConfig
from eventsql_orchestration.dagster.consumers.reexecution import (
    ancestors,
    forbid_retries,
    is_automatic_retry,
    repeats_success,
    requested_tags,
)
from eventsql_orchestration.dagster.consumers.run_draining import RunDraining
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import LATE_TAG, REPLAY_BEGUN_TAG, REPLAY_TAG, SHARD_TAG, SHARED_TAG
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.errors import ReplayError
from eventsql_orchestration.orchestration.shards import partition_label

DrainingOn: TypeAlias = Callable[[Shard], RunDraining]
"""Returns the `RunDraining` for a shard."""


def drain(
    context: dg.AssetExecutionContext, eventsql: EventSQLResource, config: ClaimConfig, draining_on: DrainingOn
) -> None:
    """Consume the step's claim; without a claim, the waiting events; or replay a range.

    The run's tag names its shard. A run without the tag, launched by hand, visits all shards and skips those that are
    down. Raises `ReplayError`, `ForeignClaimError` for a claim of another consumer, and `ShardSetError` for a claim
    whose shard is not known.
    """
    shards = _shards(context, eventsql, config)
    down: list[str] = []
    for shard in shards:
        draining = draining_on(shard)
        try:
            _drain(context, draining, config)
        except DatabaseUnavailableError as error:
            down.append(shard.label)
            if len(down) == len(shards):
                raise
            context.log.warning("shard %s is down: %s", down[-1], error)
            draining.drained.note = f"events are left on {', '.join(down)}, which cannot be reached"
        if draining.drained.over:
            return


def _shards(context: dg.AssetExecutionContext, eventsql: EventSQLResource, config: ClaimConfig) -> Sequence[Shard]:
    requested = _requested(context)
    shard = config.shard or context.run.tags.get(SHARD_TAG) or requested.get("shard")
    has_claim = config.claim is not None or bool(requested)
    return (eventsql.shard(shard),) if has_claim or shard is not None else eventsql.shards


def _requested(context: dg.AssetExecutionContext) -> Mapping[str, Any]:
    """The config of the step with the claim that a shared run was requested for; empty for any other run."""
    run_config: Mapping[str, Any] = context.run.run_config if SHARED_TAG in context.run.tags else {}
    configs = (step.get("config", {}) for step in run_config.get("ops", {}).values())
    return next((config for config in configs if config.get("claim") is not None), {})


def _drain(context: dg.AssetExecutionContext, draining: RunDraining, config: ClaimConfig) -> None:
    requested_for = _requested(context).get("claim")
    if config.claim is not None:
        _drain_claim(context, draining, config, config.claim)
    elif config.succeeds is not None and _replays(context, config):
        _replay_successor(context, draining, config)
    elif requested_for is None:
        if config.replay:
            raise ReplayError(
                "there is nothing to replay: the config names no claim. `eventsql backfill` replays any range"
            )
        _claim_and_drain(context, draining, config)
    elif _replays(context, config):
        context.log.info("this run replays a range of another consumer: it leaves this consumer's events to other runs")
    else:
        with draining.keeping(requested_for, requested_tags(context.run, context.instance)):
            _claim_and_drain(context, draining, config)


def _drain_claim(context: dg.AssetExecutionContext, draining: RunDraining, config: ClaimConfig, claim_id: int) -> None:
    """Consume the claim that the run was requested for, or replay it."""
    if draining.is_another_claim(claim_id, requested_tags(context.run, context.instance)):
        if _replays(context, config):
            raise ReplayError(f"there is nothing to replay: {draining.drained.note}")
        return

    draining.require_own_claim(claim_id)
    if _replays(context, config) and _replay(context, draining, config, claim_id):
        return

    claim = draining.take_over(claim_id)
    if claim is None:
        _come_too_late(context, draining, claim_id)
    else:
        context.log.info("this run takes %s over", claim)
        draining.run(claim)
    if SHARED_TAG in context.run.tags and not draining.drained.over:
        # The sensor claims one partition only.
        _claim_and_drain(context, draining, config)


def _claim_and_drain(context: dg.AssetExecutionContext, draining: RunDraining, config: ClaimConfig) -> None:
    """Consume the waiting events of one partition, or of each partition of the consumer."""
    for partition in draining.partitions() if config.partition is None else (config.partition,):
        if config.succeeds is None:
            found = draining.claim(partition)
        else:
            is_over = partial(_is_over, context, config.succeeds)
            found = draining.succeed(config.succeeds, partition, is_over=is_over)
        if isinstance(found, Claim):
            draining.run(found)
        else:
            on = "" if draining.shard.name is None else f" on shard {draining.shard.name!r}"
            place = partition_label(draining.consumer.topic, partition)
            context.log.info("nothing to consume of topic %s%s: %s", place, on, found.reason)
        if draining.drained.over:
            return


def _come_too_late(context: dg.AssetExecutionContext, draining: RunDraining, claim_id: int) -> None:
    """Record that the run's claim had ended before the run could take it over, and whether the run lost it.

    A re-execution has no claim to lose, and a committed claim is not lost. But a run that was reported as dead must not
    overwrite the report with a success.
    """
    instance, run_id = context.instance, context.run.run_id
    late = context.run.parent_run_id is None and not draining.is_committed(claim_id)
    if late:
        # The next runs from the same offset get more time to adopt their claims.
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
        raise _no_second_replay(context, "this run is Dagster's automatic retry of a run that replays a range")
    return config.replay


def _no_second_replay(context: dg.AssetExecutionContext, why: str) -> ReplayError:
    """The error for a replay that no person requested, of a range that is partly replayed. Forbids further retries."""
    forbid_retries(context.run, context.instance)
    return ReplayError(
        f"nothing was replayed: {why}, and a part of the range may have taken effect. To replay the whole range, "
        "re-execute the run that succeeded"
    )


def _replay_successor(context: dg.AssetExecutionContext, draining: RunDraining, config: ClaimConfig) -> None:
    """Replay the first range that a successor had claimed. A successor is requested without a claim."""
    assert config.partition is not None, "a partition is taken over"
    for run_id in ancestors(context.run, context.instance):
        if (claim_id := draining.first_of(run_id, config.partition)) is not None:
            _replay(context, draining, config, claim_id)
            return
    raise ReplayError(
        "there is nothing to replay: the re-executed run committed no range, or its claims are deleted by now. The "
        "run's materialization names the ranges that it consumed; `eventsql backfill` replays any range"
    )


def _replay(context: dg.AssetExecutionContext, draining: RunDraining, config: ClaimConfig, claim_id: int) -> bool:
    """Replay a run's range.

    False if no person requested a replay, and either the range was never committed, or this run committed it before its
    step was retried.
    """
    claim, run_id = draining.committed(claim_id), context.run.run_id
    if config.replay is None and (claim is None or claim.owner == draining.owner):
        return False
    if claim is None:
        raise ReplayError(
            f"there is nothing to replay: claim {claim_id} was not committed. The consumer's sensor requests another "
            "run for its events"
        )
    begun = f"{run_id}/{claim.id}"
    run = context.instance.get_run_by_id(run_id)
    if run is not None and run.tags.get(REPLAY_BEGUN_TAG) == begun:
        # A RetryPolicy has begun the step anew, or a launcher has started the run anew.
        raise _no_second_replay(context, f"this run has already begun to replay {claim}")
    context.instance.add_run_tags(run_id, {REPLAY_TAG: "true", REPLAY_BEGUN_TAG: begun})
    forbid_retries(context.run, context.instance)
    context.log.info("replaying %s, which was committed: its effects happen again, the offset stays", claim)
    draining.replay(claim)
    return True
