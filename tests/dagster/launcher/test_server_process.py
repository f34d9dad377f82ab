"""A fork server by itself: locations that it refuses, its limit, and its death between a fork and the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.code_pointer import FileCodePointer

from eventsql_orchestration.dagster.launcher.dagster_internals import RepositoryPythonOrigin
from eventsql_orchestration.dagster.launcher.server_process import (
    ServerGoneError,
    ServerProcess,
    TooManyRunsError,
    Unforkable,
)
from tests.dagster.conftest import await_
from tests.dagster.launcher import killed_server
from tests.dagster.launcher.conftest import Deployment

REFUSED = {
    "opens a socket": ("import socket\nKEPT = socket.socket()", "sockets", 120),
    "fails": ("raise ValueError('no licence')", "no licence", 120),
    "hangs": ("import threading\nthreading.Event().wait()", "within 1 s", 1),
    "dies": ("import os\nos._exit(7)", "exit code 7", 120),
}


@pytest.mark.parametrize(("before", "reason", "timeout"), REFUSED.values(), ids=REFUSED)
def test_a_server_refuses_a_location_that(tmp_path: Path, before: str, reason: str, timeout: int) -> None:
    origin = _origin(tmp_path, before)
    with dg.instance_for_test() as instance, pytest.raises(Unforkable) as refused:
        ServerProcess("refused", origin, instance.get_ref(), max_runs=5, timeout=timeout)
    assert reason in refused.value.reason


def test_a_location_with_a_library_that_ends_its_threads_before_a_fork_is_served(tmp_path: Path) -> None:
    origin = _origin(tmp_path, "import numpy")
    with dg.instance_for_test() as instance:
        server = ServerProcess("numeric", origin, instance.get_ref(), max_runs=5, timeout=120)
        server.close()
        await_(server.has_ended, "the end of the server")


def test_a_location_whose_program_is_not_on_this_machine_is_refused(tmp_path: Path) -> None:
    origin = _origin(tmp_path, "")._replace(executable_path=str(tmp_path / "python"))
    with dg.instance_for_test() as instance, pytest.raises(Unforkable):
        ServerProcess("elsewhere", origin, instance.get_ref(), max_runs=5, timeout=120)


def test_a_launch_beyond_the_limit_of_runs_is_refused_so_that_the_queue_tries_again(deployment: Deployment) -> None:
    runs = [deployment.create(then) for then in ("wait", "")]
    origin = deployment.run(runs[0]).job_code_origin
    assert origin is not None
    server = ServerProcess("first", origin.repository_origin, deployment.instance.get_ref(), max_runs=1, timeout=120)
    server.launch(runs[0], resume=False)
    with pytest.raises(TooManyRunsError) as refused:
        server.launch(runs[1], resume=False)
    assert refused.value.limit == 1
    deployment.go()
    assert deployment.ended(runs[0]) is dg.DagsterRunStatus.SUCCESS
    server.close()
    await_(server.has_ended, "the end of the server")


def _origin(directory: Path, before: str) -> RepositoryPythonOrigin:
    file = directory / "refused_definitions.py"
    file.write_text(f"{before}\nimport dagster as dg\ndefs = dg.Definitions()\n")
    return RepositoryPythonOrigin(sys.executable, FileCodePointer(str(file), "defs", str(directory)))


def _killed(deployment: Deployment, run: str, program: Path) -> ServerProcess:
    """A server of the location of a run, started by `program`."""
    program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {killed_server.__file__} "$@"\n')
    program.chmod(0o700)
    origin = deployment.run(run).job_code_origin
    assert origin is not None
    return ServerProcess(
        "first", origin.repository_origin._replace(executable_path=str(program)), deployment.instance.get_ref(),
        max_runs=5, timeout=120,
    )  # fmt: skip


def test_a_server_that_dies_before_its_answer_leaves_no_process_of_the_run(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployment.create()
    monkeypatch.setenv("KILLED", "before the answer")
    server = _killed(deployment, run, tmp_path / "python")
    with pytest.raises(ServerGoneError):
        server.launch(run, resume=False)
    await_(server.has_ended, "the end of the server")
    server.close()
    deployment.instance.launch_run(run, deployment.workspace.create_request_context())
    assert deployment.ended(run) is dg.DagsterRunStatus.SUCCESS
    starts = deployment.instance.all_logs(run, of_type=dg.DagsterEventType.RUN_START)
    assert len(starts) == 1


def test_a_server_that_dies_after_its_answer_leaves_a_run_that_its_process_has_not_begun(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployment.create()
    monkeypatch.setenv("KILLED", "after the answer")
    server = _killed(deployment, run, tmp_path / "python")
    child = server.launch(run, resume=False)
    await_(lambda: not Path(f"/proc/{child}").exists(), "the end of the child")
    await_(server.has_ended, "the end of the server")
    server.close()
    # Run monitoring reports it after `start_timeout_seconds`.
    assert deployment.run(run).status is dg.DagsterRunStatus.NOT_STARTED
    assert not (deployment.root / "first" / run).exists()


def test_a_run_starts_even_if_its_launcher_dies_before_it_has_the_answer(deployment: Deployment) -> None:
    run = deployment.create()
    origin = deployment.run(run).job_code_origin
    assert origin is not None
    server = ServerProcess("first", origin.repository_origin, deployment.instance.get_ref(), max_runs=5, timeout=120)
    server._channel.send(run=run, resume=False)
    server.close()
    assert deployment.ended(run) is dg.DagsterRunStatus.SUCCESS
    await_(server.has_ended, "the end of the server")
    assert os.getpid() != deployment.seen(run)[0]
