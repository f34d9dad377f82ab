"""The alerts: where a team calls its pager or its chat."""

from __future__ import annotations

import logging

from eventsql_orchestration.dagster import CheckAlert


def notify(alert: CheckAlert) -> None:
    """Tells when a check turns red, and when it is green again: here by a line in the code server's log."""
    logging.getLogger("eventsql.alerts").log(logging.INFO if alert.passed else logging.ERROR, "%s", alert)
