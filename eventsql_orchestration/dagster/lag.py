"""Lag as data in Dagster: observations with numbers, which its UI plots over time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, EventSQL
from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.sensors import TICK_TIMEOUT
from eventsql_orchestration.dagster.tags import HOUSEKEEPING_INTERNAL, HOUSEKEEPING_TAG
from eventsql_orchestration.errors import SchemaOutdatedError, TopicNotFoundError
from eventsql_orchestration.log.lag import ConsumerLag, LagCause

IDLE_INTERVAL: Final = 300.0
"""Seconds between observations of a consumer that is not behind: its plot goes on, and event storage stays small."""

LAG_EVENTS: Final = "lag events"
LAG_SECONDS: Final = "lag seconds"


@dataclass(frozen=True, slots=True)
class AssetLag:
    """The lag of a whole consumer."""

    partitions: tuple[ConsumerLag, ...]

    @property
    def events(self) -> int:
        return sum(lag.events for lag in self.partitions)

    @property
    def seconds(self) -> float:
        return max((lag.seconds for lag in self.partitions), default=0.0)

    def metadata(self) -> dict[str, Any]:
        """Numbers for the whole and for each partition, and the cause in words."""
        metadata: dict[str, Any] = {LAG_EVENTS: self.events, LAG_SECONDS: round(self.seconds, 3), "cause": self.cause()}
        for lag in self.partitions:
            if lag.partition != NOT_PARTITIONED:
                metadata[f"{LAG_EVENTS} [{lag.partition}]"] = lag.events
                metadata[f"{LAG_SECONDS} [{lag.partition}]"] = round(lag.seconds, 3)
        return metadata

    def cause(self) -> str:
        """Why the consumer is behind, for each partition that is."""
        causes = []
        for lag in self.partitions:
            if lag.cause != LagCause.NONE:
                where = "" if lag.partition == NOT_PARTITIONED else f"[{lag.partition}] "
                causes.append(f"{where}{lag.cause}{': ' if lag.detail else ''}{lag.detail}")
        return "; ".join(causes) or str(LagCause.NONE)


def read_lag(platform: EventSQL, consumer: ConsumerDefinition) -> AssetLag:
    """The lag of a consumer now. Raises `TopicNotFoundError`; a consumer that is not registered has no partitions."""
    lags = platform.lag(consumer.topic.name)
    return AssetLag(tuple(lag for lag in lags if lag.consumer == consumer.consumer.name))


def build_lag_sensor(
    consumers: Sequence[ConsumerDefinition],
    *,
    name: str = "lag",
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that observes the lag of each consumer's asset about every `interval_seconds`.

    Each observation has the numbers `lag events` and `lag seconds`, for the whole and for every partition, and the
    cause in words. A consumer that is not behind, and was not, is observed every 5 minutes.
    """
    watched = tuple(consumers)

    @dg.sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        description="Observes how far every consumer is behind.",
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )
    def observe(context: dg.SensorEvaluationContext, eventsql: EventSQLResource) -> dg.SensorResult:
        with eventsql.bounded(TICK_TIMEOUT) as platform:
            return observe_lag(platform, watched, cursor=context.cursor, now=time.time())

    return observe


def observe_lag(
    platform: EventSQL, consumers: Sequence[ConsumerDefinition], *, cursor: str | None, now: float
) -> dg.SensorResult:
    """One tick: an observation of each consumer that is due for one. `now` is in seconds since the epoch."""
    previous: Mapping[str, Any] = json.loads(cursor) if cursor else {}
    reported: dict[str, Any] = {}
    observations: list[dg.AssetObservation] = []
    missing: list[str] = []
    for consumer in consumers:
        asset = consumer.key.to_user_string()
        try:
            lag = read_lag(platform, consumer)
        except TopicNotFoundError as error:
            missing.append(error.message)
            continue
        except SchemaOutdatedError as error:
            return dg.SensorResult(skip_reason=error.message)
        if not lag.partitions:
            missing.append(f"consumer {consumer.consumer.name!r} of topic {consumer.topic.name!r} is not registered")
            continue
        events, at = previous.get(asset, (None, 0.0))
        if not lag.events and events == 0 and now - at < IDLE_INTERVAL:
            reported[asset] = (events, at)
            continue
        observations.append(dg.AssetObservation(asset_key=consumer.key, metadata=lag.metadata()))
        reported[asset] = (lag.events, now)
    reason = "; ".join(missing) or "no consumer is behind"
    return dg.SensorResult(
        asset_events=observations,
        skip_reason=None if observations else reason,
        # A JSON object is never empty text, which Dagster would take for no cursor.
        cursor=json.dumps(reported),
    )
