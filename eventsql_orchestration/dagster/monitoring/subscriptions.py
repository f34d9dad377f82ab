"""The subscription sensor: observes the lag of the event store's subscriptions, without any run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.asset_lag import CAUSE, LAG_SECONDS
from eventsql_orchestration.dagster.monitoring.reports import Reports, monitoring_sensor
from eventsql_orchestration.dagster.read_models import SUBSCRIPTION
from eventsql_orchestration.errors import RestoredStoreError, ValidationError
from eventsql_orchestration.store import SubscriptionLag
from eventsql_orchestration.validation import counted

LAG_CHANGES: Final = "Lag changes"
HELD_BACK: Final = "Held back"
DEAD_LETTERS: Final = "Dead letters"


def build_subscription_sensor(
    assets: Sequence[dg.AssetSpec],
    *,
    name: str = "subscriptions",
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that observes the lag of subscriptions about every `interval_seconds`. No run is started.

    `assets` come from `subscription_asset` and `projection_asset`. Each observation has the numbers `Lag changes`,
    `Lag seconds`, `Held back` and `Dead letters`, which Dagster plots, and the cause in words. A subscription that
    stays without lag is observed every 5 minutes. Raises `ValidationError` for other assets.
    """
    names = {spec.key: _subscription_of(spec) for spec in assets}

    def observe(platform: EventSQL, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return observe_subscriptions(platform, names, cursor=context.cursor, now=time.time())

    return monitoring_sensor(
        observe, name=name, interval_seconds=interval_seconds, default_status=default_status,
        description="Observes how far subscriptions of the event store are behind.",
    )  # fmt: skip


def _subscription_of(spec: dg.AssetSpec) -> str:
    name = spec.metadata.get(SUBSCRIPTION)
    if not isinstance(name, str):
        raise ValidationError(
            f"asset {spec.key.to_user_string()} has no subscription: give assets of subscription_asset or "
            "projection_asset"
        )
    return name


def observe_subscriptions(
    platform: EventSQL, names: Mapping[dg.AssetKey, str], *, cursor: str | None, now: float
) -> dg.SensorResult:
    """One tick: the observations that are due. `now` is in seconds since the epoch."""
    try:
        found = {lag.name: lag for lag in platform.store.subscriptions()}
    except RestoredStoreError as error:
        return dg.SensorResult(skip_reason=error.message, cursor=cursor)

    reports = Reports(cursor, now)
    said: list[str] = []
    for key, name in names.items():
        lag = found.get(name)
        if lag is None:
            said.append(f"subscription {name!r} does not exist yet: its process makes it when it subscribes")
            continue
        behind = lag.waiting > 0 or lag.held_back > 0
        if behind:
            said.append(f"{name} is {counted(lag.waiting + lag.held_back, 'change')} behind ({lag.why or 'waiting'})")
        reports.observe(key, _metadata(lag), idle=not behind)
    return reports.result("; ".join(said) or "no subscription is behind")


def _metadata(lag: SubscriptionLag) -> dict[str, Any]:
    return {
        LAG_CHANGES: lag.waiting + lag.held_back, LAG_SECONDS: round(lag.seconds, 3), HELD_BACK: lag.held_back,
        DEAD_LETTERS: lag.dead_letters, CAUSE: lag.why or ("waiting" if lag.waiting else "none"),
    }  # fmt: skip
