"""Alerts: tells somebody when an asset check turns red, and when it is green again.

Dagster's own alert policies are part of Dagster+; without it, this sensor reads what its event log says of the checks,
whoever evaluated them. For failed runs Dagster has `run_failure_sensor`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration.dagster.checks import ConsumerCheck, latest_evaluation
from eventsql_orchestration.dagster.tags import HOUSEKEEPING_INTERNAL, HOUSEKEEPING_TAG
from eventsql_orchestration.errors import ValidationError

GREEN: Final = "green"


@dataclass(frozen=True, slots=True)
class CheckAlert:
    """A check that has turned red, or green again. `at` is when it was evaluated, in seconds since the epoch."""

    asset: dg.AssetKey
    check: str
    passed: bool
    severity: dg.AssetCheckSeverity
    description: str
    metadata: dict[str, Any]
    at: float

    def __str__(self) -> str:
        state = "is green again" if self.passed else f"is red ({self.severity.value})"
        return f"check {self.check} of {self.asset.to_user_string()} {state}: {self.description}"


Notify: TypeAlias = Callable[[CheckAlert], object]


def build_alert_sensor(
    checks: Sequence[ConsumerCheck | dg.AssetChecksDefinition],
    notify: Notify,
    *,
    name: str = "alerts",
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that calls `notify(alert)` when one of `checks` turns red, and when it is green again.

    A check that stays red for another severity alerts anew. Each alert is sent at least once: one for which `notify`
    raises is sent again at the next tick, without keeping others from being sent, and the tick fails where none went
    out. Raises `ValidationError` without checks, or for a `notify` that cannot be called.
    """
    keys = tuple(
        key for check in checks for key in ([check.key] if isinstance(check, ConsumerCheck) else check.check_keys)
    )
    if not keys:
        raise ValidationError("an alert sensor needs at least one check")
    if not callable(notify):
        raise ValidationError(f"notify is a function of one alert, not {notify!r}")

    @dg.sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        description=f"Tells when one of {len(keys)} checks turns red, and when it is green again.",
        tags={HOUSEKEEPING_TAG: HOUSEKEEPING_INTERNAL},
    )
    def alert(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        known: dict[str, str] = json.loads(context.cursor) if context.cursor else {}
        sent = 0
        failure: Exception | None = None
        for key in keys:
            latest = _latest(context.instance, key)
            if latest is None:
                continue
            state = GREEN if latest.passed else latest.severity.value
            if state == known.get(key.to_user_string(), GREEN):
                continue
            try:
                notify(latest)
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises, other alerts must go out
                context.log.error("not sent, it is tried again: %s (%s: %s)", latest, type(error).__name__, error)
                failure = error
            else:
                known[key.to_user_string()] = state
                sent += 1
        if failure is not None and not sent:
            raise failure
        return dg.SensorResult(
            skip_reason=f"{sent} alerts sent" if sent else "no check has changed", cursor=json.dumps(known)
        )

    return alert


def _latest(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> CheckAlert | None:
    """How a check was evaluated last; None where it never was."""
    latest = latest_evaluation(instance, key)
    if latest is None:
        return None
    evaluation, at = latest
    return CheckAlert(
        key.asset_key,
        key.name,
        evaluation.passed,
        evaluation.severity,
        evaluation.description or "",
        {name: value.value for name, value in evaluation.metadata.items()},
        at,
    )
