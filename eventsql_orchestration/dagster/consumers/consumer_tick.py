"""A tick of all partitions of a consumer, or of consumers that share their runs.

A few statements look at all partitions. Then the tick decides about each partition that needs attention, as a tick of
this partition alone would. The partitions come from the database, because a topic's partitions may change while its
consumers run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED
from eventsql_orchestration.consuming.claims import PartitionClaims
from eventsql_orchestration.dagster.consumers.claim_runs import runs_of
from eventsql_orchestration.dagster.consumers.decision import needs_attention
from eventsql_orchestration.dagster.consumers.options import TickOptions
from eventsql_orchestration.dagster.consumers.partition_tick import PartitionWatch
from eventsql_orchestration.dagster.consumers.tick import NothingYet, Tick, Watched, beginning_with
from eventsql_orchestration.dagster.register import consumer_missing, other_form, why_unregistered
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.errors import (
    ConsumerNotFoundError,
    DatabaseBusyError,
    EventSQLError,
    SchemaOutdatedError,
    TopicNotFoundError,
)

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
            if run is not None and standing.leased and run.dagster_run.status not in FINISHED:
                return run
        return None


@dataclass(frozen=True)
class ConsumerWatch(Watched):
    """Decides what a tick does about all partitions of a consumer.

    One statement looks at all partitions, and two queries of Dagster's storage find the runs of all live claims. Only a
    partition that needs attention costs more.
    """

    @property
    def label(self) -> str:
        """The consumer's label, for people and for a cursor."""
        return f"{self.topic.name}/{self.consumer.name}"

    @property
    def description(self) -> str:
        return (
            f"Claims events of {self.topic.name} for consumer {self.consumer.name}, partition by partition, and "
            "requests a run for each partition that has events."
        )

    def of(self, partition: int) -> PartitionWatch:
        return PartitionWatch(**vars(self), partition=partition)

    def look(self, tick: Tick) -> Sight | str:
        """The state of all partitions, or the reason why there is none. Raises `DatabaseUnavailableError`."""
        shard = tick.shard
        try:
            shard.registry.topic(self.topic.name)
            standings = {standing.partition: standing for standing in shard.claims.standings(self.consumer)}
            live = [standing.claim for standing in standings.values() if standing.claim is not None]
            runs = runs_of(live, self.consumer, shard, tick.instance)
        except TopicNotFoundError as error:
            return why_unregistered(shard, self.topic, self.consumer) or error.message
        except (SchemaOutdatedError, DatabaseBusyError) as error:
            return error.message
        if not standings:
            return why_unregistered(shard, self.topic, self.consumer) or consumer_missing(self.consumer)
        if (NOT_PARTITIONED not in standings) != self.consumer.partitioned:
            return other_form(self.consumer)
        return Sight(standings, runs)

    def needs_attention(self, sight: Sight, standing: PartitionClaims, tick: Tick, *, hands_over: bool = True) -> bool:
        record = sight.run_of(standing)
        run = None if record is None else tick.state(record)
        return needs_attention(standing, run, self.limits, self.options, hands_over=hands_over)

    def evaluate(self, tick: Tick, cursor: str | None = None) -> dg.SensorResult:
        """One tick. `cursor` is the first partition of this tick, if the previous tick did not reach all partitions.

        Raises the errors of `PartitionWatch.evaluate`. If the database goes away after this tick has made claims, the
        tick requests the runs of these claims.
        """
        sight = self.look(tick)
        if isinstance(sight, str):
            return dg.SensorResult(skip_reason=sight, cursor=cursor)

        requests: list[dg.RunRequest] = []
        reasons: dict[int, str] = {}
        for partition in beginning_with(cursor, list(sight.standings)):
            if tick.budget.spent():
                cursor = str(partition)
                break
            standing = sight.standings[partition]
            if not self.needs_attention(sight, standing, tick):
                continue
            try:
                answer = self.of(partition).attend(standing.claim, sight.run_of(standing), standing.last, tick)
            except (ConsumerNotFoundError, DatabaseBusyError) as error:
                reasons[partition] = error.message
            except EventSQLError as error:
                if not requests:
                    raise
                # If the tick failed now, the claims made so far would have no runs until their leases end.
                tick.log.warning("the tick ends at %s: %s", self.of(partition).label, error)
                cursor = str(partition)
                break
            else:
                if isinstance(answer, dg.RunRequest):
                    requests.append(answer)
                    tick.budget.requests -= 1
                else:
                    reasons[partition] = answer.skip_message or ""

        if requests:
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        return dg.SensorResult(skip_reason=_skipped(sight.standings, reasons), cursor=cursor)


def _skipped(standings: Mapping[int, PartitionClaims], reasons: Mapping[int, str]) -> dg.SkipReason:
    leased = sum(standing.leased and partition not in reasons for partition, standing in standings.items())
    idle = len(standings) - len(reasons) - leased
    counts = [f"{idle} of {len(standings)} partitions have no events"]
    if leased:
        counts.append(f"{leased} are leased")
    shown = [f"{partition}: {reason}" for partition, reason in list(reasons.items())[:SHOWN_REASONS]]
    more = [f"{len(reasons) - SHOWN_REASONS} more wait"] if len(reasons) > SHOWN_REASONS else []
    return (NothingYet if idle else dg.SkipReason)("; ".join([*counts, *shown, *more]))


@dataclass(frozen=True)
class SharedWatch:
    """Decides what a tick does about consumers that share their runs.

    A tick claims for one consumer and requests a run of all consumers. The run consumes that claim and the events that
    wait for the others. While a shared run is under way, a tick claims nothing.
    """

    members: tuple[ConsumerWatch, ...]
    sensor: str
    options: TickOptions

    @property
    def description(self) -> str:
        labels = ", ".join(member.label for member in self.members)
        return f"Claims events for one of {labels}, and requests a run of all of them, unless such a run is under way."

    @property
    def notified_by(self) -> frozenset[tuple[str, str]]:
        return frozenset(each for member in self.members for each in member.notified_by)

    def evaluate(self, tick: Tick, cursor: str | None = None) -> dg.SensorResult:
        """One tick. `cursor` is the first consumer of this tick: the one after the consumer that got the latest claim.

        Raises `DatabaseUnavailableError`.
        """
        looks = {member.label: member.look(tick) for member in self.members}
        reasons = {label: seen for label, seen in looks.items() if isinstance(seen, str)}
        sights = {label: seen for label, seen in looks.items() if not isinstance(seen, str)}
        order = [label for label in beginning_with(cursor, list(looks)) if label in sights]
        under_way = next((run for label in order if (run := sights[label].under_way()) is not None), None)

        for label, watch, standing in self._to_do(order, sights, tick, claims_alone=under_way is not None):
            try:
                answer = watch.attend(standing.claim, sights[label].run_of(standing), None, tick)
            except (ConsumerNotFoundError, DatabaseBusyError) as error:
                reasons[watch.label] = error.message
                continue
            if isinstance(answer, dg.RunRequest):
                tick.budget.requests -= 1
                return dg.SensorResult(run_requests=[answer], cursor=self._after(label))
            reasons[watch.label] = answer.skip_message or ""

        reason: str | dg.SkipReason
        if under_way is not None:
            reason = f"run {under_way.dagster_run.run_id} is under way, and consumes the waiting events"
        elif reasons:
            reason = "; ".join(f"{label}: {why}" for label, why in list(reasons.items())[:SHOWN_REASONS])
        else:
            reason = NothingYet(f"no events wait for {', '.join(order)}")
        return dg.SensorResult(skip_reason=reason, cursor=cursor)

    def _to_do(
        self, order: Sequence[str], sights: Mapping[str, Sight], tick: Tick, *, claims_alone: bool
    ) -> Iterator[tuple[str, PartitionWatch, PartitionClaims]]:
        """The partitions that need attention, those with a live claim first; with `claims_alone`, only those."""
        members = {member.label: member for member in self.members}
        for claimed in (True,) if claims_alone else (True, False):
            for label in order:
                member, sight = members[label], sights[label]
                for partition, standing in sight.standings.items():
                    if (standing.claim is not None) is claimed and member.needs_attention(
                        sight, standing, tick, hands_over=False
                    ):
                        yield label, member.of(partition), standing

    def _after(self, label: str) -> str:
        labels = [member.label for member in self.members]
        return labels[(labels.index(label) + 1) % len(labels)]
