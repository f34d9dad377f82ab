"""Counts of each topic, from the DAG runs of a round, by the public REST API."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from eventsql_orchestration.airflow.api import AirflowApi
from eventsql_orchestration.orchestration.rounds import RunCounts


def runs_since(api: AirflowApi, since: datetime) -> Iterator[dict[str, Any]]:
    """The runs that were made since a time, except runs of a timetable, which consume nothing."""
    for run in api.pages("/dags/~/dagRuns", "dag_runs", run_after_gte=since.isoformat()):
        if run["run_type"] != "scheduled":
            yield run


def run_counts(api: AirflowApi, since: datetime) -> RunCounts:
    """Counts of each topic, from the asset events of the runs since a time."""
    counts = RunCounts(failed=tuple(run["dag_id"] for run in runs_since(api, since) if run["state"] == "failed"))
    runs: dict[str, set[tuple[str, str]]] = {}
    for event in api.pages("/assets/events", "asset_events", timestamp_gte=since.isoformat()):
        extra = event["extra"] or {}
        claim = extra.get("payload")
        if isinstance(claim, dict) and "topic" in claim:
            made = {(run["dag_id"], run["run_id"]) for run in event["created_dagruns"]}
            runs.setdefault(claim["topic"], set()).update(made)
        elif "topic" in extra and not extra.get("repeated"):
            counts.published[extra["topic"]] += int(extra.get("events", 0))
    counts.runs.update({topic: len(made) for topic, made in runs.items()})
    return counts
