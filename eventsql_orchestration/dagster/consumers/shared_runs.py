"""Consumers that share their runs, for runs whose start costs more than their work: one Spark session serves all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import dagster as dg

from eventsql_orchestration.dagster.consumers.consumer_tick import SHOWN_REASONS, ConsumerWatch, Sight
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition, check_consumers
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS, TickOptions
from eventsql_orchestration.dagster.consumers.sensors import build_sensor
from eventsql_orchestration.dagster.consumers.tick import Answer, NothingYet, Tick, in_random_order
from eventsql_orchestration.dagster.steps import job_of_assets
from eventsql_orchestration.dagster.tags import CONSUMER_RUN, CONSUMER_TAG, SHARED_TAG, TOPIC_TAG
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.shards import partition_label

_OF_ONE = (TOPIC_TAG, CONSUMER_TAG)
"""Tags of a consumer's own runs that shared runs do not have."""


def share_runs(
    name: str,
    consumers: Sequence[ConsumerDefinition],
    *,
    ticks: TickOptions = DEFAULT_TICKS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> tuple[ConsumerDefinition, ...]:
    """The consumers with one common job and one common sensor, both named `name`.

    The sensor claims for one of them and requests a run. The run consumes that claim and then the events that wait for
    each consumer, one consumer after the other, in one process: a Spark session starts once for all. There is one run
    at a time on each shard. So events that come for a consumer after its turn wait until the run has ended: at most for
    the sum of the consumers' `drain_seconds`. A consumer that fails delays no other.

    Raises `ValidationError` for fewer than two consumers, and if a consumer reads an asset that another materializes:
    their steps have an order, so each needs its own runs.
    """
    check_consumers(consumers)
    if len(consumers) < 2:
        raise ValidationError("runs are shared by at least two consumers")
    materialized = _materialized(name, consumers)
    own = {tag: value for consumer in consumers for tag, value in (consumer.job.tags or {}).items()}
    job = job_of_assets(
        name,
        materialized,
        description=f"Consumes the waiting events of {', '.join(each.consumer.name for each in consumers)}, in turn.",
        tags={**{tag: value for tag, value in own.items() if tag not in _OF_ONE}, **CONSUMER_RUN, SHARED_TAG: "true"},
    )
    members = [
        ConsumerWatch(each.topic, each.consumer, each.asset.op.name, each.limits, name, ticks) for each in consumers
    ]
    sensor = build_sensor(SharedWatch(tuple(members), name, ticks), job, default_status)
    return tuple(replace(consumer, job=job, sensors=(sensor,)) for consumer in consumers)


def _materialized(name: str, consumers: Sequence[ConsumerDefinition]) -> list[dg.AssetKey]:
    """The assets of consumers that can share runs. Raises `ValidationError` for others."""
    makers = {key: each.consumer.name for each in consumers for key in each.asset.keys}
    if len(makers) != sum(len(list(each.asset.keys)) for each in consumers):
        raise ValidationError(f"{name}: a consumer is named twice, or two of them publish to one topic")
    for each in consumers:
        for dependency in each.asset.get_asset_spec(each.key).deps:
            if (maker := makers.get(dependency.asset_key)) is not None:
                raise ValidationError(
                    f"{name}: consumer {each.consumer.name!r} reads {dependency.asset_key.to_user_string()}, which "
                    f"{maker!r} materializes: they cannot share runs"
                )
    return list(makers)


@dataclass(frozen=True)
class SharedWatch:
    """Decides what a tick does about consumers that share their runs.

    A tick claims for one consumer and requests a run of all consumers. The run consumes that claim and the events that
    wait for the others. While a shared run has a claim, a tick claims nothing.
    """

    members: tuple[ConsumerWatch, ...]
    sensor: str
    options: TickOptions

    @property
    def description(self) -> str:
        labels = ", ".join(member.label for member in self.members)
        return f"Claims events for one of {labels}, and requests a run of all of them, unless such a run has a claim."

    @property
    def notified_by(self) -> frozenset[tuple[str, str]]:
        return frozenset(each for member in self.members for each in member.notified_by)

    def evaluate(self, tick: Tick) -> Answer:
        """One tick. Raises `DatabaseUnavailableError`."""
        looks = [(member, member.look(tick)) for member in self.members]
        reasons = {member.label: seen for member, seen in looks if isinstance(seen, str)}
        sights = [(member, seen) for member, seen in looks if isinstance(seen, Sight)]
        under_way = next((run for _, sight in sights if (run := sight.under_way()) is not None), None)

        to_do = [
            (member, sight, standing)
            for member, sight in in_random_order(sights)
            # Shared runs have no successors: the latest claim does not matter.
            for standing in (replace(each, last=None) for each in sight.standings.values())
            if (standing.claim is not None or under_way is None) and member.needs_attention(sight, standing, tick)
        ]
        # The run of a live claim may be dead.
        for member, sight, standing in sorted(to_do, key=lambda each: each[2].claim is None):
            answer = member.attend(sight, standing, tick)
            if isinstance(answer, dg.RunRequest):
                return [answer]
            reasons[partition_label(member.topic.name, standing.partition)] = answer.skip_message or ""

        if under_way is not None:
            return dg.SkipReason(f"run {under_way.dagster_run.run_id} is under way, and consumes the waiting events")
        if reasons:
            return dg.SkipReason("; ".join(f"{label}: {why}" for label, why in list(reasons.items())[:SHOWN_REASONS]))
        return NothingYet(f"no events wait for {', '.join(member.label for member in self.members)}")
