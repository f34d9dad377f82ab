"""Monitoring sensors: the reports of one tick, and the state that it leaves to the next tick."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.options import DEFAULT_TICKS
from eventsql_orchestration.dagster.monitoring.checks import IDLE_INTERVAL, Look, ReportedCheck, remembered
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.tags import INTERNAL_RUN
from eventsql_orchestration.errors import SchemaOutdatedError
from eventsql_orchestration.validation import json_object

Event: TypeAlias = dg.AssetObservation | dg.AssetMaterialization | dg.AssetCheckEvaluation

IDLE: Final = "idle"
CHECKS: Final = "checks"


def read_cursor(cursor: str | None) -> dict[str, Any]:
    """The state in a cursor. Empty for another text: a sensor of another kind may have had this name before."""
    return json_object(cursor or "{}") or {}


def cursor_of(context: dg.SensorEvaluationContext, checks: Iterable[ReportedCheck]) -> str:
    """The cursor of a tick. If the sensor has none, because it is new or was renamed or reset, the checks' memory."""
    if context.cursor is not None:
        return context.cursor
    memories = {check.key.to_user_string(): {"memory": remembered(context.instance, check.key)} for check in checks}
    return json.dumps({CHECKS: memories})


class Reports:
    """The events that a tick reports at `now` (seconds since the epoch).

    `before` is the state that the previous tick left, and `after` is the state for the next tick.
    """

    def __init__(self, cursor: str | None, now: float) -> None:
        self.now = now
        self.before = read_cursor(cursor)
        self.after: dict[str, Any] = {IDLE: {}, CHECKS: {}}
        self.events: list[Event] = []

    def observe(self, key: dg.AssetKey, metadata: Mapping[str, Any], *, idle: bool) -> None:
        """Observe an asset. An asset that stays idle is observed only every `IDLE_INTERVAL` seconds."""
        name = key.to_user_string()
        if idle:
            last = self.left(IDLE).get(name)
            is_due = last is None or self.now - last >= IDLE_INTERVAL
            self.after[IDLE][name] = self.now if is_due else last
            if not is_due:
                return
        self.events.append(dg.AssetObservation(asset_key=key, metadata=metadata, tags=INTERNAL_RUN))

    def evaluate(self, check: ReportedCheck, look: Look[Any], *, materialized: float = 0.0) -> None:
        """Evaluate a check by its rule, and report its result if that is due.

        `materialized` is the time of the asset's last materialization, in seconds since the epoch.
        """
        name = check.key.to_user_string()
        said = self.left(CHECKS).get(name, {})
        verdict = check.judge(replace(look, memory=said.get("memory", {})))
        evaluation, self.after[CHECKS][name] = check.due(verdict, said, now=self.now, materialized=materialized)
        if evaluation is not None:
            self.events.append(evaluation)

    def left(self, part: str) -> dict[str, Any]:
        """A part of the state that the previous tick left; empty if it has another form."""
        found = self.before.get(part)
        return found if isinstance(found, dict) else {}

    def result(self, reason: str) -> dg.SensorResult:
        """The result of the tick. The cursor is never empty: Dagster takes an empty text for no cursor."""
        return dg.SensorResult(asset_events=self.events, skip_reason=reason, cursor=json.dumps(self.after))


def monitoring_sensor(
    observe: Callable[[EventSQL, dg.SensorEvaluationContext], dg.SensorResult],
    *,
    name: str,
    description: str,
    interval_seconds: int,
    default_status: dg.DefaultSensorStatus,
) -> dg.SensorDefinition:
    """A sensor whose ticks observe the platform, with bounded statements. It skips if the schema is outdated."""

    @dg.sensor(
        name=name, description=description, minimum_interval_seconds=interval_seconds, default_status=default_status,
        tags=INTERNAL_RUN,
    )  # fmt: skip
    def tick(context: dg.SensorEvaluationContext, eventsql: EventSQLResource) -> dg.SensorResult:
        try:
            with eventsql.for_tick(DEFAULT_TICKS.statement_timeout) as platform:
                return observe(platform, context)
        except SchemaOutdatedError as error:
            return dg.SensorResult(skip_reason=error.message, cursor=context.cursor)

    return tick
