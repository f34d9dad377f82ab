"""The lag sensor: observes the lag of every consumer and evaluates the checks of consumers, without any run."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.consumers.asset_lag import AssetLag, place_of, read_lags
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition, check_distinct
from eventsql_orchestration.dagster.instigators import states_of
from eventsql_orchestration.dagster.monitoring.checks import ConsumerCheck, Look
from eventsql_orchestration.dagster.monitoring.reports import Reports, cursor_of, monitoring_sensor
from eventsql_orchestration.dagster.monitoring.topic_page import DEFAULT_SAMPLE, TopicSample, topic_page
from eventsql_orchestration.dagster.register import consumer_missing
from eventsql_orchestration.dagster.tags import INTERNAL_RUN, TRANSFER_TAG
from eventsql_orchestration.dagster.topics import topic_observations
from eventsql_orchestration.errors import DatabaseBusyError, EventSQLError, ValidationError
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.validation import check_several, counted

logger = logging.getLogger(__name__)

TOPIC_INTERVAL: Final = 60.0
"""Seconds between two reports of events that arrived in a topic: freshness is a matter of minutes."""

SHOWN_CONSUMERS: Final = 5
"""Maximum number of consumers that a tick names in its skip reason."""

OFFSETS: Final = "offsets"
"""In the state of a tick: the offset of each partition of each asset. By this, the next tick sees which partitions have
moved."""

ARRIVALS: Final = "arrivals"
"""In the state of a tick: `at`, the time of the last report of topics, and `seen`, the offsets up to which it
reported."""


def build_lag_sensor(
    consumers: Sequence[ConsumerDefinition],
    *,
    checks: Sequence[ConsumerCheck] = (),
    topics: Sequence[Topic] = (),
    name: str = "lag",
    sample: TopicSample = DEFAULT_SAMPLE,
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that observes the lag of each consumer's asset about every `interval_seconds`, and evaluates `checks`.

    Each observation has the numbers `Lag events` and `Lag seconds`, for the consumer and for every partition, and the
    cause in words. A consumer that stays without lag is observed every 5 minutes. A check is evaluated at every tick.
    Its result is reported when it changes; otherwise every 5 minutes while it is red, every hour while it is green, and
    sooner after the asset was materialized. Events that arrived in `topics`, to which no asset publishes, are reported
    once a minute as materializations, so that Dagster can judge the topic's freshness. They have the topic's rate,
    offsets, retention and consumers, and a `sample` of its last events. No run is started.

    Raises `ValidationError` for a check of a consumer that is not among `consumers`, and for two definitions of one
    consumer.
    """
    check_distinct(consumers)
    check_several("checks", checks, Collection)
    check_several("topics", topics, Collection)
    strangers = sorted(check.key.to_user_string() for check in checks if check.consumer not in consumers)
    if strangers:
        raise ValidationError(f"these checks are of consumers that the sensor does not watch: {strangers}")

    def observe(platform: EventSQL, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        states = states_of(context.instance, context.code_location_origin, context.repository_name)
        schedules = () if context.repository_def is None else context.repository_def.schedule_defs
        return observe_lag(
            platform, consumers, checks=checks, topics=topics, sample=sample, cursor=cursor_of(context, checks),
            now=time.time(), stopped=stopped_sensors(states, consumers),
            transfer_off=stopped_transfer(states, schedules), materialized=materialized_at(context.instance, consumers),
        )  # fmt: skip

    return monitoring_sensor(
        observe, name=name, interval_seconds=interval_seconds, default_status=default_status,
        description="Observes how far every consumer is behind, evaluates the checks of consumers, and reports "
        "the events that arrive in topics to which no asset publishes.",
    )  # fmt: skip


def materialized_at(
    instance: dg.DagsterInstance, consumers: Sequence[ConsumerDefinition]
) -> Mapping[dg.AssetKey, float]:
    """The time of each asset's last materialization, in seconds since the epoch. Assets without one are left out."""
    latest = instance.get_latest_materialization_events([consumer.key for consumer in consumers])
    return {key: entry.timestamp for key, entry in latest.items() if entry is not None}


def stopped_sensors(states: Iterable[Any], consumers: Iterable[ConsumerDefinition]) -> frozenset[str]:
    """The names of these consumers' sensors that are switched off, by a person or by default, by `states_of`."""
    return _switched_off(states, "SENSOR", [sensor for each in consumers for sensor in each.sensors])


def stopped_transfer(states: Iterable[Any], schedules: Iterable[dg.ScheduleDefinition]) -> str | None:
    """The name of the location's schedule for the transfer if it is switched off, as for `stopped_sensors`."""
    off = _switched_off(states, "SCHEDULE", [each for each in schedules if TRANSFER_TAG in each.tags])
    return next(iter(off), None)


def _switched_off(
    states: Iterable[Any], kind: str, definitions: Sequence[dg.SensorDefinition | dg.ScheduleDefinition]
) -> frozenset[str]:
    switched: dict[str, str] = {
        state.instigator_name: state.status.value for state in states if state.instigator_type.value == kind
    }

    def is_off(definition: dg.SensorDefinition | dg.ScheduleDefinition) -> bool:
        status = switched.get(definition.name, "DECLARED_IN_CODE")
        return (definition.default_status.value if status == "DECLARED_IN_CODE" else status) == "STOPPED"

    return frozenset(each.name for each in definitions if is_off(each))


def observe_lag(
    platform: EventSQL,
    consumers: Sequence[ConsumerDefinition],
    *,
    checks: Sequence[ConsumerCheck] = (),
    topics: Sequence[Topic] = (),
    sample: TopicSample = DEFAULT_SAMPLE,
    cursor: str | None,
    now: float,
    stopped: Collection[str] = (),
    transfer_off: str | None = None,
    materialized: Mapping[dg.AssetKey, float] = MappingProxyType({}),
) -> dg.SensorResult:
    """One tick: the observations and results that are due. `now` is in seconds since the epoch.

    `stopped` are the names of sensors that are switched off, `transfer_off` is the name of the schedule for the
    transfer if it is switched off, `materialized` is the result of `materialized_at`.
    """
    reports = Reports(cursor, now)
    found = read_lags(platform, consumers)
    before = reports.left(OFFSETS)
    lags = {
        each.key: _compared(found[each.key], each, before.get(each.key.to_user_string(), {}), stopped, transfer_off)
        for each in consumers
        if each.key in found
    }
    _observe(lags, reports)
    _report_arrivals(platform, topics, sample, reports)
    for check in checks:
        key = check.consumer.key
        look = Look(platform, lags.get(key, AssetLag(())), now)
        reports.evaluate(check, look, materialized=materialized.get(key, 0.0))
    return reports.result(_summary(consumers, lags))


def _summary(consumers: Sequence[ConsumerDefinition], lags: Mapping[dg.AssetKey, AssetLag]) -> str:
    """Which consumers are behind and why, the largest lag first, and which consumers are not registered."""
    behind = sorted(((lag, key) for key, lag in lags.items() if lag.causes), key=lambda each: -each[0].events)
    said = [
        f"{key.to_user_string()} is {counted(lag.events, 'event')} behind "
        f"({', '.join(sorted({why for _, why in lag.causes}))})"
        for lag, key in behind[:SHOWN_CONSUMERS]
    ]
    if len(behind) > SHOWN_CONSUMERS:
        said.append(f"and {counted(len(behind) - SHOWN_CONSUMERS, 'more consumer')}")
    said += [f"the lag of {key.to_user_string()} is unknown: {lag.unknown}" for key, lag in lags.items() if lag.unknown]
    registered = {key for key, lag in lags.items() if lag.registered}
    said += [consumer_missing(each.consumer) for each in consumers if each.key not in registered]
    return "; ".join(said) or "no consumer is behind"


def _compared(
    lag: AssetLag,
    consumer: ConsumerDefinition,
    offsets: Mapping[str, int],
    stopped: Collection[str],
    transfer_off: str | None,
) -> AssetLag:
    """A lag with the partitions that have moved since the previous tick, and with what is switched off."""
    # A consumer may have one sensor for all of its partitions.
    own = len(consumer.sensors) == len(consumer.partitions)
    sensors = consumer.sensors if own else consumer.sensors * len(consumer.partitions)
    of = zip(consumer.partitions, sensors, strict=True)
    moved = (each for each in lag.partitions if each.last_event_id > offsets.get(place_of(each), each.last_event_id))
    return replace(
        lag,
        moved=frozenset(map(place_of, moved)),
        stopped={partition: sensor.name for partition, sensor in of if sensor.name in stopped},
        transfer_off=transfer_off,
    )


def _observe(lags: Mapping[dg.AssetKey, AssetLag], reports: Reports) -> None:
    offsets = reports.after[OFFSETS] = {}
    for key, lag in lags.items():
        if lag.partitions:
            reached = (each for each in lag.partitions if each.shard not in lag.unreachable)
            offsets[key.to_user_string()] = {place_of(each): each.last_event_id for each in reached}
            reports.observe(key, lag.metadata(), idle=not lag.events and not lag.unreachable)


def _report_arrivals(platform: EventSQL, topics: Sequence[Topic], sample: TopicSample, reports: Reports) -> None:
    """Report the events that arrived in topics since they were reported last, once a minute."""
    before = reports.left(ARRIVALS) or {"at": 0.0, "seen": {}}
    seconds = reports.now - before["at"]
    if not topics or seconds < TOPIC_INTERVAL:
        reports.after[ARRIVALS] = before
        return
    try:
        news = topic_observations(platform, topics, seen=before["seen"])
    except DatabaseBusyError as error:
        # The tick still reports lags and checks, and the next tick reports the arrivals.
        logger.info("arrivals are not reported: %s", error)
        reports.after[ARRIVALS] = before
        return
    reports.after[ARRIVALS] = {"at": reports.now, "seen": news.seen}
    shards = {shard.name: shard for shard in shards_of(platform)} if news.materializations else {}
    for arrival in news.materializations:
        found: dict[str, Any] = {name: value.value for name, value in arrival.metadata.items()}
        try:
            page = topic_page(
                shards[found.get(keys.INPUT_SHARD)], found[keys.PUBLISHED_TOPIC], sample=sample,
                arrived=found.get(keys.PUBLISHED_EVENTS), seconds=seconds, end=found[keys.PUBLISHED_LAST],
            )  # fmt: skip
        except EventSQLError as error:
            logger.info("the page of %s is left out: %s", arrival.asset_key.to_user_string(), error)
            page = {}
        reports.events.append(
            dg.AssetMaterialization(
                arrival.asset_key, arrival.description, {**arrival.metadata, **page}, tags=INTERNAL_RUN
            )
        )
