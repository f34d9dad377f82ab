"""A step of a consuming run: its config and its run decide which events it consumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import Consumer, Shard, Topic
from eventsql_orchestration.consuming.claims import Claim, NoClaim
from eventsql_orchestration.dagster.consumers.asset_lag import AssetLag
from eventsql_orchestration.dagster.consumers.claim_runs import is_another_claim
from eventsql_orchestration.dagster.consumers.definition import ClaimConfig, Computation
from eventsql_orchestration.dagster.consumers.handover import RunDraining, comes_soon
from eventsql_orchestration.dagster.consumers.options import RunLimits
from eventsql_orchestration.dagster.consumers.reexecution import (
    ancestors,
    forbid_retries,
    is_automatic_retry,
    repeats_success,
    requested_tags,
)
from eventsql_orchestration.dagster.consumers.reporting import report, results, without_retries
from eventsql_orchestration.dagster.register import failing_if_unregistered, why_unregistered
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.steps import awaited, log_materialization
from eventsql_orchestration.dagster.tags import LATE_TAG, REPLAY_BEGUN_TAG, REPLAY_TAG, SHARD_TAG, SHARED_TAG
from eventsql_orchestration.errors import ClaimLostError, DatabaseUnavailableError, EventSQLError
from eventsql_orchestration.orchestration.batch import BatchConsumer
from eventsql_orchestration.orchestration.drain import Drained
from eventsql_orchestration.orchestration.errors import ForeignClaimError, ReplayError
from eventsql_orchestration.orchestration.owners import owner_of_run
from eventsql_orchestration.orchestration.shards import partition_label, shards_of

LAG_TIMEOUT: Final = 1.0
"""Seconds that each statement may take when a run reads the lag at its end."""


@dataclass(frozen=True)
class ConsumerStep:
    """The step of a consumer's asset: it consumes, reports, and materializes the asset and its topics."""

    topic: Topic
    consumer: Consumer
    limits: RunLimits
    key: dg.AssetKey
    computation: Computation

    def __call__(
        self, context: dg.AssetExecutionContext, config: ClaimConfig, resources: Mapping[str, Any]
    ) -> Iterator[dg.MaterializeResult[Any]]:
        eventsql: EventSQLResource = resources[RESOURCE_KEY]
        drained = Drained()
        publishes = self.computation.publishes
        try:
            with failing_if_unregistered(eventsql.platform, self.topic, self.consumer), without_retries():
                self._drain(context, config, resources, drained)
            missing = None
            if drained.lost is not None:
                missing = why_unregistered(eventsql.platform, self.topic, self.consumer)
            report(context, self.key, self.consumer, drained, eventsql.platform.dead_letters, missing=missing)
        except BaseException:
            # A failing run has committed the events that it consumed, so they belong to the history of its assets.
            if drained.events:
                for key, metadata in results(self.key, self.consumer, publishes, drained):
                    log_materialization(context, key, metadata)
            raise

        if config.claim is None and SHARED_TAG in context.run.tags and not drained.claims:
            return
        for key, metadata in results(self.key, self.consumer, publishes, drained, awaited=awaited(context)):
            lag = self._lag(context, eventsql) if key == self.key else {}
            yield dg.MaterializeResult(asset_key=key, metadata={**lag, **metadata})

    def _lag(self, context: dg.AssetExecutionContext, eventsql: EventSQLResource) -> Mapping[str, int | float]:
        """The consumer's lag at the end of the run, so that the plot of its lag has no gap there."""
        try:
            # The server counts the waiting events one by one. If that takes too long, leave it to the sensor `lag`.
            with eventsql.bounded(LAG_TIMEOUT) as platform:
                # Ask each shard: `platform.lag` would also release consumers on added shards, and runs must not do
                # that.
                found = [
                    replace(lag, shard=shard.name)
                    for shard in shards_of(platform)
                    for lag in shard.lag(self.topic.name, self.consumer.name)
                ]
        except EventSQLError as error:
            context.log.info("the lag is unknown: %s", error)
            return {}
        return AssetLag(tuple(found)).numbers()

    def _drain(
        self, context: dg.AssetExecutionContext, config: ClaimConfig, resources: Mapping[str, Any], drained: Drained
    ) -> None:
        """Consume the step's claim; without a claim, the waiting events; or replay a range.

        The run's tag names its shard. A run without the tag, launched by hand, visits all shards and skips those that
        are down. Raises `ReplayError`, `ForeignClaimError` for a claim of another consumer, and `ShardSetError` for a
        claim whose shard is not known.
        """
        run_id = context.run.run_id
        # A shared run does not wait for more events: the other consumers are next, and while it waits without a claim,
        # nothing shows that it lives.
        limits = replace(self.limits, drain_idle=0.0) if SHARED_TAG in context.run.tags else self.limits
        comes = partial(comes_soon, run_id, context.instance)
        shards = _shards(context, resources[RESOURCE_KEY], config)
        down = 0
        for shard in shards:
            consume = self.computation.consume(context, shard, resources)
            draining = RunDraining(shard, self.consumer, consume, limits, owner_of_run(run_id), drained, comes)
            try:
                _OnShard(context, config, draining).consume()
            except DatabaseUnavailableError as error:
                down += 1
                if down == len(shards):
                    raise
                context.log.warning("shard %s is down: %s", shard.label, error)
                drained.add_note(f"events are left on {shard.label}, which cannot be reached")
            if drained.over:
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


@dataclass(frozen=True)
class _OnShard:
    """A step of a consuming run on one shard."""

    context: dg.AssetExecutionContext
    config: ClaimConfig
    draining: RunDraining

    def consume(self) -> None:
        config, requested_for = self.config, _requested(self.context).get("claim")
        if config.claim is not None:
            self._consume_claim(config.claim)
        elif config.succeeds is not None and self._replays():
            self._replay_successor()
        elif requested_for is None:
            if config.replay:
                raise ReplayError(
                    "there is nothing to replay: the config names no claim. `eventsql backfill` replays any range"
                )
            self._consume_waiting()
        elif self._replays():
            self.context.log.info(
                "this run replays a range of another consumer: it leaves this consumer's events to other runs"
            )
        else:
            with self._keeping(requested_for):
                self._consume_waiting()

    def _consume_claim(self, claim_id: int) -> None:
        """Consume the claim that the run was requested for, or replay it."""
        draining, drained = self.draining, self.draining.drained
        if self._is_another_claim(claim_id):
            drained.note = (
                f"claim {claim_id} is not the claim that this run was requested for, but a claim with the same number: "
                "the database was restored or created again since"
            )
            if self._replays():
                raise ReplayError(f"there is nothing to replay: {drained.note}")
            return

        self._require_own_claim(claim_id)
        if self._replays() and self._replay(claim_id):
            return

        try:
            claim = self._take_over(claim_id)
        except ClaimLostError as error:
            drained.note = str(error)
            self._come_too_late(claim_id)
        else:
            self.context.log.info("this run takes %s over", claim)
            draining.run(claim)
        if SHARED_TAG in self.context.run.tags and not drained.over:
            # The sensor claims one partition only.
            self._consume_waiting()

    def _consume_waiting(self) -> None:
        """Consume the waiting events of one partition, or of each partition of the consumer."""
        context, draining = self.context, self.draining
        for partition in draining.partitions() if self.config.partition is None else (self.config.partition,):
            found = self._left_claim(partition) or self._claim(partition)
            if isinstance(found, Claim):
                draining.run(found)
            else:
                on = "" if draining.shard.name is None else f" on shard {draining.shard.name!r}"
                place = partition_label(draining.consumer.topic, partition)
                context.log.info("nothing to consume of topic %s%s: %s", place, on, found.reason)
                if found.waiting is None:
                    # Another owner has the partition, or it has to wait. Events may be left there.
                    draining.drained.add_note(f"topic {place}{on}: {found.reason}")
            if draining.drained.over:
                return

    def _claim(self, partition: int) -> Claim | NoClaim:
        """Claim the waiting events of a partition, or take the partition over from the run that drains it."""
        run_id = self.config.succeeds
        if run_id is None:
            return self.draining.claim(partition, named=self.config.partition is not None)
        return self.draining.succeed(run_id, partition, is_over=partial(_is_over, self.context, run_id))

    def _take_over(self, claim_id: int) -> Claim:
        """Take over the claim that the run was requested for, or the later claim that an earlier attempt has left.

        Raises `ClaimLostError`.
        """
        try:
            return self.draining.take_over(claim_id)
        except ClaimLostError:
            committed = self._committed(claim_id)
            left = None if committed is None else self._left_claim(committed.range.partition)
            if left is None:
                raise
            return left

    def _left_claim(self, partition: int) -> Claim | None:
        """Take over the live claim that an earlier attempt has left in a partition; None if there is no such claim.

        The attempt was of this run, or of a run that this run executes again. Its lease may last, but it is over: the
        claim gets a new epoch, so that a process that only seemed dead cannot commit it.
        """
        return self.draining.take_over_live(partition, self._is_of_earlier_attempt)

    def _is_of_earlier_attempt(self, claim: Claim) -> bool:
        """Whether the owner of a claim is this run, or an ended run that this run executes again."""
        if claim.owner == self.draining.owner:
            return True
        executed = ancestors(self.context.run, self.context.instance)
        return any(claim.owner == owner_of_run(run_id) and _is_over(self.context, run_id) for run_id in executed)

    @contextmanager
    def _keeping(self, claim_id: int) -> Iterator[None]:
        """Keep the run's claim leased while another step of the run goes first."""
        draining = self.draining
        with ExitStack() as stack:
            # If the claim is lost, its own step has ended, or will find that out.
            with suppress(ClaimLostError):
                if not self._is_another_claim(claim_id):
                    claim = draining.take_over(claim_id)
                    stack.enter_context(draining.shard.claims.heartbeat(claim, lease=draining.limits.lease))
            yield

    def _is_another_claim(self, claim_id: int) -> bool:
        """Whether the run was requested for another claim with this id."""
        tags = requested_tags(self.context.run, self.context.instance)
        return is_another_claim(self.draining.shard, claim_id, tags)

    def _require_own_claim(self, claim_id: int) -> None:
        """Raise `ForeignClaimError` if the claim belongs to another consumer."""
        consumer = self.draining.consumer
        # A claim that is lost is reported when the run tries to take it over.
        with suppress(ClaimLostError):
            claim, _ = self.draining.shard.claims.get(claim_id)
            if (claim.range.topic, claim.consumer) != (consumer.topic, consumer.name):
                raise ForeignClaimError(
                    f"{claim} does not belong to consumer {consumer.name!r} of topic {consumer.topic!r}: launch the "
                    "run without a claim, and it claims the waiting events itself"
                )

    def _come_too_late(self, claim_id: int) -> None:
        """Record that the run's claim had ended before the run could take it over, and whether the run lost it.

        A re-execution has no claim to lose, and a committed claim is not lost. But a run that was reported as dead must
        not overwrite the report with a success.
        """
        instance, run_id = self.context.instance, self.context.run.run_id
        late = self.context.run.parent_run_id is None
        with suppress(ClaimLostError):
            late = late and self._committed(claim_id) is None
        if late:
            # The next runs from the same offset get more time to adopt their claims.
            instance.add_run_tags(run_id, {LATE_TAG: "true"})
        run = instance.get_run_by_id(run_id)
        if late or (run is not None and run.is_finished):
            self.draining.drained.lost = self.draining.drained.note

    def _committed(self, claim_id: int) -> Claim | None:
        """The claim if it was committed, else None. Raises `ClaimNotFoundError`."""
        shard = self.draining.shard
        claim, state = shard.claims.get(claim_id)
        return replace(claim, shard=shard.name) if state == "committed" else None

    def _replays(self) -> bool:
        """Whether a run replays its range if the range was committed.

        A retry of a failed run, by Dagster or by hand, must not repeat committed events. A re-execution of a run that
        had succeeded can only mean a replay. Raises `ReplayError` for an automatic retry of a run whose config asks for
        a replay.
        """
        run, instance, replay = self.context.run, self.context.instance, self.config.replay
        if replay is None:
            return repeats_success(run, instance)
        if replay and is_automatic_retry(run, instance):
            raise self._no_second_replay("this run is Dagster's automatic retry of a run that replays a range")
        return replay

    def _no_second_replay(self, why: str) -> ReplayError:
        """Forbid retries. Returns the error for a replay that no person requested, of a partly replayed range."""
        forbid_retries(self.context.run, self.context.instance)
        return ReplayError(
            f"nothing was replayed: {why}, and a part of the range may have taken effect. To replay the whole range, "
            "re-execute the run that succeeded"
        )

    def _replay_successor(self) -> None:
        """Replay the first range that a successor had claimed. A successor is requested without a claim."""
        draining, partition = self.draining, self.config.partition
        assert partition is not None, "a partition is taken over"
        topic, name = draining.consumer.topic, draining.consumer.name
        for run_id in ancestors(self.context.run, self.context.instance):
            claim_id = draining.shard.claims.first_of(owner_of_run(run_id), topic, name, partition)
            if claim_id is not None:
                self._replay(claim_id)
                return
        raise ReplayError(
            "there is nothing to replay: the re-executed run committed no range, or its claims are deleted by now. The "
            "run's materialization names the ranges that it consumed; `eventsql backfill` replays any range"
        )

    def _replay(self, claim_id: int) -> bool:
        """Hand the range of a committed claim to the function again, without a lease and without moving the offset.

        False if no person requested a replay, and either the range was never committed, or this run committed it before
        its step was retried. Raises `ReplayError` if the function commits claims itself, or if events of the range are
        gone.
        """
        context, draining = self.context, self.draining
        claim, run_id = self._committed(claim_id), context.run.run_id
        if self.config.replay is None and (claim is None or claim.owner == draining.owner):
            return False
        if claim is None:
            raise ReplayError(
                f"there is nothing to replay: claim {claim_id} was not committed. The consumer's sensor requests "
                "another run for its events"
            )
        begun = f"{run_id}/{claim.id}"
        run = context.instance.get_run_by_id(run_id)
        if run is not None and run.tags.get(REPLAY_BEGUN_TAG) == begun:
            # A RetryPolicy has begun the step anew, or a launcher has started the run anew.
            raise self._no_second_replay(f"this run has already begun to replay {claim}")
        context.instance.add_run_tags(run_id, {REPLAY_TAG: "true", REPLAY_BEGUN_TAG: begun})
        forbid_retries(context.run, context.instance)
        context.log.info("replaying %s, which was committed: its effects happen again, the offset stays", claim)
        if not isinstance(draining.consume, BatchConsumer):
            raise ReplayError(
                f"{claim} cannot be replayed: it is committed, and the consumer's function commits its claims itself. "
                "Consume the range with another consumer, or move the offset back with `eventsql seek`"
            )
        draining.drained.claims.append((claim, draining.consume.replay(claim)))
        return True


def _is_over(context: dg.AssetExecutionContext, run_id: str) -> bool:
    run = context.instance.get_run_by_id(run_id)
    return run is None or run.is_finished
