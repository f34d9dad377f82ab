"""The facts of a run in Dagster, from its storage or from a webserver: status, times, and the ranges it has read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.consuming.dead_letter_values import describe
from eventsql_orchestration.dagster.local.webserver import Webserver, one_line
from eventsql_orchestration.dagster.metadata_keys import INPUT_CONSUMER, INPUT_RANGES, INPUT_TOPIC
from eventsql_orchestration.dagster.tags import DAGSTER_PARTITION_TAG, QUEUE_TAG
from eventsql_orchestration.model import NOT_PARTITIONED
from eventsql_orchestration.orchestration.errors import LocalDagsterError
from eventsql_orchestration.orchestration.trace.runs import RunFacts, RunInput

TIMEOUT: Final = 30.0
"""Seconds that a webserver may take for one answer."""

_ENTRIES: Final = """
metadataEntries { label ... on TextMetadataEntry { text } ... on JsonMetadataEntry { jsonString } }
"""

_RUN: Final = """
query ($run: ID!) { runOrError(runId: $run) {
    ... on Run { jobName status startTime endTime rootRunId tags { key value } }
    ... on PythonError { message }
} }
"""

_INPUTS: Final = f"... on LoadedInputEvent {{ {_ENTRIES} }} ... on MaterializationEvent {{ {_ENTRIES} }}"


class StoredRuns:
    """The runs of an instance of Dagster, read from its storage."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._instance = instance

    def run(self, run_id: str) -> RunFacts | None:
        try:
            record = self._instance.get_run_record_by_id(run_id)
            return None if record is None else self._facts(record)
        except Exception as error:
            # Each kind of storage raises errors of its own.
            raise LocalDagsterError(f"the storage of Dagster fails: {one_line(describe(error))}") from error

    def _facts(self, record: dg.RunRecord) -> RunFacts:
        run = record.dagster_run
        return RunFacts(
            run.run_id, run.job_name, run.status.value, _time(record.start_time), _time(record.end_time),
            run.tags.get(DAGSTER_PARTITION_TAG), run.root_run_id, _unique(self._inputs(run.run_id)),
            run.tags.get(QUEUE_TAG),
        )  # fmt: skip

    def _inputs(self, run_id: str) -> Iterator[RunInput]:
        told = {dg.DagsterEventType.LOADED_INPUT, dg.DagsterEventType.ASSET_MATERIALIZATION}
        for entry in self._instance.all_logs(run_id, of_type=told):
            if (event := entry.dagster_event) is not None:
                data: Any = event.event_specific_data
                metadata = getattr(data, "materialization", data).metadata
                yield from _ranges({name: value.value for name, value in metadata.items()})


class ServedRuns:
    """The runs that a webserver of Dagster serves at a URL."""

    def __init__(self, url: str) -> None:
        """Raises `ValidationError` if the URL is not an HTTP URL."""
        self._webserver = Webserver(url, timeout=TIMEOUT)

    def run(self, run_id: str) -> RunFacts | None:
        found = self._webserver.ask(_RUN, run=run_id)["runOrError"]
        if "message" in found:
            raise LocalDagsterError(f"Dagster at {self._webserver.url} cannot load run {run_id}: {found['message']}")
        if not found:
            return None
        tags = {tag["key"]: tag["value"] for tag in found["tags"]}
        root = found["rootRunId"] if found["rootRunId"] != run_id else None
        return RunFacts(
            run_id, found["jobName"], found["status"], _time(found["startTime"]), _time(found["endTime"]),
            tags.get(DAGSTER_PARTITION_TAG), root, _unique(self._inputs(run_id)), tags.get(QUEUE_TAG),
        )  # fmt: skip

    def _inputs(self, run_id: str) -> Iterator[RunInput]:
        for event in self._webserver.events(run_id, _INPUTS):
            entries = event.get("metadataEntries", ())
            yield from _ranges({entry["label"]: _value(entry) for entry in entries})


def _value(entry: Mapping[str, Any]) -> object:
    return json.loads(entry["jsonString"]) if "jsonString" in entry else entry.get("text")


def _ranges(metadata: Mapping[str, Any]) -> Iterator[RunInput]:
    topic, ranges, consumer = (metadata.get(name) for name in (INPUT_TOPIC, INPUT_RANGES, INPUT_CONSUMER))
    # A user's own metadata can have the same names.
    if not isinstance(topic, str) or not isinstance(ranges, list):
        return
    for each in ranges:
        if not isinstance(each, dict):
            continue
        partition, claim, shard = each.get("partition", NOT_PARTITIONED), each.get("claim"), each.get("shard")
        if all(type(number) is int for number in (each.get("after"), each.get("upto"), partition)):
            yield RunInput(
                topic, partition, each["after"], each["upto"],
                consumer=consumer if isinstance(consumer, str) else None,
                claim=claim if type(claim) is int else None,
                shard=shard if isinstance(shard, str) else None,
            )  # fmt: skip


def _unique(inputs: Iterable[RunInput]) -> tuple[RunInput, ...]:
    return tuple(dict.fromkeys(inputs))


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
