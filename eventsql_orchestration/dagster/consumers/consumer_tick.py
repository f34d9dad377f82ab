"""A tick of a consumer, or of one of its partitions.

A few statements look at all partitions. Then the tick decides about each partition that needs attention. The partitions
come from the database, because a topic's partitions may change while its consumers run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Topic
from eventsql_orchestration.consuming.claims import Claim, NoClaim, PartitionClaims
from eventsql_orchestration.dagster.consumers.claim_runs import claim_tags, made_at, run_key, runs_of
from eventsql_orchestration.dagster.consumers.decision import (
    PartitionState,
    RequestSuccessor,
    TryClaim,
    Wait,
    decide,
    draining_run,
    lease_decides,
    needs_attention,
    needs_late_runs,
)
from eventsql_orchestration.dagster.consumers.handover import successor_of
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, RunLimits, TickOptions
from eventsql_orchestration.dagster.consumers.tick import Answer, Leased, NothingYet, Tick, in_random_order
from eventsql_orchestration.dagster.register import consumer_missing, why_unregistered
from eventsql_orchestration.dagster.tags import AFTER_TAG, FINISHED, LATE_TAG, SUCCEEDS_TAG, partition_tags
from eventsql_orchestration.database.notifications import LOG
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    EventSQLError,
    RedefinitionError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.orchestration.shards import partition_label
from eventsql_orchestration.topics.layouts import named

SHOWN_REASONS: Final = 5


@dataclass(frozen=True, slots=True)
class Sight:
    """The result of one look: a consumer's partitions by their numbers, and the runs of their live claims."""

    standings: Mapping[int, PartitionClaims]
    runs: Mapping[int, dg.RunRecord]

    def run_of(self, standing: PartitionClaims) -> dg.RunRecord | None:
        """The run that owns or will own a partition's live claim."""
        return None if standing.claim is None else self.runs.get(standing.claim.id)

    def under_way(self) -> dg.RunRecord | None:
        """An unfinished run that owns or will own a leased claim of one of the partitions."""
        for standing in self.standings.values():
            run = self.run_of(standing)
            if run is not None and standing.leased and not run.dagster_run.is_finished:
                return run
        return None


@dataclass(frozen=True)
class ConsumerWatch:
    """Decides what a tick does about all partitions of a consumer, or about the only `partition` of its sensor.

    `op_name` is the step of the consumer's asset in the runs that the tick requests.

    One statement looks at all partitions, and two queries of Dagster's storage find the runs of all live claims. Only a
    partition that needs attention costs more.
    """

    topic: Topic
    consumer: Consumer
    op_name: str
    limits: RunLimits
    sensor: str
    options: TickOptions = DEFAULT_TICKS
    partition: int | None = None

    @property
    def notified_by(self) -> Collection[tuple[str, str]]:
        return ((LOG, self.topic.name),)

    @property
    def label(self) -> str:
        return f"{self.topic.name}/{self.consumer.name}"

    @property
    def description(self) -> str:
        if self.partition is not None:
            place = partition_label(self.topic.name, self.partition)
            return f"Claims events of {place} for consumer {self.consumer.name}, and requests a run for them."
        return (
            f"Claims events of {self.topic.name} for consumer {self.consumer.name}, partition by partition, and "
            "requests a run for each partition that has events."
        )

    def look(self, tick: Tick) -> Sight | str:
        """The state of all partitions, or the reason why there is none. Raises `DatabaseUnavailableError`."""
        shard = tick.shard
        try:
            standings = {standing.partition: standing for standing in shard.claims.standings(self.consumer)}
            live = [
                each.claim
                for each in standings.values()
                if each.claim is not None and self.partition in (None, each.partition)
            ]
            runs = runs_of(live, self.consumer, shard, tick.instance)
        except TopicNotFoundError:
            standings, runs = {}, {}
        except (SchemaOutdatedError, DatabaseBusyError) as error:
            return error.message
        if not standings or (NOT_PARTITIONED in standings) == self.consumer.partitioned:
            return why_unregistered(shard, self.topic, self.consumer) or consumer_missing(self.consumer)
        return Sight(standings, runs)

    def needs_attention(self, sight: Sight, standing: PartitionClaims, tick: Tick) -> bool:
        record = sight.run_of(standing)
        run = None if record is None else tick.state(record)
        return needs_attention(standing, run, self.limits, self.options)

    def attend(self, sight: Sight, standing: PartitionClaims, tick: Tick) -> dg.RunRequest | dg.SkipReason:
        """Decide about a partition, and carry the decision out. Raises `DatabaseUnavailableError`."""
        try:
            answer = PartitionTick(self, standing.partition, tick).attend(standing, sight.run_of(standing))
        except (ConsumerNotFoundError, DatabaseBusyError, SchemaOutdatedError, TopicNotFoundError) as error:
            return dg.SkipReason(error.message)
        if isinstance(answer, dg.RunRequest):
            tick.budget.requests -= 1
        return answer

    def evaluate(self, tick: Tick) -> Answer:
        """One tick.

        Raises `DatabaseUnavailableError`. If the database goes away after this tick has made claims, the tick requests
        the runs of these claims. Raises `RedefinitionError` if there is nothing to do for the only partition, and the
        consumer has more partitions than are watched.
        """
        sight = self.look(tick)
        if isinstance(sight, str):
            return dg.SkipReason(sight)
        if self.partition is not None:
            return self._evaluate_one(self.partition, sight, tick)

        requests: dict[int, dg.RunRequest] = {}
        reasons: dict[int, dg.SkipReason] = {}
        for standing in in_random_order(sight.standings.values()):
            if tick.budget.spent():
                break
            if not self.needs_attention(sight, standing, tick):
                continue
            try:
                answer = self.attend(sight, standing, tick)
            except EventSQLError as error:
                if not requests:
                    raise
                # If the tick failed now, the claims made so far would have no runs until their leases end.
                log = tick.open_log()
                log.warning("the tick ends at partition %d of %s: %s", standing.partition, self.label, error)
                break
            if isinstance(answer, dg.RunRequest):
                requests[standing.partition] = answer
            else:
                reasons[standing.partition] = answer
        return [requests[partition] for partition in sorted(requests)] or _skipped(sight.standings, reasons)

    def _evaluate_one(self, partition: int, sight: Sight, tick: Tick) -> Answer:
        """Attend to the only partition, unless it has neither events nor an owner. The answer says why."""
        standing, topic, name = sight.standings.get(partition), self.topic, self.consumer.name
        if standing is None:
            return dg.SkipReason(
                f"consumer {name!r} of topic {topic.name!r} has no partition {partition}, but "
                f"{named(sorted(sight.standings))}, and is defined for {topic.partitions}"
            )
        answer: dg.RunRequest | dg.SkipReason = NothingYet(f"no events wait after offset {standing.offset}")
        if standing.leased or standing.paused or self.needs_attention(sight, standing, tick):
            answer = self.attend(sight, standing, tick)
        if isinstance(answer, dg.RunRequest):
            return [answer]
        if self.consumer.partitioned and len(sight.standings) > topic.partitions:
            raise RedefinitionError(
                f"consumer {name!r} of topic {topic.name!r} has {len(sight.standings)} partitions and is defined for "
                f"{topic.partitions}: no sensor sees the other partitions. If the topic has as many, correct the "
                'consumer\'s Topic(…). If the topic has fewer now, give the asset sensor="consumer" until the consumer '
                "has passed the change"
            )
        return answer


def _skipped(standings: Mapping[int, PartitionClaims], reasons: Mapping[int, dg.SkipReason]) -> dg.SkipReason:
    leased = sum(standing.leased and partition not in reasons for partition, standing in standings.items())
    idle = len(standings) - len(reasons) - leased
    counts = [f"{idle} of {len(standings)} partitions have no events"]
    if leased:
        counts.append(f"{leased} are leased")
    shown = [f"{partition}: {reasons[partition].skip_message}" for partition in sorted(reasons)[:SHOWN_REASONS]]
    more = [f"{len(reasons) - SHOWN_REASONS} more wait"] if len(reasons) > SHOWN_REASONS else []
    return (NothingYet if idle else dg.SkipReason)("; ".join([*counts, *shown, *more]))


@dataclass(frozen=True)
class PartitionTick:
    """A tick of one partition of a consumer, on the shard of `tick`."""

    watch: ConsumerWatch
    partition: int
    tick: Tick

    def attend(self, standing: PartitionClaims, run: dg.RunRecord | None) -> dg.RunRequest | dg.SkipReason:
        """Decide about the partition, and carry the decision out.

        `run` is the run that owns or will own the live claim. Raises `ConsumerNotFoundError`, `DatabaseBusyError`,
        `DatabaseUnavailableError`.
        """
        state = self._state(standing, run)
        decision = decide(state, self.watch.limits, self.watch.options)
        if isinstance(decision, TryClaim):
            return self._try_claim(decision, state)
        return self._do(decision, state)

    def _state(self, standing: PartitionClaims, record: dg.RunRecord | None) -> PartitionState:
        tick, live, options = self.tick, standing.claim, self.watch.options
        run = None if record is None else tick.state(record)
        if record is not None and live is not None and not lease_decides(live, run):
            run = tick.state(record, patience=options.adopt_timeout)
        drains = draining_run(standing, run, self.watch.limits, options)
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
                self.tick.shard.claims.renew(state.claim, lease=self.watch.limits.lease)
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
        watch, limits = self.watch, self.watch.limits
        return self.tick.shard.claims.claim(
            watch.topic.name, watch.consumer.name, self.partition,
            owner=f"sensor {watch.sensor}", min_events=limits.min_events, max_events=limits.max_events,
            max_wait=limits.max_wait, lease=limits.lease, timeout=watch.options.statement_timeout,
            instead_of=instead_of,
        )  # fmt: skip

    def _request(self, key: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> dg.RunRequest:
        shard = self.tick.shard.name
        config = {**config, **({} if shard is None else {"shard": shard})}
        return dg.RunRequest(
            run_key=key, run_config={"ops": {self.watch.op_name: {"config": config}}}, tags={**self._tags, **tags}
        )

    @property
    def _tags(self) -> Mapping[str, str]:
        watch = self.watch
        return partition_tags(watch.topic.name, watch.consumer.name, self.partition, self.tick.shard.name)


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
