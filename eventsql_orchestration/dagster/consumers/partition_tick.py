"""A tick of one consumer partition: gathers the input of `decide`, and carries the decision out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from eventsql_orchestration.consuming.claims import Claim, NoClaim, PartitionClaims
from eventsql_orchestration.dagster.consumers.claim_runs import claim_tags, made_at, run_key
from eventsql_orchestration.dagster.consumers.decision import (
    PartitionState,
    RequestSuccessor,
    TryClaim,
    Wait,
    decide,
    draining_run,
    lease_decides,
    needs_late_runs,
)
from eventsql_orchestration.dagster.consumers.handover import successor_of
from eventsql_orchestration.dagster.consumers.tick import Leased, NothingYet, Tick, Watched
from eventsql_orchestration.dagster.tags import AFTER_TAG, FINISHED, LATE_TAG, SUCCEEDS_TAG, partition_tags
from eventsql_orchestration.errors import ClaimLostError


@dataclass(frozen=True)
class PartitionTick:
    """A tick of one partition of a consumer, on the shard of `tick`."""

    watched: Watched
    partition: int
    tick: Tick

    def attend(self, standing: PartitionClaims, run: dg.RunRecord | None) -> dg.RunRequest | dg.SkipReason:
        """Decide about the partition, and carry the decision out.

        `run` is the run that owns or will own the live claim. Raises `ConsumerNotFoundError`, `DatabaseBusyError`,
        `DatabaseUnavailableError`.
        """
        state = self._state(standing, run)
        decision = decide(state, self.watched.limits, self.watched.options)
        if isinstance(decision, TryClaim):
            return self._try_claim(decision, state)
        return self._do(decision, state)

    def _state(self, standing: PartitionClaims, record: dg.RunRecord | None) -> PartitionState:
        tick, live, options = self.tick, standing.claim, self.watched.options
        run = None if record is None else tick.state(record)
        if record is not None and live is not None and not lease_decides(live, run):
            run = tick.state(record, patience=options.adopt_timeout)
        drains = draining_run(standing, run, self.watched.limits, options)
        if drains is not None:
            if live is None and (record := tick.instance.get_run_record_by_id(drains)) is not None:
                run = tick.state(record)
            successor = successor_of(drains, tick.instance)
            return PartitionState(live, run, drains, None if successor is None else tick.state(successor))

        state = PartitionState(live, run)
        if live is None or run is None:
            return state
        tags = {**self._tags, **tick.own_runs, AFTER_TAG: str(live.range.after)}
        if run.finished:
            failures, ended = _failures(tags, tick.instance)
            return replace(state, failures=failures, since_failure=tick.clock() - ended)
        if needs_late_runs(live, run, options):
            return replace(state, late=tick.instance.get_runs_count(dg.RunsFilter(tags={**tags, LATE_TAG: "true"})))
        return state

    def _do(self, decision: Wait | RequestSuccessor, state: PartitionState) -> dg.RunRequest | dg.SkipReason:
        if isinstance(decision, RequestSuccessor):
            run_id = decision.run_id
            config = {"partition": self.partition, "succeeds": run_id}
            # All ticks use the same run key, so there is only one successor.
            return self._request(f"succeeds-{run_id}", config, {SUCCEEDS_TAG: run_id})
        if decision.prolong and state.claim is not None:
            # If the claim is lost, the run has just adopted it.
            with contextlib.suppress(ClaimLostError):
                self.tick.shard.claims.renew(state.claim, lease=self.watched.limits.lease)
        return dg.SkipReason(decision.reason)

    def _try_claim(self, decision: TryClaim, state: PartitionState) -> dg.RunRequest | dg.SkipReason:
        tick, live, run = self.tick, state.claim, state.run
        if decision.release and live is not None and run is not None:
            if tick.shard.claims.release(live):
                tick.open_log().info("released %s: run %s is %s", live, run.run_id, run.label)
            elif decision.presumed_dead is not None:
                return dg.SkipReason(f"run {run.run_id} has just adopted {live}")

        # If the run committed its claim between the two looks, it is alive, and goes on with the next events.
        claim = self._claim(instead_of=None if decision.release else live)
        if isinstance(claim, NoClaim):
            if claim.leased_by is None:
                return (dg.SkipReason if claim.waiting is None else NothingYet)(claim.reason)
            if decision.when_leased is None:
                return Leased(claim.reason)
            return self._do(decision.when_leased, state)

        if decision.presumed_dead is not None:
            # Dagster's default launcher does not notice the death, and the run would count against the queue's limit
            # for ever.
            _report_dead(decision.presumed_dead, tick)
        made = made_at(tick.shard, [claim.id]).get(claim.id)
        if made is None:
            return dg.SkipReason(f"{claim} is gone: its consumer or topic was deleted just now")
        # The key has the claim's time too: the claim's id may occur again, and Dagster ignores a key that it knows.
        shard = tick.shard.name
        tags = {**claim_tags(claim.id, made, shard), AFTER_TAG: str(claim.range.after)}
        return self._request(run_key(claim.id, made, shard), {"claim": claim.id}, tags)

    def _claim(self, *, instead_of: Claim | None) -> Claim | NoClaim:
        watched, limits = self.watched, self.watched.limits
        return self.tick.shard.claims.claim(
            watched.topic.name, watched.consumer.name, self.partition,
            owner=f"sensor {watched.sensor}", min_events=limits.min_events, max_events=limits.max_events,
            max_wait=limits.max_wait, lease=limits.lease, timeout=watched.options.statement_timeout,
            instead_of=instead_of,
        )  # fmt: skip

    def _request(self, key: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> dg.RunRequest:
        shard = self.tick.shard.name
        config = {**config, **({} if shard is None else {"shard": shard})}
        return dg.RunRequest(
            run_key=key, run_config={"ops": {self.watched.op_name: {"config": config}}}, tags={**self._tags, **tags}
        )

    @property
    def _tags(self) -> Mapping[str, str]:
        watched = self.watched
        return partition_tags(watched.topic.name, watched.consumer.name, self.partition, self.tick.shard.name)


def _failures(tags: Mapping[str, str], instance: dg.DagsterInstance) -> tuple[int, float]:
    """The number of runs with these tags that failed in a row, and the end of the latest run (seconds since 1970).

    A run counts only if a tick requested it and it adopted its claim. For example, a retry that finds its claim lost
    succeeds without doing anything.
    """
    found = instance.get_run_records(dg.RunsFilter(tags=dict(tags), statuses=list(FINISHED)), limit=50)
    runs = [run for run in found if run.dagster_run.parent_run_id is None and LATE_TAG not in run.dagster_run.tags]
    failures = 0
    for run in runs:
        if run.dagster_run.status != dg.DagsterRunStatus.FAILURE:
            break
        failures += 1
    return failures, (runs[0].end_time or 0.0) if runs else 0.0


def _report_dead(run_id: str, tick: Tick) -> None:
    """Tell Dagster that a run's process is gone. If the process lives, the claim's epoch keeps it from committing."""
    record = tick.instance.get_run_record_by_id(run_id)
    # A retry of the claim's owner may wait for its place in a pool. It will find the claim lost, and end.
    if record is None or record.dagster_run.is_finished or tick.state(record, patience=0.0).waits:
        return
    run = record.dagster_run
    why = "did not renew its lease, and its partition was claimed again"
    tick.open_log().warning("run %s %s: reporting the run as failed", run_id, why)
    tick.instance.report_run_failed(run, message=f"The run {why}: its process is presumed dead.")
