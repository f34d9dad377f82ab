"""Alerts: calls a function when an asset check turns red, and when it is green again.

Dagster's own alert policies need Dagster+. This sensor reads the results of checks from Dagster's event log. For failed
runs, Dagster has `run_failure_sensor`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration.consuming.handlers import check_handler, check_returned
from eventsql_orchestration.dagster.monitoring.checks import ReportedCheck, latest_evaluation
from eventsql_orchestration.dagster.monitoring.reports import read_cursor
from eventsql_orchestration.dagster.tags import INTERNAL_RUN
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.validation import check_several, counted

GREEN: Final = "green"


@dataclass(frozen=True, slots=True)
class CheckAlert:
    """A check that turned red, or green again. `at` is the time of its result, in seconds since the epoch."""

    asset: dg.AssetKey
    check: str
    passed: bool
    severity: dg.AssetCheckSeverity
    description: str
    metadata: dict[str, Any]
    at: float

    @property
    def state(self) -> str:
        """`green`, or the severity of a red check."""
        return GREEN if self.passed else self.severity.value

    def __str__(self) -> str:
        state = "is green again" if self.passed else f"is red ({self.severity.value})"
        return f"check {self.check} of {self.asset.to_user_string()} {state}: {self.description}"


Notify: TypeAlias = Callable[[CheckAlert], object]


def build_alert_sensor(
    checks: Sequence[ReportedCheck | dg.AssetChecksDefinition],
    notify: Notify,
    *,
    name: str = "alerts",
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that calls `notify(alert)` when one of `checks` turns red, and when it is green again.

    If the severity of a red check changes, it alerts again. Each alert is sent at least once: if `notify` raises, the
    alert is sent again at the next tick, and other alerts are sent meanwhile. The tick fails if no alert could be sent.
    Raises `ValidationError` if there are no checks, or if `notify` cannot be called in this way, or is asynchronous.
    """
    check_several("checks", checks)
    keys = tuple(
        key for check in checks for key in ([check.key] if isinstance(check, ReportedCheck) else check.check_keys)
    )
    if not keys:
        raise ValidationError("an alert sensor needs at least one check")
    check_handler(notify, "alert")

    @dg.sensor(
        name=name,
        minimum_interval_seconds=interval_seconds,
        default_status=default_status,
        description=f"Tells when one of {len(keys)} checks turns red, and when it is green again.",
        tags=INTERNAL_RUN,
    )
    def alert(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        known: dict[str, str] = read_cursor(context.cursor)
        sent = _send(_changes(context.instance, keys, known), notify, known, lambda: context.log)
        return dg.SensorResult(
            skip_reason=f"{counted(sent, 'alert')} sent" if sent else "no check has changed", cursor=json.dumps(known)
        )

    return alert


def _changes(
    instance: dg.DagsterInstance, keys: Iterable[dg.AssetCheckKey], known: Mapping[str, str]
) -> Iterator[CheckAlert]:
    """The checks whose newest result has another state than the known state."""
    for key in keys:
        if (found := latest_evaluation(instance, key)) is not None:
            evaluation, at = found
            metadata = {name: value.value for name, value in evaluation.metadata.items()}
            latest = CheckAlert(
                key.asset_key, key.name, evaluation.passed, evaluation.severity, evaluation.description or "",
                metadata, at,
            )  # fmt: skip
            if latest.state != known.get(key.to_user_string(), GREEN):
                yield latest


def _send(
    alerts: Iterable[CheckAlert], notify: Notify, known: dict[str, str], open_log: Callable[[], logging.Logger]
) -> int:
    """Send alerts, and note the states that are sent. Returns their number. Raises the last error if none is sent."""
    sent = 0
    failure: Exception | None = None
    for alert in alerts:
        try:
            check_returned(notify(alert))
        except Exception as error:  # noqa: BLE001 - one error of a user's function must not stop other alerts
            open_log().error("not sent, the next tick tries again: %s (%s: %s)", alert, type(error).__name__, error)
            failure = error
        else:
            known[dg.AssetCheckKey(alert.asset, alert.check).to_user_string()] = alert.state
            sent += 1
    if failure is not None and not sent:
        raise failure
    return sent
