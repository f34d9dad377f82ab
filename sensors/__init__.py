"""Sensors and schedules beside the consumers' own: the transfer, lag with its checks, alerts and housekeeping."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import dagster as dg

from eventsql_orchestration import Topic
from eventsql_orchestration.dagster import (
    CheckAlert,
    ConsumerCheck,
    ConsumerDefinition,
    ReportedCheck,
    build_alert_sensor,
    build_housekeeping_schedule,
    build_lag_sensor,
    build_transfer_schedule,
)


def lag_sensor(
    consumers: Sequence[ConsumerDefinition], checks: Sequence[ConsumerCheck], topics: Sequence[Topic]
) -> dg.SensorDefinition:
    """Observes every consumer's lag, evaluates the checks of consumers, and reports the events of external topics."""
    return build_lag_sensor(consumers, checks=checks, topics=topics)


def alert_sensor(checks: Sequence[ReportedCheck | dg.AssetChecksDefinition]) -> dg.SensorDefinition:
    """Tells when a check turns red, and when it is green again."""
    return build_alert_sensor(checks, notify)


def notify(alert: CheckAlert) -> None:
    """Where a team calls its pager or its chat; here it is a line in the code server's log."""
    logging.getLogger("eventsql.alerts").log(logging.INFO if alert.passed else logging.ERROR, "%s", alert)


transfer = build_transfer_schedule()


def housekeeping(checks: Sequence[ReportedCheck]) -> dg.ScheduleDefinition:
    """Keeps topics to their retention, and Dagster's history in bounds."""
    return build_housekeeping_schedule(checks=checks)
