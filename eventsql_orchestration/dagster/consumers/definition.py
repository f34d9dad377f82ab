"""A consumer as Dagster sees it: its asset, its job and its sensors, and the limits of its runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Shard, Topic
from eventsql_orchestration.consumer import DeclaredFilter
from eventsql_orchestration.dagster.consumers.options import RunLimits
from eventsql_orchestration.dagster.consumers.user_function import UserFunction
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.drain import Consume
from eventsql_orchestration.topics.positions import Start
from eventsql_orchestration.topics.registration import Registration
from eventsql_orchestration.validation import check_several


class ClaimConfig(dg.Config):
    """The config of a consuming run. It names a sensor's claim, and the run consumes the range of this claim.

    A run without a claim, for example a materialization by hand, claims the waiting events itself, of `partition` or of
    every partition. If there are several shards, `shard` is the claim's shard. A run without a claim consumes only on
    this `shard`, and by default on every shard.

    With `replay`, the function gets a committed range once more: its effects happen again, and the offset stays. By
    default, a run replays its range only if a person executes it again after it has succeeded. Dagster's automatic
    retries never replay, whatever the value of `replay`.

    `succeeds` is a run that drains the partition. This run takes the partition over as soon as it can claim, while the
    draining run goes on.
    """

    claim: int | None = None
    partition: int | None = None
    shard: str | None = None
    replay: bool | None = None
    succeeds: str | None = None


MakeConsume: TypeAlias = Callable[[dg.AssetExecutionContext, Shard, Mapping[str, Any]], Consume]
"""Makes the function that consumes the claims of a run on a shard, from the run's context and resources."""


@dataclass(frozen=True)
class Computation:
    """How a consumer's function gets its events, in the consumer's own runs and in a backfill's runs.

    `publishes` are the assets of the topics that the function publishes to.
    """

    user: UserFunction
    consume: MakeConsume
    publishes: tuple[dg.AssetKey, ...]


@dataclass(frozen=True)
class ConsumerDefinition:
    """A consumer and everything that Dagster needs to run it.

    `max_attempts` and `filter` are None if they are not declared. `start` is the place where a new consumer begins.
    `publishes` are the topics that its function publishes to, if they are declared as a `Topic`.
    """

    topic: Topic
    consumer: Consumer
    asset: dg.AssetsDefinition
    job: dg.UnresolvedAssetJobDefinition
    sensors: tuple[dg.SensorDefinition, ...]
    key: dg.AssetKey
    limits: RunLimits
    max_attempts: int | None
    filter: DeclaredFilter
    start: Start
    publishes: tuple[Topic, ...]
    computation: Computation = field(repr=False)

    @property
    def partitions(self) -> tuple[int, ...]:
        """The consumer's partitions; `(-1,)` when it is not partitioned."""
        return self.topic.all_partitions if self.consumer.partitioned else (NOT_PARTITIONED,)

    def register(self, platform: EventSQL) -> Registration:
        """Create the consumer and its topics, or give an existing consumer the declared settings.

        Returns the result for the consumer. Raises `RedefinitionError`.
        """
        for topic in (self.topic, *self.publishes):
            platform.registry.register_topic(topic)
        return platform.registry.declare_consumer(
            self.consumer, max_attempts=self.max_attempts, start=self.start, filter=self.filter
        )


def check_consumers(consumers: Collection[ConsumerDefinition]) -> None:
    """Raise `ValidationError` for what is not a consumer, and for a generator, which would give them only once."""
    check_several("consumers", consumers, Collection)
    for each in consumers:
        if not isinstance(each, ConsumerDefinition):
            raise ValidationError(
                f"{type(each).__name__} is not a consumer: make a consumer with consumer_asset or range_asset"
            )


def check_distinct(consumers: Collection[ConsumerDefinition]) -> None:
    """Refuse two definitions with the same name, with the same sensor name, or of the same consumer of a topic.

    Also refuse what `check_consumers` refuses, and a consumer that has the name of a topic: Dagster's graph shows only
    the last part of a key.

    Raises `ValidationError`. Consumers that share their runs share a job and a sensor.
    """
    check_consumers(consumers)
    topics = {key.path[-1] for each in consumers for key in (topic_key(each.topic.name), *each.computation.publishes)}
    for each in consumers:
        if (label := each.key.path[-1]) in topics:
            raise ValidationError(
                f"consumer {label!r} and topic {label!r} would have the same label in Dagster's graph: give the "
                f"consumer's asset another name, for example name={'consume_' + label!r}"
            )
    places: dict[tuple[str, str], str] = {}
    sensors: dict[str, tuple[str, dg.SensorDefinition]] = {}
    for each in consumers:
        name = each.key.to_user_string()
        if name in places.values():
            raise ValidationError(
                f"two consumers are called {name!r}, so their assets, jobs and sensors would have the same names: "
                "give one of them another name"
            )
        place = (each.consumer.topic, each.consumer.name)
        if (other := places.setdefault(place, name)) != name:
            raise ValidationError(
                f"{other!r} and {name!r} are both consumer {place[1]!r} of topic {place[0]!r}, and only one of them "
                "would get each event: give one of them another consumer name"
            )
        for sensor in each.sensors:
            other, known = sensors.setdefault(sensor.name, (name, sensor))
            if known is not sensor:
                raise ValidationError(
                    f"{other!r} and {name!r} both have a sensor {sensor.name!r}: give one of them another name"
                )
