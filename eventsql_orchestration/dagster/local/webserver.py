"""A client of Dagster's webserver by GraphQL: it lists jobs and runs, and launches and ends runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import requests

from eventsql_orchestration.consuming.dead_letter_values import POINTER
from eventsql_orchestration.orchestration.errors import LocalDagsterError, RunFailedError
from eventsql_orchestration.orchestration.webservers import check_url, proxies_of, without_credentials
from eventsql_orchestration.validation import json_object

TIMEOUT: Final = 60.0
"""Seconds that an answer may take. For some answers, the webserver asks the code location."""

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
query ($filter: RunsFilter!, $limit: Int) { runsOrError(filter: $filter, limit: $limit) {
    ... on Runs { results { runId jobName status tags { key value } } }
    ... on PythonError { message }
} }
"""

_EVENTS: Final = """
query ($run: ID!, $cursor: String, $limit: Int) { logsForRun(runId: $run, afterCursor: $cursor, limit: $limit) {
    ... on EventConnection { cursor hasMore events { FIELDS } }
    ... on PythonError { message }
} }
"""

_PAGE: Final = 1_000

_HEALTH: Final = "{ instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }"

_TERMINATE: Final = "mutation ($run: String!) { terminateRun(runId: $run) { __typename } }"


@dataclass(frozen=True, slots=True)
class RunOfWebserver:
    """A run, its job, its status and its tags."""

    id: str
    job: str
    status: str
    tags: Mapping[str, str]


class Webserver:
    """The webserver at a URL.

    `timeout` is in seconds, for each answer. `remedy` is the end of the error if no webserver answers. The user and the
    password of the URL are sent only to the webserver: `url` does not have them.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT, remedy: str = "") -> None:
        """Raises `ValidationError` if the URL is not an HTTP URL."""
        check_url(url, "a Dagster webserver", "http://127.0.0.1:3000")
        self.url = without_credentials(url)
        self.endpoint = f"{url.rstrip('/')}/graphql"
        self._proxies = proxies_of(url)
        self._timeout = timeout
        self._remedy = remedy

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The data of an answer. Raises `LocalDagsterError` if no answer comes, or the webserver refuses."""
        try:
            response = requests.post(
                self.endpoint, json={"query": query, "variables": variables},
                timeout=self._timeout, proxies=self._proxies,
            )  # fmt: skip
        except requests.RequestException as error:
            # The message of `requests` would repeat the URL.
            raise LocalDagsterError(
                f"no Dagster answers at {self.url} ({type(error).__name__}){self._remedy}"
            ) from None
        # Dagster sends its errors with a status of 400 or 500.
        text = response.content.decode(errors="replace")
        answer = json_object(text)
        if answer is None and response.ok:
            raise LocalDagsterError(f"the server at {self.url} is not a webserver of Dagster")
        errors, data = (answer or {}).get("errors"), (answer or {}).get("data")
        if errors or not isinstance(data, dict):
            told = one_line(json.dumps(errors) if errors else text)
            raise LocalDagsterError(f"{self.url} refused a query (HTTP status {response.status_code}): {told}")
        return data

    def repositories(self) -> list[dict[str, Any]]:
        """Its repositories, with `name`, `location`, `jobs` and `assetNodes`. Raises `LocalDagsterError`."""
        found = self.ask(_REPOSITORIES).get("repositoriesOrError", {})
        if "nodes" not in found:
            raise LocalDagsterError(f"{self.url} could not load its code locations: {found.get('message')}")
        return list(found["nodes"])

    def launch(
        self, repository: str, location: str, job: str, *, config: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """Launch a run of a job; gives its id.

        Raises `RunFailedError` if Dagster refuses it, and `LocalDagsterError` if it cannot, as without its storage.
        """
        parameters = {
            "selector": {"repositoryLocationName": location, "repositoryName": repository, "jobName": job},
            "runConfigData": config,
            "executionMetadata": {"tags": listed_tags(tags)},
        }
        answer = self.ask(_LAUNCH, parameters=parameters)["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            why = answer.get("message") or "; ".join(error["message"] for error in answer.get("errors", []))
            error = LocalDagsterError if answer["__typename"] == "PythonError" else RunFailedError
            raise error(f"job {job!r} could not be launched: {one_line(why) or answer['__typename']}")
        return str(answer["run"]["runId"])

    def runs(self, *, limit: int | None = None, **filters: Any) -> list[RunOfWebserver]:
        """The runs that meet the filters of GraphQL's `RunsFilter`. Raises `LocalDagsterError`."""
        found = self.ask(_RUNS, filter=filters, limit=limit)["runsOrError"]
        if "results" not in found:
            raise LocalDagsterError(f"{self.url} could not list its runs: {one_line(str(found.get('message')))}")
        return [
            RunOfWebserver(
                run["runId"], run["jobName"], run["status"], {tag["key"]: tag["value"] for tag in run["tags"]}
            )
            for run in found["results"]
        ]

    def events(self, run_id: str, fields: str) -> Iterator[dict[str, Any]]:
        """These GraphQL fields of each event of a run, oldest first; none if the run was deleted.

        Raises `LocalDagsterError`.
        """
        cursor, more = None, True
        while more:
            page = self.ask(_EVENTS.replace("FIELDS", fields), run=run_id, cursor=cursor, limit=_PAGE)["logsForRun"]
            if "message" in page:
                raise LocalDagsterError(f"{self.url} could not read run {run_id}: {one_line(page['message'])}")
            yield from page.get("events", ())
            cursor, more = page.get("cursor"), page.get("hasMore", False)

    def starts_runs(self) -> bool:
        """Whether a daemon takes runs out of the queue, or there is no queue. Raises `LocalDagsterError`."""
        daemons = self.ask(_HEALTH)["instance"]["daemonHealth"]["allDaemonStatuses"]
        return all(
            daemon["healthy"]
            for daemon in daemons
            if daemon["daemonType"] == "QUEUED_RUN_COORDINATOR" and daemon["required"]
        )

    def terminate(self, run_id: str) -> None:
        """Ask Dagster to end a run. A run that has ended stays as it is."""
        self.ask(_TERMINATE, run=run_id)


def listed_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags in the form that GraphQL takes."""
    return [{"key": name, "value": text} for name, text in tags.items()]


def one_line(text: str) -> str:
    """The message of an error, in one line of up to 500 characters, without Dagster's prefix and pointers."""
    return re.sub(r"^dagster\.\S+: |^Failure: ", "", " ".join(POINTER.sub("", text).split()))[:500]
