"""Backfills in a running Dagster: the GraphQL API of its webserver launches the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from eventsql_orchestration.dagster.backfills.assets import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.backfills.job import DEFINE_IT, DagsterJob
from eventsql_orchestration.dagster.local.webserver import Webserver, listed_tags, one_line
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, DAGSTER_PARTITION_TAG, FINISHED
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.backfills.launcher import Ended, Launcher
from eventsql_orchestration.orchestration.errors import LocalDagsterError, RunFailedError

_SUBMITTED: Final = ["QUEUED", "MANAGED", "STARTING", "STARTED", "CANCELING"]
"""Without NOT_STARTED, which a run stays for ever if its webserver was killed between creating and submitting it, and
without SUSPENDED, which older webservers refuse."""

_ENDED: Final = {"deleted", *(status.value for status in FINISHED)}

_ADD_PARTITION: Final = """
mutation ($selector: RepositorySelector!, $name: String!, $key: String!) {
    addDynamicPartition(repositorySelector: $selector, partitionsDefName: $name, partitionKey: $key) {
        __typename
        ... on UnauthorizedError { message }
        ... on PythonError { message }
    }
}
"""

_FAILURES: Final = """
... on ExecutionStepFailureEvent { error { message cause { message } } }
... on RunFailureEvent { message }
"""


class RemoteDagster(Launcher):
    """Launches the runs of a consumer's backfills in a running Dagster. They go on after this object is closed."""

    orchestrator = "Dagster"

    def __init__(self, url: str, topic: str, consumer: str) -> None:
        """Raises `ValidationError` if the URL is not an HTTP URL."""
        self._webserver = Webserver(
            url,
            remedy=": start one, by `eventsql dev` for example, or name definitions with -f or -m to run the backfill "
            "without a running Dagster",
        )
        self.url = self._webserver.url
        self._of = backfill_of(topic, consumer)

    @cached_property
    def job(self) -> DagsterJob:
        of = self._of
        found = [
            _job(repository, job["name"], of)
            for repository in self._webserver.repositories()
            for job in repository["jobs"]
            if {"key": BACKFILL_OF_TAG, "value": of} in job["tags"]
        ]
        if not found:
            raise ValidationError(f"{self.url} has no job for backfills of {of}: {DEFINE_IT}")
        if len(found) > 1:
            # Each of these jobs may belong to another database.
            places = ", ".join(f"{job.repository}@{job.location}" for job in found)
            raise ValidationError(
                f"{self.url} has {len(found)} jobs for backfills of {of}, in {places}: name the definitions of one of "
                "them with -f or -m"
            )
        return found[0]

    def require_running(self) -> None:
        if not self._webserver.starts_runs():
            raise LocalDagsterError(
                f"the daemon of {self.url} does not run, and runs would wait in its queue: start `dagster-daemon run`"
            )

    def prepare(self, keys: Sequence[str]) -> None:
        job = self.job
        selector = {"repositoryLocationName": job.location, "repositoryName": job.repository}
        for key in keys:
            answer = self._webserver.ask(_ADD_PARTITION, selector=selector, name=job.partitions, key=key)
            added = answer["addDynamicPartition"]
            if added["__typename"] not in {"AddDynamicPartitionSuccess", "DuplicateDynamicPartitionError"}:
                raise RunFailedError(f"partition {key} was refused: {added.get('message') or added['__typename']}")

    def was_run(self, backfill_id: str) -> bool:
        return bool(self._webserver.runs(tags=listed_tags(self.job.tags(backfill_id)), limit=1))

    def under_way(self, backfill_id: str) -> dict[str, str]:
        runs = self._webserver.runs(tags=listed_tags(self.job.tags(backfill_id)), statuses=_SUBMITTED)
        return {run.tags[DAGSTER_PARTITION_TAG]: run.id for run in runs if DAGSTER_PARTITION_TAG in run.tags}

    def launch(self, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        job = self.job
        return self._webserver.launch(
            job.repository, job.location, job.name,
            config=job.config(max_failures), tags=job.run_tags(backfill_id, key),
        )  # fmt: skip

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        ids = list(runs)
        found = {run.id: run.status for run in self._webserver.runs(runIds=ids)} if ids else {}
        ended = {}
        for run_id in ids:
            status = found.get(run_id, "deleted")
            if status in _ENDED:
                why = self._why(run_id) if status == "FAILURE" else f"it was {status.lower()}"
                ended[run_id] = Ended(status == "SUCCESS", f"{why} ({self.url}/runs/{run_id})")
        return ended

    def _why(self, run_id: str) -> str:
        for event in self._webserver.events(run_id, _FAILURES):
            if error := event.get("error"):
                return one_line((error.get("cause") or error)["message"])
            if "message" in event:
                return one_line(event["message"])
        return "it failed"


def _job(repository: Mapping[str, Any], name: str, of: str) -> DagsterJob:
    for node in repository["assetNodes"]:
        entries = {each["label"]: each.get("jsonString") for each in node["metadataEntries"]}
        if name in node["jobNames"] and ASSETS_METADATA in entries:
            return DagsterJob(
                name, tuple(json.loads(entries[ASSETS_METADATA])), node["partitionDefinition"]["name"], of,
                repository["name"], repository["location"]["name"],
            )  # fmt: skip
    raise ValidationError(f"job {name!r} is for backfills of {of}, and none of its assets is one: {DEFINE_IT}")
