"""What a tick decides about all partitions of a consumer, and about consumers that share their runs.

Few statements look at all of them; then each partition that has something to do is decided about as its own tick would
have. Which partitions there are, the database says: those of a topic may change while its consumers run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.claim_runs import lease_decides, runs_of
from eventsql_orchestration.dagster.definition import Limits
from eventsql_orchestration.dagster.handover import drained_by, may_hand_over
from eventsql_orchestration.dagster.registering import consumer_missing, other_form, why_unregistered
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.dagster.ticks import Budget, NothingYet, beginning_with
from eventsql_orchestration.dagster.watch import PartitionWatch, Situation
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseBusyError,
    EventSQLError,
    SchemaOutdatedError,
    TopicNotFoundError,
)
from eventsql_orchestration.log.claims import Standing

SHOWN_REASONS: Final = 5


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look at a consumer found: its partitions, by their numbers, and the runs of their live claims."""

    standings: Mapping[int, Standing]
    runs: Mapping[int, dg.RunRecord]

    def run_of(self, standing: Standing) -> dg.RunRecord | None:
        """The run that has a partition's live claim, or is to have it."""
        return None if standing.claim is None else self.runs.get(standing.claim.id)

    def to_do(self, standing: Standing, limits: Limits | None = None) -> bool:
        """Whether a partition needs more than the look at it; with `limits`, a successor may be what it needs."""
        run = self.run_of(standing)
        if standing.claim is None:
            # Nothing may wait just now, and yet the run that drains it come to the end of its window.
            drained = limits is not None and drained_by(standing.last, limits) is not None
            return not standing.leased and (standing.waiting or drained)
        if limits is not None and run is not None and may_hand_over(standing.claim, run, limits):
            return True
        return not (standing.leased and lease_decides(standing.claim, run))

    def under_way(self) -> dg.RunRecord | None:
        """A run that has one of the partitions, or is to have one, and for all that is known lives."""
        for standing in self.standings.values():
            run = self.run_of(standing)
            if run is not None and standing.leased and run.dagster_run.status not in FINISHED:
                return run
        return None


@dataclass(frozen=True)
class ConsumerWatch:
    """Decides what a tick does about all partitions of a consumer.

    One statement looks at all of them and two questions to Dagster's storage find the runs of their live claims,
    whatever their number. Only a partition that has something to do costs more.
    """

    topic: Topic
    consumer: Consumer
    op_name: str
    limits: Limits
    sensor: str

    @property
    def label(self) -> str:
        """The consumer, for people and for a cursor."""
        return f"{self.topic.name}/{self.consumer.name}"

    @property
    def topics(self) -> tuple[str]:
        """The one whose events it waits for."""
        return (self.topic.name,)

    def of(self, partition: int) -> PartitionWatch:
        """What decides about one partition."""
        return PartitionWatch(self.topic, self.consumer, partition, self.op_name, self.limits, self.sensor)

    def look(self, platform: EventSQL, instance: dg.DagsterInstance) -> Sight | str:
        """All partitions as they are; a sentence where they cannot be looked at. Raises `DatabaseUnavailableError`."""
        try:
            platform.registry.topic(self.topic.name)
            standings = {standing.partition: standing for standing in platform.claims.standings(self.consumer)}
            live = [standing.claim for standing in standings.values() if standing.claim is not None]
            runs = runs_of(live, self.consumer, platform, instance)
        except TopicNotFoundError as error:
            return why_unregistered(platform, self.topic, self.consumer) or error.message
        except (SchemaOutdatedError, DatabaseBusyError) as error:
            return error.message
        if not standings:
            return why_unregistered(platform, self.topic, self.consumer) or consumer_missing(self.consumer)
        if (NOT_PARTITIONED not in standings) != self.consumer.partitioned:
            return other_form(self.consumer)
        return Sight(standings, runs)

    def evaluate(
        self,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
        cursor: str | None,
        budget: Budget,
    ) -> dg.SensorResult:
        """One tick. `cursor` is the partition that it begins with, where the tick before did not get to all of them.

        Raises as `PartitionWatch.evaluate`; what was claimed before the database went away is requested all the same.
        """
        sight = self.look(platform, instance)
        if isinstance(sight, str):
            return dg.SensorResult(skip_reason=sight, cursor=cursor)
        requests: list[dg.RunRequest] = []
        reasons: dict[int, str] = {}
        for partition in beginning_with(cursor, list(sight.standings)):
            if budget.spent():
                cursor = str(partition)
                break
            standing = sight.standings[partition]
            if not sight.to_do(standing, self.limits):
                continue
            try:
                found = Situation(standing.claim, sight.run_of(standing), standing.last)
                answer = self.of(partition).attend(found, platform, instance, log)
            except (ConsumerNotFoundError, DatabaseBusyError) as error:
                reasons[partition] = error.message
            except EventSQLError as error:
                if not requests:
                    raise
                # A tick that fails now would leave the claims made so far to their leases.
                log.warning("the tick ends at %s: %s", self.of(partition).label, error)
                cursor = str(partition)
                break
            else:
                if isinstance(answer, dg.RunRequest):
                    requests.append(answer)
                    budget.requests -= 1
                else:
                    reasons[partition] = answer.skip_message or ""
        if requests:
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        summary = _summary(sight.standings.values(), reasons)
        idle = any(not standing.leased and number not in reasons for number, standing in sight.standings.items())
        return dg.SensorResult(skip_reason=NothingYet(summary) if idle else summary, cursor=cursor)


@dataclass(frozen=True)
class SharedWatch:
    """Decides what a tick does about consumers that share their runs.

    It claims for one of them, and requests a run of all, which consumes that claim and whatever waits for the others.
    While such a run is under way it claims nothing.
    """

    members: tuple[ConsumerWatch, ...]

    @property
    def topics(self) -> frozenset[str]:
        """Those whose events they wait for."""
        return frozenset(member.topic.name for member in self.members)

    def evaluate(
        self,
        platform: EventSQL,
        instance: dg.DagsterInstance,
        log: logging.Logger,
        cursor: str | None,
        budget: Budget,
    ) -> dg.SensorResult:
        """One tick. `cursor` is the consumer that it begins with, the one after that which had the last claim.

        Raises `DatabaseUnavailableError`.
        """
        reasons: dict[str, str] = {}
        sights: dict[str, Sight] = {}
        for member in self.members:
            seen = member.look(platform, instance)
            if isinstance(seen, str):
                reasons[member.label] = seen
            else:
                sights[member.label] = seen
        labels = [member.label for member in self.members]
        order = [label for label in beginning_with(cursor, labels) if label in sights]
        under_way = next((run for label in order if (run := sights[label].under_way()) is not None), None)
        for label, watch, standing in self._to_do(order, sights, claims_alone=under_way is not None):
            try:
                found = Situation(standing.claim, sights[label].run_of(standing))
                answer = watch.attend(found, platform, instance, log)
            except (ConsumerNotFoundError, DatabaseBusyError) as error:
                reasons[watch.label] = error.message
                continue
            if isinstance(answer, dg.RunRequest):
                budget.requests -= 1
                return dg.SensorResult(run_requests=[answer], cursor=self._after(label))
            reasons[watch.label] = answer.skip_message or ""
        reason: str | dg.SkipReason
        if under_way is not None:
            reason = f"run {under_way.dagster_run.run_id} is under way, and takes what waits"
        elif reasons:
            reason = "; ".join(f"{label}: {why}" for label, why in list(reasons.items())[:SHOWN_REASONS])
        else:
            reason = NothingYet(f"no events wait for {', '.join(order)}")
        return dg.SensorResult(skip_reason=reason, cursor=cursor)

    def _to_do(
        self, order: Sequence[str], sights: Mapping[str, Sight], *, claims_alone: bool
    ) -> Iterator[tuple[str, PartitionWatch, Standing]]:
        """What needs more than the look at it: first what has a live claim, then, where wanted, what only waits."""
        members = {member.label: member for member in self.members}
        for claimed in (True,) if claims_alone else (True, False):
            for label in order:
                for partition, standing in sights[label].standings.items():
                    if (standing.claim is not None) is claimed and sights[label].to_do(standing):
                        yield label, members[label].of(partition), standing

    def _after(self, label: str) -> str:
        labels = [member.label for member in self.members]
        return labels[(labels.index(label) + 1) % len(labels)]


def _summary(standings: Collection[Standing], reasons: Mapping[int, str]) -> str:
    """Why no run is requested, for people."""
    leased = sum(standing.leased and standing.partition not in reasons for standing in standings)
    idle = len(standings) - len(reasons) - leased
    counts = [f"{idle} of {len(standings)} partitions have no events"]
    if leased:
        counts.append(f"{leased} are leased")
    shown = [f"{partition}: {reason}" for partition, reason in list(reasons.items())[:SHOWN_REASONS]]
    more = [f"{len(reasons) - SHOWN_REASONS} more wait"] if len(reasons) > SHOWN_REASONS else []
    return "; ".join([*counts, *shown, *more])
