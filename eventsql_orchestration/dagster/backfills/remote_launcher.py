"""Where the runs of a backfill are launched, and how in a Dagster that is running: by the GraphQL of its webserver."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventsql_orchestration.dagster.backfill_asset import ASSETS_METADATA, backfill_of
from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG, BACKFILL_TAG, DAGSTER_PARTITION_TAG, shard_tags
from eventsql_orchestration.dagster.webserver import Webserver, one_line
from eventsql_orchestration.dagster.windows import read_key
from eventsql_orchestration.errors import LocalDagsterError, RunFailedError, ValidationError

_SUCCEEDED: Final = frozenset({"SUCCESS"})
_FAILED: Final = frozenset({"FAILURE", "CANCELED"})
_UNDER_WAY: Final = ["QUEUED", "NOT_STARTED", "MANAGED", "STARTING", "STARTED", "CANCELING"]

DEFINE_IT: Final = "give the code location `build_backfill(…)` of the consumer: its asset and its jobs"


@dataclass(frozen=True, slots=True)
class Target:
    """What replays a consumer: a job, the set of its partitions, and the assets that it touches.

    `of` names the consumer, for its runs: several consumers may have backfills of one id.
    """

    job: str
    partitions: str
    assets: tuple[str, ...]
    of: str
    location: str = ""
    repository: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended; `why` says it of one that failed."""

    succeeded: bool
    why: str = ""


class Launcher(Protocol):
    """Launches runs, and knows what becomes of them."""

    outlives: bool
    """Whether runs go on when the command ends."""

    def target(self, topic: str, consumer: str) -> Target:
        """The job of a consumer's backfills. Raises `ValidationError` where there is none."""

    def require_running(self) -> None:
        """Raises `LocalDagsterError` where a run that is launched would not start."""

    def prepare(self, target: Target, keys: Sequence[str]) -> None:
        """Let the partitions of these keys exist."""

    def was_run(self, target: Target, backfill_id: str) -> bool:
        """Whether there are runs of a backfill, under way or not."""

    def under_way(self, target: Target, backfill_id: str) -> dict[str, str]:
        """The runs of a backfill that have not ended, by their partition key."""

    def launch(self, target: Target, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        """Launch the run of a partition key; gives its id. Raises `RunFailedError`."""

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        """Those of some runs that have ended, and how."""

    def close(self) -> None:
        """End what would not go on by itself."""


def run_tags(target: Target, backfill_id: str, key: str) -> dict[str, str]:
    """The tags of a run of a backfill."""
    _, window, _ = read_key(key)
    return {DAGSTER_PARTITION_TAG: key, **backfill_tags(target, backfill_id), **shard_tags(window.shard)}


def run_config(target: Target, max_failures: int | None) -> dict[str, Any]:
    """The config of a run of a backfill. Its only op has the name of the asset, as the set of partitions has."""
    return {} if max_failures is None else {"ops": {target.partitions: {"config": {"max_failures": max_failures}}}}


def backfill_tags(target: Target, backfill_id: str) -> dict[str, str]:
    """The tags by which the runs of a backfill are found."""
    return {BACKFILL_TAG: backfill_id, BACKFILL_OF_TAG: target.of}


class RemoteDagster:
    """Launches runs in a Dagster that is running, through the GraphQL API of its webserver.

    Its runs go on whatever becomes of this object.
    """

    outlives = True

    def __init__(self, url: str) -> None:
        """Raises `ValidationError` for what is no URL of HTTP."""
        self._webserver = Webserver(
            url,
            remedy=": start it, by `eventsql dev` for example, or name definitions with -f or -m to run the backfill "
            "without one",
        )
        self.url = self._webserver.url

    def target(self, topic: str, consumer: str) -> Target:
        of = backfill_of(topic, consumer)
        for repository in self._all(_REPOSITORIES, "repositoriesOrError", "nodes"):
            for job in repository["jobs"]:
                if {"key": BACKFILL_OF_TAG, "value": of} not in job["tags"]:
                    continue
                nodes = [node for node in repository["assetNodes"] if job["name"] in node["jobNames"]]
                (node,) = nodes
                return Target(
                    job["name"], node["partitionDefinition"]["name"], _assets(node["metadataEntries"]), of,
                    repository["location"]["name"], repository["name"],
                )  # fmt: skip
        raise ValidationError(f"{self.url} has no job for backfills of {topic}/{consumer}: {DEFINE_IT}")

    def require_running(self) -> None:
        for status in self._webserver.ask(_HEALTH)["instance"]["daemonHealth"]["allDaemonStatuses"]:
            if status["daemonType"] == "QUEUED_RUN_COORDINATOR" and status["required"] and not status["healthy"]:
                raise LocalDagsterError(
                    f"the daemon of {self.url} does not run, and runs would wait in its queue: start "
                    "`dagster-daemon run`"
                )

    def prepare(self, target: Target, keys: Sequence[str]) -> None:
        selector = {"repositoryLocationName": target.location, "repositoryName": target.repository}
        for key in keys:
            answer = self._webserver.ask(_ADD_PARTITION, selector=selector, name=target.partitions, key=key)[
                "addDynamicPartition"
            ]
            if answer["__typename"] not in {"AddDynamicPartitionSuccess", "DuplicateDynamicPartitionError"}:
                raise RunFailedError(f"partition {key} was refused: {answer.get('message') or answer['__typename']}")

    def was_run(self, target: Target, backfill_id: str) -> bool:
        return bool(self._runs(tags=_listed(backfill_tags(target, backfill_id)), limit=1))

    def under_way(self, target: Target, backfill_id: str) -> dict[str, str]:
        runs = self._runs(tags=_listed(backfill_tags(target, backfill_id)), statuses=_UNDER_WAY)
        return {
            tag["value"]: run["runId"] for run in runs for tag in run["tags"] if tag["key"] == DAGSTER_PARTITION_TAG
        }

    def launch(self, target: Target, backfill_id: str, key: str, *, max_failures: int | None = None) -> str:
        parameters = {
            "selector": {
                "repositoryLocationName": target.location,
                "repositoryName": target.repository,
                "jobName": target.job,
            },
            "runConfigData": run_config(target, max_failures),
            "executionMetadata": {"tags": _listed(run_tags(target, backfill_id, key))},
        }
        answer = self._webserver.ask(_LAUNCH, parameters=parameters)["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            why = answer.get("message") or "; ".join(error["message"] for error in answer.get("errors", []))
            raise RunFailedError(f"job {target.job!r} could not be launched: {why or answer['__typename']}")
        return str(answer["run"]["runId"])

    def ended(self, runs: Iterable[str]) -> dict[str, Ended]:
        ids, ended = list(runs), {}
        found = {run["runId"]: run["status"] for run in self._runs(runIds=ids)} if ids else {}
        for run_id in ids:
            status = found.get(run_id, "deleted")
            if status in _SUCCEEDED:
                ended[run_id] = Ended(True)
            elif status in _FAILED or status == "deleted":
                why = self._why(run_id) if status == "FAILURE" else f"it was {status.lower()}"
                ended[run_id] = Ended(False, f"{why} ({self.url}/runs/{run_id})")
        return ended

    def close(self) -> None:
        """Nothing is open."""

    def _why(self, run_id: str) -> str:
        run = self._webserver.ask(_FAILURE, run=run_id)["runOrError"]
        for entry in run.get("eventConnection", {}).get("events", []):
            if entry.get("error"):
                error = entry["error"].get("cause") or entry["error"]
                return one_line(error["message"])
        return "it failed"

    def _runs(self, *, limit: int | None = None, **filters: Any) -> list[Any]:
        answer = self._webserver.ask(_RUNS, filter=filters, limit=limit)["runsOrError"]
        if "results" not in answer:
            raise LocalDagsterError(f"{self.url} does not tell its runs: {answer.get('message')}")
        return list(answer["results"])

    def _all(self, query: str, field: str, of: str) -> list[Any]:
        answer = self._webserver.ask(query)[field]
        if of not in answer:
            raise LocalDagsterError(f"{self.url} could not load its code locations: {answer.get('message')}")
        return list(answer[of])


def _listed(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": name, "value": text} for name, text in tags.items()]


def _assets(entries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    listed = next((entry["jsonString"] for entry in entries if entry["label"] == ASSETS_METADATA), "[]")
    return tuple(json.loads(listed))


_REPOSITORIES: Final = """
{ repositoriesOrError {
    ... on RepositoryConnection { nodes {
        name
        location { name }
        jobs { name tags { key value } }
        assetNodes {
            jobNames partitionDefinition { name } metadataEntries { label ... on JsonMetadataEntry { jsonString } }
        }
    } }
    ... on PythonError { message }
} }
"""

_HEALTH: Final = "{ instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }"

_ADD_PARTITION: Final = """
mutation ($selector: RepositorySelector!, $name: String!, $key: String!) {
    addDynamicPartition(repositorySelector: $selector, partitionsDefName: $name, partitionKey: $key) {
        __typename
        ... on UnauthorizedError { message }
        ... on PythonError { message }
    }
}
"""

_LAUNCH: Final = """
mutation ($parameters: ExecutionParams!) {
    launchRun(executionParams: $parameters) {
        __typename
        ... on LaunchRunSuccess { run { runId } }
        ... on RunConfigValidationInvalid { errors { message } }
        ... on PipelineNotFoundError { message }
        ... on UnauthorizedError { message }
        ... on PythonError { message }
    }
}
"""

_RUNS: Final = """
query ($filter: RunsFilter!, $limit: Int) {
    runsOrError(filter: $filter, limit: $limit) {
        ... on Runs { results { runId status tags { key value } } }
        ... on PythonError { message }
    }
}
"""

_FAILURE: Final = """
query ($run: ID!) {
    runOrError(runId: $run) {
        ... on Run { eventConnection(limit: 1000) { events {
            ... on ExecutionStepFailureEvent { error { message cause { message } } }
        } } }
    }
}
"""
