"""Asset checks of consumers."""

from __future__ import annotations

import dagster as dg

from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.lag import read_lag
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.errors import ValidationError


def build_lag_check(
    consumer: ConsumerDefinition,
    *,
    max_events: int | None = None,
    max_seconds: float | None = None,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.WARN,
) -> dg.AssetChecksDefinition:
    """A check `lag` of a consumer's asset: red when it is behind by more than so many events or so many seconds.

    Its metadata holds the numbers and the cause. Raises `ValidationError` where no threshold is given.
    """
    if max_events is None and max_seconds is None:
        raise ValidationError("a lag check needs max_events, max_seconds, or both")
    if (max_events is not None and max_events < 0) or (max_seconds is not None and max_seconds < 0):
        raise ValidationError("max_events and max_seconds must not be negative")
    allowed = " and ".join(
        text
        for text in (
            None if max_events is None else f"{max_events} events",
            None if max_seconds is None else f"{max_seconds:g} s",
        )
        if text
    )

    @dg.asset_check(
        asset=consumer.key,
        name="lag",
        description=f"Consumer {consumer.consumer.name} is behind by {allowed} at most.",
    )
    def lag(eventsql: EventSQLResource) -> dg.AssetCheckResult:
        now = read_lag(eventsql.platform, consumer)
        late = (max_events is not None and now.events > max_events) or (
            max_seconds is not None and now.seconds > max_seconds
        )
        registered = bool(now.partitions)
        return dg.AssetCheckResult(
            passed=registered and not late,
            severity=severity,
            description=None if registered else f"consumer {consumer.consumer.name!r} is not registered",
            metadata=now.metadata(),
        )

    return lag
