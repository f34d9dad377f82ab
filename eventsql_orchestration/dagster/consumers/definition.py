"""A consumer as Dagster sees it: its asset, its job and its sensors, and the limits of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.functions import UserFunction
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.positions import Start
from eventsql_orchestration.log.registration import Registration, register_consumer
from eventsql_orchestration.model import DeclaredFilter


@dataclass(frozen=True, slots=True)
class Limits:
    """When a range is claimed, how large it is, and how long a run goes on. Times are seconds.

    Raises `ValidationError` for limits that exclude one another.
    """

    min_events: int = 1
    max_events: int = 10_000
    max_wait: float = 5.0
    drain_seconds: float = 20.0
    drain_events: int = 1_000_000
    drain_idle: float = 1.0
    lease: float = 60.0
    batch: int = 1_000

    def __post_init__(self) -> None:
        if not 1 <= self.min_events <= self.max_events:
            raise ValidationError(
                f"1 <= min_events <= max_events is needed, not {self.min_events} and {self.max_events}"
            )
        if self.batch < 1:
            raise ValidationError(f"batch must be at least 1: {self.batch}")
        if self.lease <= 0:
            raise ValidationError(f"lease is a positive number of seconds, not {self.lease}")
        for name in ("max_wait", "drain_seconds", "drain_events", "drain_idle"):
            if getattr(self, name) < 0:
                raise ValidationError(f"{name} must not be negative: {getattr(self, name)}")


class ClaimConfig(dg.Config):
    """What a run consumes: the range of a claim that a sensor made.

    Without a claim, as when the asset is materialized by hand, the run claims for itself what waits, of `partition` or
    of every partition. `shard` is that of the claim where there are several, and without a claim the only one that
    the run consumes on; where it is not given, on every one.

    With `replay`, a range that was committed is handed to the function once more: its effects happen again, and the
    offset stays where it is. Where it is not given, a run that somebody executes again after it had succeeded replays
    its range, and no other run does. Dagster's automatic retries replay nothing, whatever `replay` says.

    `succeeds` is a run that drains the partition: this one takes it over, as soon as it can claim, while that one goes
    on.
    """

    claim: int | None = None
    partition: int | None = None
    shard: str | None = None
    replay: bool | None = None
    succeeds: str | None = None


@dataclass(frozen=True)
class Computation:
    """How a consumer's function gets its events, whoever claims them: its own runs and those of a backfill.

    `consume(context, platform, resources)` gives what consumes a claim, as a `Consumed`; `publishes` are the assets of
    the topics that the function publishes to.
    """

    user: UserFunction
    consume: Callable[[dg.AssetExecutionContext, EventSQL, Mapping[str, Any]], Callable[[Claim], Any]]
    publishes: tuple[dg.AssetKey, ...]


@dataclass(frozen=True)
class ConsumerDefinition:
    """A consumer and everything that Dagster needs to run it.

    `max_attempts` and `filter` are None where they are not declared. `start` is where the consumer begins when it is
    new.
    """

    topic: Topic
    consumer: Consumer
    asset: dg.AssetsDefinition
    job: dg.UnresolvedAssetJobDefinition
    sensors: tuple[dg.SensorDefinition, ...]
    key: dg.AssetKey
    limits: Limits
    max_attempts: int | None = None
    filter: DeclaredFilter = None
    start: Start = "earliest"
    computation: Computation = field(kw_only=True, repr=False)

    @property
    def partitions(self) -> tuple[int, ...]:
        """The consumer's partitions; `(-1,)` when it is not partitioned."""
        return self.topic.all_partitions if self.consumer.partitioned else (NOT_PARTITIONED,)

    def register(self, platform: EventSQL) -> Registration:
        """Create the topic and the consumer, or give a consumer that exists the settings that are declared.

        Gives what became of the consumer. Raises `RedefinitionError`.
        """
        platform.registry.register_topic(self.topic)
        return register_consumer(
            platform.registry, self.consumer, max_attempts=self.max_attempts, start=self.start, filter=self.filter
        )


def check_distinct(consumers: Iterable[ConsumerDefinition]) -> None:
    """Refuse consumers of which two have one name, one sensor's name, or one and the same place in a topic.

    Raises `ValidationError`. Those that share their runs share a job and a sensor.
    """
    names: dict[str, ConsumerDefinition] = {}
    places: dict[tuple[str, str], str] = {}
    sensors: dict[str, tuple[str, dg.SensorDefinition]] = {}
    for each in consumers:
        name = each.key.to_user_string()
        if name in names:
            raise ValidationError(
                f"two consumers are called {name!r}, as their assets, jobs and sensors would be: give one of them "
                "another name"
            )
        names[name] = each
        place = (each.consumer.topic, each.consumer.name)
        if (other := places.setdefault(place, name)) != name:
            raise ValidationError(
                f"{other!r} and {name!r} are both consumer {place[1]!r} of topic {place[0]!r}: each event would go to "
                "one of them alone; give one of them another consumer"
            )
        for sensor in each.sensors:
            other, known = sensors.setdefault(sensor.name, (name, sensor))
            if known is not sensor:
                raise ValidationError(
                    f"{other!r} and {name!r} both have a sensor {sensor.name!r}: give one of them another name"
                )
