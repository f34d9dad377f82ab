"""A task that consumes topic `rides` as `billing`, and its effects."""

from __future__ import annotations

from typing import Any

from eventsql_orchestration import EventSQL
from eventsql_orchestration.airflow import EventSQLConsumeOperator, RunLimits
from tests import effects as table

QUICK = RunLimits(max_wait=0.0, drain_idle=0.0)


def effects(platform: EventSQL) -> list[int]:
    """The ids of the events whose effects were committed, whatever the order of partitions."""
    return sorted(table.effects(platform))


def operator(function: Any = table.write, **options: Any) -> EventSQLConsumeOperator:
    given = {"topic": "rides", "consumer": "billing", "limits": QUICK, "batch": 2, **options}
    return EventSQLConsumeOperator(task_id="consume", python_callable=function, **given)
