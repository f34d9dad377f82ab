"""Counts of each topic, from the Dagster runs of a round."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import dagster as dg

from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.tags import TOPIC_TAG
from eventsql_orchestration.orchestration.rounds import RunCounts


def run_counts(instance: dg.DagsterInstance, runs: Collection[dg.DagsterRun]) -> RunCounts:
    """Counts of each topic, from the materializations of runs."""
    counts = RunCounts(failed=tuple(run.job_name for run in runs if run.status is dg.DagsterRunStatus.FAILURE))
    for run in runs:
        topics = {run.tags[TOPIC_TAG]} if TOPIC_TAG in run.tags else set()
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
            logged: Any = entry.dagster_event
            metadata = logged.step_materialization_data.materialization.metadata
            if keys.INPUT_CONSUMER in metadata:
                topics.add(str(metadata[keys.INPUT_TOPIC].value))
            if keys.PUBLISHED_TOPIC in metadata and keys.PUBLISHED_EVENTS in metadata:
                topic = str(metadata[keys.PUBLISHED_TOPIC].value)
                counts.published[topic] += int(metadata[keys.PUBLISHED_EVENTS].value)
        counts.runs.update(topics)
    return counts
