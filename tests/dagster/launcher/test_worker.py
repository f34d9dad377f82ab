"""The process of a run, as run monitoring and terminations find it."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from eventsql_orchestration.dagster.launcher.run_launcher import TERMINATE_TAG
from eventsql_orchestration.dagster.launcher.worker import Worker

LAUNCHER = {"run_launcher": {"module": "eventsql_orchestration.dagster", "class": "PreforkRunLauncher"}}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started
        started.kill()


def test_a_process_is_known_again_after_the_machine_got_another_name(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker.of("run", Worker.of_process("run", process.pid).tags())
    assert worker is not None
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert worker.is_here
    assert worker.is_alive()


def test_the_tag_of_a_process_is_hidden_and_the_tag_of_an_earlier_version_is_read(
    process: subprocess.Popen[bytes],
) -> None:
    worker = Worker.of_process("run", process.pid)
    ((tag, value),) = worker.tags().items()
    assert tag.startswith(".dagster/")
    assert Worker.of("run", {"eventsql/worker": value}) == worker


def test_a_launcher_that_has_launched_nothing_ends_the_runs_that_it_watches(process: subprocess.Popen[bytes]) -> None:
    """The daemon was restarted, and another machine wants to terminate an older run."""
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        run = create_run_for_test(instance, status=dg.DagsterRunStatus.STARTED)
        instance.add_run_tags(run.run_id, Worker.of_process(run.run_id, process.pid).tags())
        watched = instance.get_run_by_id(run.run_id)
        assert watched is not None
        assert instance.run_launcher.check_run_worker_health(watched).status.value == "RUNNING"
        instance.report_run_canceling(watched)
        instance.add_run_tags(run.run_id, {TERMINATE_TAG: run.run_id})
        assert process.wait(120) == -signal.SIGTERM
