"""A Dagster with a daemon and a webserver that runs a location, as an operator has it, and what the UI asks of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.dagster import write_instance
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import LocalDagster
from eventsql_orchestration.dagster.local.instance import STORAGE_VARIABLE, instance_directory
from eventsql_orchestration.dagster.local.webserver import Webserver
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.model import Topic
from eventsql_orchestration.orchestration.local_processes import only_one
from tests.conftest import Administrator
from tests.fixtures import memory_disk
from tests.system import operated_location as location

BACKFILL = "may"
WINDOW = 10
BROKEN_WINDOW, SLOW_WINDOWS, WINDOWS = 2, (3, 4), 6
"""Of the backfill's windows one fails and two take their time, so that each state of a partition is to be seen."""


FROM_UI = [{"key": "dagster/from-ui", "value": "true"}]

LAUNCH = """
mutation ($parameters: ExecutionParams!) {
    launchRun(executionParams: $parameters) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""
EXECUTE_AGAIN = """
mutation ($executionParams: ExecutionParams, $reexecutionParams: ReexecutionParams) {
    launchPipelineReexecution(executionParams: $executionParams, reexecutionParams: $reexecutionParams) {
        __typename
        ... on LaunchRunSuccess { run { runId } }
        ... on PythonError { message }
    }
}
"""
"""As the UI has it: a strategy for a whole run, or the parameters of a run of selected steps."""

RUN = """
query ($run: ID!) { runOrError(runId: $run) { ... on Run {
    runId rootRunId mode runConfigYaml pipelineName tags { key value }
    assetSelection { path } assetCheckSelection { name assetKey { path } }
} } }
"""
LOCATION = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"


@dataclass
class System:
    """A running Dagster on the location, and the platform under it."""

    dagster: LocalDagster
    platform: EventSQL
    alerts: Path
    gate: Path
    backfill: subprocess.Popen[str]
    session: Path
    card: Path
    spoilt: Path

    def materialize(self, asset: str) -> str:
        """Launch the run that an asset's page launches; gives its id."""
        webserver = Webserver(self.dagster.url, remedy="")
        (repository,) = webserver.ask(LOCATION)["repositoriesOrError"]["nodes"]
        selector = {
            "repositoryLocationName": repository["location"]["name"],
            "repositoryName": repository["name"],
            "jobName": "__ASSET_JOB",
            "assetSelection": [{"path": [asset]}],
        }
        launched = webserver.ask(LAUNCH, parameters={"selector": selector, "runConfigData": {}})["launchRun"]
        return str(launched["run"]["runId"])

    def execute_again(self, run_id: str, strategy: str) -> str:
        """Re-execute a run, all of it or from its failure, as the buttons of its page do; gives the new run's id."""
        parameters = {"parentRunId": run_id, "strategy": strategy, "extraTags": FROM_UI}
        return self._again(reexecutionParams=parameters)

    def execute_steps_again(self, run_id: str, steps: Sequence[str]) -> str:
        """Re-execute selected steps of a run, as its page does: with the tags that it shows."""
        webserver = Webserver(self.dagster.url)
        (repository,) = webserver.ask(LOCATION)["repositoriesOrError"]["nodes"]
        run = webserver.ask(RUN, run=run_id)["runOrError"]
        root = run["rootRunId"] or run_id
        parameters = {
            "mode": run["mode"],
            "runConfigData": run["runConfigYaml"],
            "executionMetadata": {
                "parentRunId": run_id,
                "rootRunId": root,
                "tags": [
                    *run["tags"],
                    {"key": "dagster/parent_run_id", "value": run_id},
                    {"key": "dagster/root_run_id", "value": root},
                    {"key": "dagster/step_selection", "value": ",".join(steps)},
                ],
            },
            "selector": {
                "repositoryLocationName": repository["location"]["name"],
                "repositoryName": repository["name"],
                "pipelineName": run["pipelineName"],
                "assetSelection": run["assetSelection"] or [],
                "assetCheckSelection": run["assetCheckSelection"] or [],
            },
            "stepKeys": list(steps),
        }
        return self._again(executionParams=parameters)

    def _again(self, **parameters: object) -> str:
        answer = Webserver(self.dagster.url).ask(EXECUTE_AGAIN, **parameters)["launchPipelineReexecution"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def runs(self, job: str, status: dg.DagsterRunStatus) -> list[str]:
        """The runs of a job that have a status, the newest first."""
        with self.dagster.instance() as instance:
            found = instance.get_runs(dg.RunsFilter(job_name=job, statuses=[status]))
        return [run.run_id for run in found]

    def handled(self, table: LiteralString) -> list[int]:
        """The ids of the events that a consumer has handled, in their order, by the table of its effects."""
        with self.platform.database.connection() as connection:
            return [id_ for (id_,) in connection.execute(f"SELECT id FROM {table} ORDER BY place").fetchall()]

    def ended(self, runs: Iterable[str]) -> bool:
        return all(self.status(run) in {status.value for status in FINISHED} for run in runs)

    def read(self, topic: str) -> list[bytes | None]:
        self.platform.transfer.run_once()
        return [event.value for event in self.platform.reader.read(topic)]

    def status(self, run_id: str) -> str:
        with self.dagster.instance() as instance:
            run = instance.get_run_by_id(run_id)
        return "" if run is None else run.status.value

    def lags(self) -> list[int]:
        """The lags of consumer order_status that its sensor observed, in events, the newest first."""
        with self.dagster.instance() as instance:
            observed = instance.fetch_observations(location.order_status.key, limit=100).records
        metadata = [record.asset_observation.metadata for record in observed if record.asset_observation]
        return [int(str(entry["Lag events"].value)) for entry in metadata if "Lag events" in entry]

    def was_behind(self, events: int) -> bool:
        return events in self.lags()

    def alerted(self, text: str) -> bool:
        return self.alerts.exists() and text in self.alerts.read_text(encoding="utf-8")

    def windows(self) -> dict[str, str]:
        """The status of the run of each window that was launched, by its partition key."""
        with self.dagster.instance() as instance:
            runs = instance.get_runs(dg.RunsFilter(tags={"eventsql/backfill": BACKFILL}))
        return {run.tags["dagster/partition"]: run.status.value for run in runs}


def publish(platform: EventSQL, topic: str, values: Iterable[bytes]) -> None:
    platform.publisher.publish_all(Publication(topic, value) for value in values)
    platform.transfer.run_once()


@contextlib.contextmanager
def transferring(platform: EventSQL) -> Iterator[None]:
    """The transfer at work, which takes the location's dead letters to their topic too."""
    stop = threading.Event()
    thread = threading.Thread(target=platform.transfer.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def backfilling(dagster: LocalDagster, dsn: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """`eventsql backfill` at work, with two runs at a time."""
    command = [
        str(Path(sys.executable).with_name("eventsql")), "backfill", "zone_fares", "fare_totals", "--from", "earliest",
        "--window-events", str(WINDOW), "--parallel", "2", "--id", BACKFILL, "--execute", "--dagster-url", dagster.url,
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "EVENTSQL_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def operating(administrator: Administrator) -> Iterator[System]:
    """A running system with the location of this room; both end with the block."""
    root = Path(tempfile.mkdtemp(prefix="eventsql-operating-", dir=memory_disk()))
    alerts, gate, session, card, spoilt = (root / name for name in ("alerts", "gate", "session", "card", "spoilt"))
    values = {BROKEN_WINDOW: location.BROKEN, **dict.fromkeys(SLOW_WINDOWS, location.GATE)}
    history = [[values.get(window, b"paid"), *[b"paid"] * (WINDOW - 1)] for window in range(1, WINDOWS + 1)]
    with (
        pytest.MonkeyPatch.context() as patch,
        only_one(instance_directory(root)),
        administrator.copied() as dsn,
        EventSQL(dsn, transfer=False) as platform,
    ):
        patch.setenv(STORAGE_VARIABLE, "of another instance")
        location.order_status.register(platform)
        platform.registry.register_topic(Topic(location.ORDERS.dead_letter_topic))
        publish(platform, "ride_orders", [b"accepted", location.BROKEN, b"delivered"])
        platform.registry.register_topic(location.FARES)
        publish(platform, "zone_fares", itertools.chain(*history))
        # What came before is what the backfill is for.
        platform.registry.register_consumer(location.fare_totals.consumer, max_attempts=1, start="latest")
        location.charges.register(platform)
        for topic in (location.TIPS, location.TIP_TOTALS):
            platform.registry.register_topic(topic)
        location.tips.register(platform)
        location.tip_totals.register(platform)
        with platform.database.connection() as connection:
            connection.execute(location.CHARGED)
            connection.execute(location.TIPPED)
        dagster = LocalDagster(
            CodeLocation(Path(__file__).with_name("operated_location.py")),
            instance_home=write_instance(root, dsn),
            port=0,
            environment={
                "EVENTSQL_DSN": dsn,
                location.GATE_FILE: str(gate),
                location.SESSION_FILE: str(session),
                location.CARD_FILE: str(card),
                location.SPOILT_FILE: str(spoilt),
                location.ALERTS_FILE: str(alerts),
            },
        )
        with transferring(platform), dagster:
            dagster.start()
            with backfilling(dagster, dsn, root) as backfill:
                yield System(dagster, platform, alerts, gate, backfill, session, card, spoilt)
            gate.touch()
            session.touch()
    shutil.rmtree(root, ignore_errors=True)
