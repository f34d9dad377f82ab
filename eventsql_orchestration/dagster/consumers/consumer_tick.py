"""A tick of a consumer, or of one of its partitions.

A few statements look at all partitions. Then the tick decides about each partition that needs attention. The partitions
come from the database, because a topic's partitions may change while its consumers run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED
from eventsql_orchestration.consuming.claims import PartitionClaims
from eventsql_orchestration.dagster.consumers.claim_runs import runs_of
from eventsql_orchestration.dagster.consumers.decision import needs_attention
from eventsql_orchestration.dagster.consumers.partition_tick import PartitionTick
from eventsql_orchestration.dagster.consumers.tick import Answer, NothingYet, Tick, Watched, in_random_order
from eventsql_orchestration.dagster.register import consumer_missing, why_unregistered
from eventsql_orchestration.errors import (
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
class ConsumerWatch(Watched):
    """Decides what a tick does about all partitions of a consumer, or about the only `partition` of its sensor.

    One statement looks at all partitions, and two queries of Dagster's storage find the runs of all live claims. Only a
    partition that needs attention costs more.
    """

    partition: int | None = None

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
        taken = standing.claim is not None or standing.leased or standing.paused
        if taken or self.needs_attention(sight, standing, tick):
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
