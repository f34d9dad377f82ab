"""What a tick decides about a consumer partition: wait for its claim's run, give the claim back, or claim what waits.

`PartitionWatch` looks at one partition; `ConsumerWatch` at all partitions of a consumer, with few statements, and then
lets each `PartitionWatch` that has something to do decide as it would have alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.draining import run_of_owner
from eventsql_orchestration.dagster.tags import (
    AFTER_TAG,
    CLAIM_TAG,
    CONSUMER_TAG,
    FINISHED,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    TOPIC_TAG,
    partition_tags,
)
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseBusyError,
    EventSQLError,
    RedefinitionError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.claims import Claim, Standing

TICK_TIMEOUT: Final = 10.0
"""Seconds that a statement of a tick may take. Dagster gives a tick 60, and one that it gave up keeps running."""

TICK_BUDGET: Final = 20.0
"""Seconds after which a tick over many partitions begins with no further one. With the statement under way and what
Dagster's own storage takes, that stays well below the 60 of a tick."""

MAX_REQUESTS: Final = 25
"""Runs that one tick requests at most: Dagster creates them one after the other, some 4 to 10 a second, and no further
tick of this sensor begins meanwhile."""

START_TIMEOUT: Final = 300.0
"""Seconds after which a run that was created or is starting, and never started, is given up; Dagster's own monitoring
does so after 180 where it is on. A queued run waits as long as its queue lets it."""

ADOPT_TIMEOUT: Final = 60.0
"""The same for a run that has started and does not take its claim over, which it does first of all: its process died.
Dagster's default launcher does not notice."""

FIRST_BACKOFF: Final = 10.0
MAX_BACKOFF: Final = 600.0
"""Seconds between runs that keep failing at the same offset for reasons that are no event's: they pile up otherwise,
one every 5 seconds."""

SHOWN_REASONS: Final = 5


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
            check_definition(platform, self.topic, self.consumer)
            live = platform.claims.live(self.topic.name, self.consumer.name, self.partition)
            run = None if live is None else runs_of([live], self.consumer, instance).get(live.id)
            return self.attend(live, run, platform, instance, log)
        except (TopicNotFoundError, ConsumerNotFoundError, SchemaOutdatedError, DatabaseBusyError) as error:
            return dg.SkipReason(error.message)

    def attend(
        self,
        live: Claim | None,
        run: dg.RunRecord | None,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
    ) -> dg.RunRequest | dg.SkipReason:
        """Decide about the partition whose live claim and run these are. Raises `ConsumerNotFoundError`,
        `DatabaseBusyError`, `DatabaseUnavailableError`.
        """
        if (
            live is not None
            and run is not None
            and (reason := self._wait_for(live, run, platform, instance, log)) is not None
        ):
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
            return dg.SkipReason(claim.reason)
        if run is not None and run.dagster_run.status not in FINISHED:
            # Dagster's default launcher does not notice, and the run would count as one of its queue's for ever.
            _report_dead(run, "did not renew its lease, and its partition was claimed anew", instance, log)
        return self.request(claim)

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
        patience = ADOPT_TIMEOUT if status == dg.DagsterRunStatus.STARTED else START_TIMEOUT
        if status != dg.DagsterRunStatus.QUEUED and _age(run) > patience:
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


@dataclass(frozen=True)
class ConsumerWatch:
    """Decides what a tick does about all partitions of a consumer.

    One statement looks at all of them and two questions to Dagster's storage find the runs of their live claims,
    whatever their number. Only a partition that has something to do costs more.
    """

    topic: Topic
    consumer: Consumer
    partitions: tuple[PartitionWatch, ...]

    def evaluate(
        self, platform: EventSQL, instance: dg.DagsterInstance, log: logging.Logger, cursor: str | None
    ) -> dg.SensorResult:
        """One tick. `cursor` is the partition that it begins with, where the tick before did not get to all of them.

        Raises as `PartitionWatch.evaluate`; what was claimed before the database went away is requested all the same.
        """
        deadline = time.monotonic() + TICK_BUDGET
        try:
            check_definition(platform, self.topic, self.consumer)
            standings = {standing.partition: standing for standing in platform.claims.standings(self.consumer)}
        except (TopicNotFoundError, SchemaOutdatedError, DatabaseBusyError) as error:
            return dg.SensorResult(skip_reason=error.message, cursor=cursor)
        if not standings:
            reason = f"consumer {self.consumer.name!r} of topic {self.topic.name!r} does not exist: create it with "
            return dg.SensorResult(skip_reason=f"{reason}`eventsql consumer create`", cursor=cursor)
        live = [standing.claim for standing in standings.values() if standing.claim is not None]
        runs = runs_of(live, self.consumer, instance)
        requests: list[dg.RunRequest] = []
        reasons: dict[int, str] = {}
        for watch in self._from(cursor):
            if time.monotonic() >= deadline or len(requests) == MAX_REQUESTS:
                cursor = str(watch.partition)
                break
            standing = standings.get(watch.partition)
            if standing is None or not _to_do(standing, runs):
                continue
            run = None if standing.claim is None else runs.get(standing.claim.id)
            try:
                answer = watch.attend(standing.claim, run, platform, instance, log)
            except (ConsumerNotFoundError, DatabaseBusyError) as error:
                reasons[watch.partition] = error.message
            except EventSQLError as error:
                if not requests:
                    raise
                # A tick that fails now would leave the claims made so far to their leases.
                log.warning("the tick ends at %s: %s", watch.label, error)
                cursor = str(watch.partition)
                break
            else:
                if isinstance(answer, dg.RunRequest):
                    requests.append(answer)
                else:
                    reasons[watch.partition] = answer.skip_message or ""
        if requests:
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        return dg.SensorResult(skip_reason=_summary(standings.values(), reasons), cursor=cursor)

    def _from(self, cursor: str | None) -> Sequence[PartitionWatch]:
        """The partitions in the order in which this tick looks at them."""
        first = next((n for n, watch in enumerate(self.partitions) if str(watch.partition) == cursor), 0)
        return [*self.partitions[first:], *self.partitions[:first]]


def _to_do(standing: Standing, runs: Mapping[int, dg.RunRecord]) -> bool:
    """Whether a partition needs more than the look at it."""
    claim = standing.claim
    if claim is None:
        return standing.waiting and not standing.leased
    return not (standing.leased and lease_decides(claim, runs.get(claim.id)))


def _summary(standings: Collection[Standing], reasons: Mapping[int, str]) -> str:
    """Why no run is requested, for people."""
    leased = sum(standing.leased and standing.partition not in reasons for standing in standings)
    idle = len(standings) - len(reasons) - leased
    counts = [f"{idle} of {len(standings)} partitions have no events", f"{leased} are leased"]
    shown = [f"{partition}: {reason}" for partition, reason in list(reasons.items())[:SHOWN_REASONS]]
    more = [f"{len(reasons) - SHOWN_REASONS} more wait"] if len(reasons) > SHOWN_REASONS else []
    return "; ".join([*counts[: 1 + bool(leased)], *shown, *more])


def check_definition(platform: EventSQL, topic: Topic, consumer: Consumer) -> None:
    """Raises `RedefinitionError` where a partitioned consumer's topic is not as defined, `TopicNotFoundError`."""
    registered = platform.registry.topic(topic.name)
    if registered.partitions != topic.partitions and consumer.partitioned:
        raise RedefinitionError(
            f"topic {topic.name!r} has {registered.partitions} partitions and consumer {consumer.name!r} "
            f"is defined for {topic.partitions}: events would stay unseen; mend its Topic(…)"
        )


def lease_decides(claim: Claim, run: dg.RunRecord | None) -> bool:
    """Whether nothing but the lease tells if a live claim's owner still lives."""
    if run is None:
        # Its tick may not be stored yet, or never will be; or somebody deleted the run.
        return True
    # A run that has taken its claim over renews the lease itself, as long as it lives.
    return run.dagster_run.status not in FINISHED and run_of_owner(claim.owner) is not None


def runs_of(claims: Sequence[Claim], consumer: Consumer, instance: dg.DagsterInstance) -> Mapping[int, dg.RunRecord]:
    """For each claim of a consumer, the run that has it or is to have it; of several, one that has not ended."""
    if not claims:
        return {}
    owners = {claim.id: owner for claim in claims if (owner := run_of_owner(claim.owner)) is not None}
    # Ids of claims are unique within a database, and an instance may serve several.
    tags = {
        TOPIC_TAG: consumer.topic,
        CONSUMER_TAG: consumer.name,
        CLAIM_TAG: [str(claim.id) for claim in claims],
    }
    requested = instance.get_run_records(dg.RunsFilter(tags=tags))
    # A run that drains has claims that it was not requested for.
    owning = instance.get_run_records(dg.RunsFilter(run_ids=list(owners.values()))) if owners else []
    found: dict[int, dg.RunRecord] = {}
    for claim in claims:
        runs = [
            *(run for run in owning if run.dagster_run.run_id == owners.get(claim.id)),
            *(run for run in requested if run.dagster_run.tags[CLAIM_TAG] == str(claim.id)),
        ]
        waiting = [run for run in runs if run.dagster_run.status not in FINISHED]
        if runs:
            found[claim.id] = (waiting or runs)[0]
    return found


def _report_dead(run: dg.RunRecord, why: str, instance: dg.DagsterInstance, log: logging.Logger) -> None:
    """Tell Dagster that a run's process is gone. Where it is not, the claim's epoch keeps it from committing."""
    log.warning("run %s %s: it is reported as failed", run.dagster_run.run_id, why)
    instance.report_run_failed(run.dagster_run, message=f"The run {why}: its process is taken for dead.")


def _age(run: dg.RunRecord) -> float:
    """Seconds since a run's status changed last."""
    updated = run.update_timestamp
    if updated.tzinfo is None:
        updated = updated.replace(tzinfo=UTC)
    return (datetime.now(UTC) - updated).total_seconds()
