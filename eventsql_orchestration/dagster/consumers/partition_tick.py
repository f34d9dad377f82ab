"""What a tick decides about a consumer partition: to wait for its claim's run, to give the claim back, or to claim."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.claim_runs import lease_decides, runs_of, since_change
from eventsql_orchestration.dagster.claim_times import claim_tags, made_at, run_key
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.draining import run_of_owner
from eventsql_orchestration.dagster.handover import START_TIMEOUT, decide, drained_by, may_hand_over
from eventsql_orchestration.dagster.registering import why_unregistered
from eventsql_orchestration.dagster.tags import (
    AFTER_TAG,
    FINISHED,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    LATE_TAG,
    SUCCEEDS_TAG,
    partition_tags,
)
from eventsql_orchestration.dagster.ticks import Budget, Leased, NothingYet
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    RedefinitionError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.claims import Claim, Last

TICK_TIMEOUT: Final = 10.0
"""Seconds that a statement of a tick may take. Dagster gives a tick 60, and one that it gave up keeps running."""

ADOPT_TIMEOUT: Final = 60.0
"""The same for a run that has started and does not take its claim over, which it does first of all: its process died.
Dagster's default launcher does not notice."""

MOST_DOUBLINGS: Final = 4
"""How often `ADOPT_TIMEOUT` is doubled at most, to 16 minutes."""

FIRST_BACKOFF: Final = 10.0
MAX_BACKOFF: Final = 600.0
"""Seconds between runs that keep failing at the same offset for reasons that are no event's: they pile up otherwise,
one every 5 seconds."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a tick finds of a partition: its live claim, the run that has or is to have it, and its furthest claim."""

    live: Claim | None
    run: dg.RunRecord | None
    last: Last | None = None


@dataclass(frozen=True)
class PartitionWatch:
    """Decides what a tick does about one consumer partition."""

    topic: Topic
    consumer: Consumer
    partition: int
    op_name: str
    limits: Limits
    sensor: str

    @property
    def label(self) -> str:
        """The partition, for people."""
        return self.topic.name if self.partition == NOT_PARTITIONED else f"{self.topic.name}[{self.partition}]"

    @property
    def topics(self) -> tuple[str]:
        """The one whose events it waits for."""
        return (self.topic.name,)

    def evaluate(
        self,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
        cursor: str | None = None,
        budget: Budget | None = None,  # noqa: ARG002 - one partition takes no more than a tick may
    ) -> dg.SensorResult:
        """One tick. Raises `RedefinitionError` where the topic has more partitions than are watched, once there is
        nothing to do for this one, and `DatabaseUnavailableError`.
        """
        answer = self._answer(platform, instance, log)
        if isinstance(answer, dg.SkipReason):
            return dg.SensorResult(skip_reason=answer, cursor=cursor)
        return dg.SensorResult(run_requests=[answer], cursor=cursor)

    def _answer(
        self, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger
    ) -> dg.RunRequest | dg.SkipReason:
        registered = self.topic
        try:
            registered = platform.registry.topic(self.topic.name)
            live = platform.claims.live(self.topic.name, self.consumer.name, self.partition)
            run = None if live is None else runs_of([live], self.consumer, platform, instance).get(live.id)
            last = platform.claims.last(self.topic.name, self.consumer.name, self.partition) if live is None else None
            answer = self.attend(Situation(live, run, last), platform, instance, log)
        except (ConsumerNotFoundError, TopicNotFoundError) as error:
            why = self._why_missing(registered) or why_unregistered(platform, self.topic, self.consumer)
            return dg.SkipReason(why or error.message)
        except (SchemaOutdatedError, DatabaseBusyError) as error:
            return dg.SkipReason(error.message)
        if isinstance(answer, dg.SkipReason) and self._unwatched(registered):
            raise RedefinitionError(
                f"topic {self.topic.name!r} has {registered.partitions} partitions and consumer "
                f"{self.consumer.name!r} is defined for {self.topic.partitions}: events would stay unseen; mend its "
                "Topic(…)"
            )
        return answer

    def _unwatched(self, registered: Topic) -> bool:
        return self.partition != NOT_PARTITIONED and registered.partitions > self.topic.partitions

    def _why_missing(self, registered: Topic) -> str | None:
        """Why the partition is not the consumer's; None where the consumer as a whole does not exist."""
        if not 0 <= registered.partitions <= self.partition:
            return None
        return (
            f"partition {self.partition} does not exist: topic {self.topic.name!r} has partitions 0 to "
            f"{registered.partitions - 1} now, and consumer {self.consumer.name!r} is defined for "
            f"{self.topic.partitions} of them"
        )

    def attend(
        self, found: Situation, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger
    ) -> dg.RunRequest | dg.SkipReason:
        """Decide about the partition as it was found. Raises `ConsumerNotFoundError`, `DatabaseBusyError`,
        `DatabaseUnavailableError`.
        """
        live, run = found.live, found.run
        if live is None:
            if (answer := self._hand_over(found, platform, instance)) is not None:
                return answer
        elif run is not None and (reason := self._wait_for(live, run, platform, instance, log)) is not None:
            return dg.SkipReason(reason)
        claim = platform.claims.claim(
            self.topic.name,
            self.consumer.name,
            self.partition,
            owner=f"sensor {self.sensor}",
            min_events=self.limits.min_events,
            max_events=self.limits.max_events,
            max_wait=self.limits.max_wait,
            lease=self.limits.lease,
            timeout=TICK_TIMEOUT,
        )
        if not isinstance(claim, Claim):
            if claim.leased_by is not None:
                return self._hand_over(found, platform, instance) or Leased(claim.reason)
            return (dg.SkipReason if claim.waiting is None else NothingYet)(claim.reason)
        return self._take(claim, found, platform, instance, log)

    def _take(
        self, claim: Claim, found: Situation, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger
    ) -> dg.RunRequest | dg.SkipReason:
        """The run of a claim that was made just now, unless the run that was found goes on."""
        live, run = found.live, found.run
        if live is not None and run is not None and run.dagster_run.status not in FINISHED:
            if platform.claims.get(live.id)[1] == "committed":
                # Just now, between the two looks: it goes on, with what was claimed here.
                platform.claims.release(claim)
                return dg.SkipReason(f"run {run.dagster_run.run_id} drains the partition")
            # Dagster's default launcher does not notice, and the run would count as one of its queue's for ever.
            _report_dead(run, instance, log)
        made = made_at(platform, [claim.id]).get(claim.id)
        if made is None:
            return dg.SkipReason(f"{claim} is gone: its consumer or topic was deleted just now")
        return self.request(replace(claim, shard=platform.shard), made)

    def _hand_over(
        self, found: Situation, platform: EventSQL, instance: dg.DagsterInstance
    ) -> dg.RunRequest | dg.SkipReason | None:
        """What is to be done about a run that drains the partition; None where there is none."""
        live, run = found.live, found.run
        if live is None:
            run_id = drained_by(found.last, self.limits)
            run = None if run_id is None else instance.get_run_record_by_id(run_id)
        else:
            run_id = run_of_owner(live.owner) if run is not None and may_hand_over(live, run, self.limits) else None
        if run_id is None:
            return None
        return decide(run_id, run, self.limits, instance, request=self.succession(run_id, platform.shard))

    def request(self, claim: Claim, made: int) -> dg.RunRequest:
        """The run of a claim, which was `made` then. Its key is the claim's: a reused one would swallow the run."""
        config = {"claim": claim.id} if claim.shard is None else {"claim": claim.id, "shard": claim.shard}
        return dg.RunRequest(
            run_key=run_key(claim.id, made, claim.shard),
            run_config={"ops": {self.op_name: {"config": config}}},
            tags={
                **self._tags(claim.shard),
                **claim_tags(claim.id, made, claim.shard),
                AFTER_TAG: str(claim.range.after),
                HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER,
            },
        )

    def succession(self, run_id: str, shard: str | None) -> dg.RunRequest:
        """The run that takes over from one that drains: one for each, whoever asks."""
        config = {"partition": self.partition, "succeeds": run_id, **({} if shard is None else {"shard": shard})}
        return dg.RunRequest(
            run_key=f"succeeds-{run_id}",
            run_config={"ops": {self.op_name: {"config": config}}},
            tags={**self._tags(shard), SUCCEEDS_TAG: run_id, HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER},
        )

    def _tags(self, shard: str | None) -> Mapping[str, str]:
        return partition_tags(self.topic.name, self.consumer.name, self.partition, shard)

    def _wait_for(
        self,
        claim: Claim,
        run: dg.RunRecord,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
    ) -> str | None:
        """Why a live claim is left alone; None where there is none any more, or its lease decides."""
        if lease_decides(claim, run):
            return None
        status = run.dagster_run.status
        if status in FINISHED:
            return self._give_back(claim, run, platform, instance, log)
        if status != dg.DagsterRunStatus.QUEUED and since_change(run) > self._patience(claim, run, platform, instance):
            platform.claims.release(claim)
            return None
        # Otherwise the run took it over just now.
        with contextlib.suppress(ClaimLostError):
            platform.claims.renew(claim, lease=self.limits.lease)
        return f"run {run.dagster_run.run_id} of claim {claim.id} is {status.value.lower().replace('_', ' ')}"

    def _give_back(
        self,
        claim: Claim,
        run: dg.RunRecord,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
    ) -> str | None:
        run_id, status = run.dagster_run.run_id, run.dagster_run.status
        failures, last_end = self._failures_from(claim.range.after, platform.shard, instance)
        if failures > 1 and last_end is not None:
            pause = min(FIRST_BACKOFF * 2 ** min(failures - 2, 20), MAX_BACKOFF)
            left = pause - (datetime.now(UTC).timestamp() - last_end)
            if left > 0:
                return (
                    f"{failures} runs failed from offset {claim.range.after}, run {run_id} last; "
                    f"the next is requested in {left:.0f} s"
                )
        if platform.claims.release(claim):
            log.info("%s is given back: run %s is %s", claim, run_id, status.value.lower())
        return None

    def _patience(self, claim: Claim, run: dg.RunRecord, platform: EventSQL, instance: dg.DagsterInstance) -> float:
        """Seconds in which the run of a claim is to take it over.

        Each run from the same offset that came too late, such as one whose resources take long to set up, doubles the
        time, or none would ever be in time.
        """
        if run.dagster_run.status != dg.DagsterRunStatus.STARTED:
            return START_TIMEOUT
        if since_change(run) <= ADOPT_TIMEOUT:
            return ADOPT_TIMEOUT
        tags = {**self._tags(platform.shard), AFTER_TAG: str(claim.range.after), LATE_TAG: "true"}
        late = instance.get_runs_count(dg.RunsFilter(tags=tags))
        return float(ADOPT_TIMEOUT * 2 ** min(late, MOST_DOUBLINGS))

    def _failures_from(self, after: int, shard: str | None, instance: dg.DagsterInstance) -> tuple[int, float | None]:
        """How many runs failed from an offset since one did not, and when the last of them ended.

        Only runs that a tick requested count, and that took their claims over: a retry that finds its claim lost
        succeeds, and has done nothing.
        """
        found = instance.get_run_records(
            dg.RunsFilter(tags={**self._tags(shard), AFTER_TAG: str(after)}, statuses=list(FINISHED)), limit=50
        )
        requested = [run for run in found if run.dagster_run.parent_run_id is None]
        runs = [run for run in requested if LATE_TAG not in run.dagster_run.tags]
        failures = 0
        for run in runs:
            if run.dagster_run.status != dg.DagsterRunStatus.FAILURE:
                break
            failures += 1
        return failures, runs[0].end_time if runs else None


def _report_dead(run: dg.RunRecord, instance: dg.DagsterInstance, log: logging.Logger) -> None:
    """Tell Dagster that a run's process is gone. Where it is not, the claim's epoch keeps it from committing."""
    why = "did not renew its lease, and its partition was claimed anew"
    log.warning("run %s %s: it is reported as failed", run.dagster_run.run_id, why)
    instance.report_run_failed(run.dagster_run, message=f"The run {why}: its process is taken for dead.")
