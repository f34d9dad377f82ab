"""The sensor of a consumer partition: a tick claims the next range and requests one run for it.

A tick can only claim: its row lock is gone before the run exists. What may happen between the two, and what follows:

| the tick or the run ends | what is left | what the next tick does |
|---|---|---|
| before the claim | nothing | claims |
| after the claim, before the tick is stored | a claim without a run | waits for its lease to end, claims again |
| after the tick is stored, before the launch | a run that Dagster still launches | waits, prolonging the lease |
| while the run waits or starts | a queued run | waits, prolonging the lease |
| in mid-batch, seen by Dagster | a failed run | releases the claim, claims from the offset reached |
| in mid-batch, not seen by Dagster | a run that seems alive | waits for the lease to end, then the same |
| after the effects, before the offset | cannot be: they are one transaction | |
| after the offset | a committed claim | claims what comes next |

A run that starts after its claim was given to another finds it lost, and ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.draining import run_of_owner
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import (
    AFTER_TAG,
    CLAIM_TAG,
    FINISHED,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    partition_tags,
)
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    RedefinitionError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.claims import Claim

TICK_TIMEOUT: Final = 10.0
"""Seconds that a statement of a tick may take. Dagster gives a tick 60, and one that it gave up keeps running."""

MIN_INTERVAL: Final = 1
"""Dagster looks at sensors every 5 s; asking for just as much would skip every second look."""

START_TIMEOUT: Final = 300.0
"""Seconds after which a run that was created or is starting, and never started, is given up; Dagster's own monitoring
does so after 180 where it is on. A queued run waits as long as its queue lets it."""

FIRST_BACKOFF: Final = 10.0
MAX_BACKOFF: Final = 600.0
"""Seconds between runs that keep failing at the same offset for reasons that are no event's: they pile up otherwise,
one every 5 seconds."""


def build_partition_sensor(
    *,
    topic: Topic,
    consumer: Consumer,
    partition: int,
    job: dg.UnresolvedAssetJobDefinition | dg.JobDefinition,
    op_name: str,
    limits: Limits,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """The sensor of one consumer partition, called like its job, with the partition's number where it has one."""
    name = job.name if partition == NOT_PARTITIONED else f"{job.name}_{partition}"
    watch = PartitionWatch(topic, consumer, partition, op_name, limits, sensor=name)

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=MIN_INTERVAL,
        default_status=default_status,
        description=f"Claims events of {watch.label} for consumer {consumer.name}, and requests a run for them.",
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER},
    )
    def tick(context: dg.SensorEvaluationContext, eventsql: EventSQLResource) -> dg.RunRequest | dg.SkipReason:
        with eventsql.bounded(TICK_TIMEOUT) as platform:
            return watch.evaluate(platform, context.instance, context.log)

    return tick


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

    def evaluate(
        self, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger
    ) -> dg.RunRequest | dg.SkipReason:
        """One tick. Raises `RedefinitionError` where the topic is not as defined, `DatabaseUnavailableError`."""
        try:
            self._check_definition(platform)
            live = platform.claims.live(self.topic.name, self.consumer.name, self.partition)
            if live is not None and (reason := self._wait_for(live, platform, instance, log)) is not None:
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
        except (TopicNotFoundError, ConsumerNotFoundError, SchemaOutdatedError, DatabaseBusyError) as error:
            return dg.SkipReason(error.message)
        return self.request(claim) if isinstance(claim, Claim) else dg.SkipReason(claim.reason)

    def request(self, claim: Claim) -> dg.RunRequest:
        """The run of a claim. Its key is the claim's: a reused key would swallow the run for ever."""
        return dg.RunRequest(
            run_key=f"eventsql-claim-{claim.id}",
            run_config={"ops": {self.op_name: {"config": {"claim": claim.id}}}},
            tags={
                **self._tags(),
                CLAIM_TAG: str(claim.id),
                AFTER_TAG: str(claim.range.after),
                HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER,
            },
        )

    def _tags(self) -> Mapping[str, str]:
        return partition_tags(self.topic.name, self.consumer.name, self.partition)

    def _check_definition(self, platform: EventSQL) -> None:
        registered = platform.registry.topic(self.topic.name)
        if registered.partitions != self.topic.partitions and self.consumer.partitioned:
            raise RedefinitionError(
                f"topic {self.topic.name!r} has {registered.partitions} partitions and consumer {self.consumer.name!r} "
                f"is defined for {self.topic.partitions}: events would stay unseen; mend its Topic(…)"
            )

    def _wait_for(
        self, claim: Claim, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger
    ) -> str | None:
        """Why a live claim is left alone; None where there is none any more, or its lease decides."""
        run = _run_of(claim, instance)
        if run is None:
            # Its tick may not be stored yet, or never will be. The lease tells them apart.
            return None
        status = run.dagster_run.status
        if status in FINISHED:
            return self._give_back(claim, run, platform, instance, log)
        if run_of_owner(claim.owner) is not None:
            # It renews its lease itself, as long as it lives.
            return None
        if status != dg.DagsterRunStatus.QUEUED and _age(run) > START_TIMEOUT:
            log.warning("run %s of %s never started; the claim is given up", run.dagster_run.run_id, claim)
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
        failures, last_end = self._failures_from(claim.range.after, instance)
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

    def _failures_from(self, after: int, instance: dg.DagsterInstance) -> tuple[int, float | None]:
        """How many runs failed from an offset since one did not, and when the last of them ended."""
        runs = instance.get_run_records(
            dg.RunsFilter(tags={**self._tags(), AFTER_TAG: str(after)}, statuses=list(FINISHED)), limit=20
        )
        failures = 0
        for run in runs:
            if run.dagster_run.status != dg.DagsterRunStatus.FAILURE:
                break
            failures += 1
        return failures, runs[0].end_time if runs else None


def _run_of(claim: Claim, instance: dg.DagsterInstance) -> dg.RunRecord | None:
    """The run that has a claim or is to have it; where there are several, one that has not ended."""
    filters: list[dg.RunsFilter] = [dg.RunsFilter(tags={CLAIM_TAG: str(claim.id), **_identity(claim)})]
    if (run_id := run_of_owner(claim.owner)) is not None:
        # A run that drains has claims that it was not requested for.
        filters.insert(0, dg.RunsFilter(run_ids=[run_id]))
    runs: list[dg.RunRecord] = [run for each in filters for run in instance.get_run_records(each, limit=5)]
    waiting = [run for run in runs if run.dagster_run.status not in FINISHED]
    return next(iter([*waiting, *runs]), None)


def _identity(claim: Claim) -> Mapping[str, Any]:
    # Ids of claims are unique within a database, and an instance may serve several.
    return partition_tags(claim.range.topic, claim.consumer, claim.range.partition)


def _age(run: dg.RunRecord) -> float:
    """Seconds since a run's status changed last."""
    updated = run.update_timestamp
    if updated.tzinfo is None:
        updated = updated.replace(tzinfo=UTC)
    return (datetime.now(UTC) - updated).total_seconds()
