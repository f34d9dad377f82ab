"""A consumer as Dagster sees it: its asset, its job and its sensors, and the limits of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.errors import ValidationError

DEFAULT_MAX_ATTEMPTS: Final = 5


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
    of every partition.
    """

    claim: int | None = None
    partition: int | None = None


@dataclass(frozen=True)
class ConsumerDefinition:
    """A consumer and everything that Dagster needs to run it."""

    topic: Topic
    consumer: Consumer
    asset: dg.AssetsDefinition
    job: dg.UnresolvedAssetJobDefinition
    sensors: tuple[dg.SensorDefinition, ...]
    key: dg.AssetKey
    limits: Limits
    max_attempts: int = DEFAULT_MAX_ATTEMPTS

    @property
    def partitions(self) -> tuple[int, ...]:
        """The consumer's partitions; `(-1,)` when it is not partitioned."""
        return self.topic.all_partitions if self.consumer.partitioned else (NOT_PARTITIONED,)

    def register(self, platform: EventSQL) -> None:
        """Create the topic and the consumer, or find them as they are. Raises `RedefinitionError`."""
        platform.registry.register_topic(self.topic)
        platform.registry.register_consumer(self.consumer, max_attempts=self.max_attempts)
