"""Processes of forked runs that die: the rows of docs/dagster_failures.md that no other test here covers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import dagster as dg
import psutil
import pytest
from dagster._core.test_utils import create_run_for_test
from dagster._daemon.monitoring import execute_run_monitoring_iteration

from eventsql_orchestration.dagster.launcher import server
from eventsql_orchestration.dagster.launcher.worker import Worker
from tests.dagster.launcher.conftest import Deployment, deployed, write_location
from tests.waiting import ended, wait_until

SUCCESS, FAILURE, CANCELED = (dg.DagsterRunStatus(name) for name in ("SUCCESS", "FAILURE", "CANCELED"))
STARTING, STARTED = (dg.DagsterRunStatus(name) for name in ("STARTING", "STARTED"))

IN_SERVER: Final = "import sys, threading\nif any(word.endswith('launcher.server') for word in sys.orig_argv):\n    "

MONITORED: Final[dict[str, dict[str, Any]]] = {
    "run_coordinator": {"module": "dagster.core.run_coordinator", "class": "QueuedRunCoordinator"},
    "run_monitoring": {"enabled": True, "start_timeout_seconds": 1, "max_resume_run_attempts": 0},
}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose runs are monitored."""
    with deployed(tmp_path_factory.mktemp("monitored"), "first", config=MONITORED) as made:
        yield made


@pytest.fixture(scope="module")
def resuming() -> Iterator[dg.DagsterInstance]:
    """An instance whose run monitoring resumes runs."""
    launcher = {"module": "eventsql_orchestration.dagster", "class": "PreforkRunLauncher"}
    monitoring = {"enabled": True, "max_resume_run_attempts": 1}
    with dg.instance_for_test(overrides={"run_launcher": launcher, "run_monitoring": monitoring}) as made:
        yield made


def monitor(deployment: Deployment) -> None:
    """Look at every run once, as the daemon does each `poll_interval_seconds`."""
    list(execute_run_monitoring_iteration(deployment.workspace, logging.getLogger(__name__)))


@pytest.mark.nightly
def test_a_run_that_is_killed_while_it_is_canceled_is_reported_as_canceled(monitored: Deployment) -> None:
    run = monitored.waiting()
    worker = monitored.worker(run)
    os.kill(worker.pid, signal.SIGSTOP)
    assert monitored.launcher.terminate(run)
    os.kill(worker.pid, signal.SIGKILL)
    assert monitored.ended(run) is CANCELED


def test_the_death_of_a_run_is_reported_after_the_death_of_the_daemon(monitored: Deployment) -> None:
    run = monitored.waiting()
    process = psutil.Process(monitored.servers()[-1])
    # Close the other end of the channel, as the end of the daemon's process does.
    monitored.launcher._servers.slots.popitem()[1].server._channel.close()  # type: ignore[union-attr]
    os.kill(monitored.worker(run).pid, signal.SIGKILL)
    assert monitored.ended(run) is FAILURE
    wait_until(lambda: ended(process), "the end of the server")


def test_run_monitoring_reports_a_run_whose_process_never_began(monitored: Deployment) -> None:
    run = create_run_for_test(monitored.instance)
    monitored.instance.report_engine_event("", run)
    monitored.instance.report_dagster_event(
        dg.DagsterEvent(dg.DagsterEventType.PIPELINE_STARTING.value, run.job_name), run.run_id
    )

    def reported() -> bool:
        monitor(monitored)
        return monitored.run(run.run_id).is_finished

    wait_until(reported, "the report")
    assert monitored.run(run.run_id).status is FAILURE


def test_the_next_daemon_reports_the_runs_that_ended_with_the_container_of_the_last_one(monitored: Deployment) -> None:
    run = create_run_for_test(monitored.instance, status=STARTED)
    worker = replace(Worker.of_process(run.run_id, os.getpid()), processes="of another container")
    monitored.instance.add_run_tags(run.run_id, worker.tags())
    monitor(monitored)
    assert monitored.run(run.run_id).status is FAILURE


@pytest.mark.nightly
def test_a_server_leaves_a_killed_run_to_run_monitoring_if_that_resumes_runs(tmp_path: Path) -> None:
    monitoring = {**MONITORED["run_monitoring"], "max_resume_run_attempts": 1}
    with deployed(tmp_path, "first", config={**MONITORED, "run_monitoring": monitoring}) as deployment:
        run = deployment.waiting()
        os.kill(deployment.worker(run).pid, signal.SIGKILL)
        wait_until(lambda: any("SIGKILL" in message for message in deployment.said(run)), "the report of the death")
        assert deployment.run(run).status is STARTED
        deployment.go()

        def resumed() -> bool:
            monitor(deployment)
            return deployment.run(run).is_finished

        wait_until(resumed, "the end of the resumed run")
        assert deployment.run(run).status is SUCCESS


@pytest.mark.parametrize(
    ("before", "other", "after"),
    [
        (STARTED, {}, STARTED),
        # Run monitoring resumes no run that has not started.
        (STARTING, {}, FAILURE),
        (STARTING, {"processes": "of another machine"}, STARTING),
        (STARTING, {"pid": 0}, STARTING),
    ],
)
def test_a_server_reports_the_death_of_a_run_that_no_other_process_executes_or_will_resume(
    resuming: dg.DagsterInstance, before: dg.DagsterRunStatus, other: dict[str, Any], after: dg.DagsterRunStatus
) -> None:
    run = create_run_for_test(resuming, status=before).run_id
    dead = Worker.of_process(run, os.getpid())
    resuming.add_run_tags(run, replace(dead, **other).tags())
    server._report_crash(resuming.get_ref(), server._Death(run, dead.pid, -signal.SIGKILL))
    reported = resuming.get_run_by_id(run)
    assert reported is not None
    assert reported.status is after


@pytest.mark.nightly
def test_a_run_is_terminated_from_the_ui(deployment: Deployment) -> None:
    from dagster_graphql.schema import create_schema

    run = deployment.waiting()
    result = create_schema().execute(
        "mutation ($run: String!) { terminateRun(runId: $run) { __typename } }",
        variable_values={"run": run}, context_value=deployment.workspace.create_request_context(),
    )  # fmt: skip
    assert result.data == {"terminateRun": {"__typename": "TerminateRunSuccess"}}
    assert deployment.ended(run) is CANCELED


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("then", "reason", "timeout"),
    [
        pytest.param("raise ValueError('no licence')", "no licence", 120, id="fails"),
        pytest.param("threading.Event().wait()", "was not imported within", 1, id="hangs"),
    ],
)
def test_runs_of_a_location_whose_import_by_the_server(tmp_path: Path, then: str, reason: str, timeout: int) -> None:
    with deployed(tmp_path, "first", before=IN_SERVER + then, import_timeout_seconds=timeout) as deployment:
        runs = [deployment.launch() for _ in range(2)]
        assert [deployment.ended(run) for run in runs] == [SUCCESS, SUCCESS]
        assert [sum(reason in message for message in deployment.said(run)) for run in runs] == [1, 0]


@pytest.mark.nightly
def test_each_run_executes_once_while_its_location_is_replaced_and_new_runs_have_the_new_code(
    tmp_path: Path,
) -> None:
    with deployed(tmp_path, "first") as deployment, ThreadPoolExecutor(3) as threads:
        assert deployment.ended(deployment.launch()) is SUCCESS
        during = []
        for version in ("2", "3"):
            during += [threads.submit(deployment.launch) for _ in range(4)]
            write_location(tmp_path, "first", version=version)
            during += [threads.submit(deployment.launch) for _ in range(4)]
            deployment.workspace.reload_code_location("first")
        after = [threads.submit(deployment.launch) for _ in range(4)]

        for run in (*during, *after):
            assert deployment.ended(run.result()) is SUCCESS
            starts = deployment.instance.all_logs(run.result(), of_type=dg.DagsterEventType.RUN_START)
            assert len(starts) == 1
        assert {deployment.seen(run.result())[2] for run in after} == {"3"}
