"""A fork server by itself: locations that it refuses, its limit, and its death between a fork and the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.code_pointer import FileCodePointer, ModuleCodePointer

from eventsql_orchestration.dagster.launcher import server as fork_server
from eventsql_orchestration.dagster.launcher import server_process
from eventsql_orchestration.dagster.launcher.dagster_internals import RepositoryPythonOrigin
from eventsql_orchestration.dagster.launcher.server_process import (
    MachineBusyError,
    ReplacedError,
    ServerProcess,
    Unforkable,
    _environment,
    obstacle_here,
)
from eventsql_orchestration.dagster.launcher.worker import Worker
from tests.dagster.launcher import busy_server, killed_server
from tests.dagster.launcher.conftest import Deployment
from tests.waiting import wait_until

NATIVE_THREAD = """
import ctypes
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
"""

REFUSED = {
    "opens a socket": ("import socket\nKEPT = socket.socket()", "sockets", 120),
    "has a thread of a native library": (NATIVE_THREAD, "a native library that it imports keeps 1 threads", 120),
    "fails": ("raise ValueError('no licence')", "no licence", 120),
    "hangs": ("import threading\nthreading.Event().wait()", "within 1 s", 1),
    "dies": ("import os\nos._exit(7)", "exit code 7", 120),
    "is killed": ("import os\nos.kill(os.getpid(), 9)", "was killed by SIGKILL", 120),
}


@pytest.mark.parametrize(
    ("before", "reason", "timeout"),
    [pytest.param(*REFUSED[way], id=way, marks=[pytest.mark.nightly] if way == "dies" else []) for way in REFUSED],
)
def test_a_server_refuses_a_location_that(
    tmp_path: Path, shared_instance: dg.DagsterInstance, before: str, reason: str, timeout: int
) -> None:
    origin = _origin(tmp_path, before)
    with pytest.raises(Unforkable) as refused:
        ServerProcess("refused", origin, shared_instance.get_ref(), max_runs=5, timeout=timeout)
    assert reason in str(refused.value)


@pytest.mark.nightly
def test_a_location_with_a_library_that_ends_its_threads_before_a_fork_is_served(
    tmp_path: Path, shared_instance: dg.DagsterInstance
) -> None:
    origin = _origin(tmp_path, "import numpy")
    server = ServerProcess("numeric", origin, shared_instance.get_ref(), max_runs=5, timeout=120)
    _close(server)


def test_a_new_file_of_variables_is_a_change_of_a_location(tmp_path: Path, shared_instance: dg.DagsterInstance) -> None:
    server = ServerProcess("first", _origin(tmp_path, ""), shared_instance.get_ref(), max_runs=5, timeout=120)
    (tmp_path / ".env").write_text("NEW=1\n")
    with pytest.raises(ReplacedError, match=r"\.env has changed"):
        server.launch("a run", resume=False)
    _close(server)


def test_a_location_whose_program_is_not_on_this_machine_is_refused(
    tmp_path: Path, shared_instance: dg.DagsterInstance
) -> None:
    origin = _origin(tmp_path, "")._replace(executable_path=str(tmp_path / "python"))
    with pytest.raises(Unforkable):
        ServerProcess("elsewhere", origin, shared_instance.get_ref(), max_runs=5, timeout=120)


@pytest.mark.parametrize(
    ("own", "image", "remote", "same_code", "forked"),
    [
        ("", None, False, False, True),
        ("", None, True, False, False),
        ("", None, True, True, True),
        ("one", None, True, False, False),
        ("", "one", True, False, False),
        ("one", "one", True, False, True),
        ("one", "two", True, True, False),
        ("one", "two", False, False, False),
    ],
)
def test_runs_are_forked_only_if_this_machine_surely_has_the_code_of_the_code_server(
    monkeypatch: pytest.MonkeyPatch, *, own: str, image: str | None, remote: bool, same_code: bool, forked: bool
) -> None:
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", own)
    origin = RepositoryPythonOrigin(sys.executable, ModuleCodePointer("module", "defs", None), image)
    assert (obstacle_here(origin, remote=remote, same_code=same_code) is None) == forked


def test_the_programs_of_a_virtual_environment_come_first(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    python = str(tmp_path / "bin" / "python")
    assert _environment(python)["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")
    assert _environment(sys.executable) == dict(os.environ)


def _origin(directory: Path, before: str) -> RepositoryPythonOrigin:
    file = directory / "refused_definitions.py"
    file.write_text(f"{before}\nimport dagster as dg\ndefs = dg.Definitions()\n")
    return RepositoryPythonOrigin(sys.executable, FileCodePointer(str(file), "defs", str(directory)))


def _other(deployment: Deployment, run: str, server: ModuleType, program: Path) -> ServerProcess:
    """A server of a run's location that executes another module as its program, through the file `program`."""
    program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {server.__file__} "$@"\n')
    program.chmod(0o700)
    return _server(deployment, run, program=str(program))


def _server(deployment: Deployment, run: str, *, program: str = sys.executable) -> ServerProcess:
    """A server of the location of a run."""
    origin = deployment.run(run).job_code_origin
    assert origin is not None
    return ServerProcess(
        "first", origin.repository_origin._replace(executable_path=program), deployment.instance.get_ref(),
        max_runs=5, timeout=120,
    )  # fmt: skip


def _close(server: ServerProcess) -> None:
    server.close()
    wait_until(server.has_ended, "the end of the server")


@pytest.mark.nightly
def test_a_launch_under_way_has_its_answer_before_the_server_is_closed(deployment: Deployment) -> None:
    """A reload of the location closes the server; without the answer, the run would be launched twice."""
    run = deployment.create()
    server = _server(deployment, run)
    os.kill(server.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        launching = threads.submit(server.launch, run, resume=False)
        wait_until(server._lock.locked, "the request")
        closing = threads.submit(server.close)
        wait_until(lambda: closing.running() or closing.done(), "the attempt to close")
        os.kill(server.pid, signal.SIGCONT)
        assert launching.result() > 0
        closing.result()
    assert deployment.ended(run) is dg.DagsterRunStatus.SUCCESS
    wait_until(server.has_ended, "the end of the server")


@pytest.mark.nightly
def test_a_launch_does_not_wait_for_the_runs_of_a_server_that_is_ending(deployment: Deployment) -> None:
    runs = [deployment.create(then) for then in ("wait", "")]
    server = _server(deployment, runs[0])
    server.launch(runs[0], resume=False)
    server.close()
    with pytest.raises(ReplacedError) as gone:
        server.launch(runs[1], resume=False)
    assert "told to end" in str(gone.value)
    deployment.go()
    assert deployment.ended(runs[0]) is dg.DagsterRunStatus.SUCCESS
    wait_until(server.has_ended, "the end of the server")


@pytest.mark.nightly
def test_if_the_system_refuses_a_process_the_queue_tries_again_and_a_report_is_made_later(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "refusing"
    monkeypatch.setenv("REFUSING", str(refusing))
    run = deployment.create("wait")
    server = _other(deployment, run, busy_server, tmp_path / "python")
    refusing.touch()
    with pytest.raises(MachineBusyError):
        server.launch(run, resume=False)
    refusing.unlink()
    child = server.launch(run, resume=False)
    wait_until((deployment.root / "first" / run).exists, "the step of the run")

    refusing.touch()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(child), "the server to take note of the end")
    assert not deployment.run(run).is_finished
    refusing.unlink()
    assert deployment.ended(run) is dg.DagsterRunStatus.FAILURE
    _close(server)


def test_a_server_that_does_not_answer_is_killed_so_that_it_cannot_launch_the_run_later(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployment.create()
    server = _server(deployment, run)
    monkeypatch.setattr(server_process, "_ANSWER_TIMEOUT", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ReplacedError, match="did not answer"):
        server.launch(run, resume=False)
    wait_until(server.has_ended, "the end of the server")
    server.close()


def test_a_server_that_dies_before_its_answer_leaves_no_process_of_the_run(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployment.create()
    (tmp_path / "window").write_text("before the answer")
    monkeypatch.setenv("KILLED", str(tmp_path / "window"))
    server = _other(deployment, run, killed_server, tmp_path / "python")
    with pytest.raises(ReplacedError, match="its server was killed by SIG"):
        server.launch(run, resume=False)
    wait_until(server.has_ended, "the end of the server")
    server.close()
    deployment.instance.launch_run(run, deployment.workspace.create_request_context())
    assert deployment.ended(run) is dg.DagsterRunStatus.SUCCESS
    starts = deployment.instance.all_logs(run, of_type=dg.DagsterEventType.RUN_START)
    assert len(starts) == 1


@dataclass
class Killable:
    """A server that dies, or whose child dies, at the window that a file names."""

    server: ServerProcess
    window: Path


@pytest.fixture(scope="module")
def killable(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    """One server for three tests. The last of them kills it."""
    directory = tmp_path_factory.mktemp("killable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILLED", str(directory / "window"))
        server = _other(deployment, deployment.create(), killed_server, directory / "python")
    yield Killable(server, directory / "window")
    _close(server)


def test_a_second_process_of_a_run_leaves_it_to_the_first(deployment: Deployment, killable: Killable) -> None:
    run = deployment.create()
    first = Worker.of_process(run, os.getpid())
    deployment.instance.add_run_tags(run, first.tags())
    # Before its second answer, the server has begun the report of the first child's end, if there is one.
    for _ in range(2):
        child = killable.server.launch(run, resume=False)
        wait_until(lambda pid=child: not psutil.pid_exists(pid), "the end of the child")  # type: ignore[misc]  # bound
    wait_until(lambda: not psutil.Process(killable.server.pid).children(), "the end of a report")
    assert deployment.run(run).status is dg.DagsterRunStatus.NOT_STARTED
    assert deployment.worker(run) == first
    assert not (deployment.root / "first" / run).exists()


def test_the_death_of_a_second_process_of_a_run_is_not_reported_as_the_death_of_the_run(
    deployment: Deployment, killable: Killable
) -> None:
    run = deployment.create()
    deployment.instance.add_run_tags(run, Worker.of_process(run, os.getpid()).tags())
    killable.window.write_text("the child")
    killable.server.launch(run, resume=False)
    killable.window.unlink()
    # Before its next answer, the server has begun the report.
    assert killable.server.launch(run, resume=False)
    wait_until(lambda: not psutil.Process(killable.server.pid).children(), "the end of the report")
    assert deployment.run(run).status is dg.DagsterRunStatus.NOT_STARTED


@pytest.mark.parametrize(
    ("other", "left"),
    [({}, True), ({"started": "0"}, False), ({"processes": "of another machine"}, False), ({"pid": 0}, False)],
)
def test_a_run_is_left_to_a_process_of_this_machine_that_is_alive(*, other: dict[str, Any], left: bool) -> None:
    executing = replace(Worker.of_process("run", os.getppid()), **other)
    run = dg.DagsterRun(job_name="job", run_id="run", tags=executing.tags())
    assert fork_server._has_other_process(run, Worker.of_process("run", os.getpid())) == left
    # A launcher writes the tag of a resumed run before the process begins.
    assert not fork_server._has_other_process(run, executing)


def test_the_death_of_a_process_that_has_not_begun_is_reported_and_its_server_goes_on(
    deployment: Deployment, killable: Killable
) -> None:
    run = deployment.create()
    killable.window.write_text("the child")
    killable.server.launch(run, resume=False)
    assert deployment.ended(run) is dg.DagsterRunStatus.FAILURE
    assert not killable.server.has_ended()


def test_a_server_that_dies_after_its_answer_leaves_a_run_that_has_not_begun(
    deployment: Deployment, killable: Killable
) -> None:
    run = deployment.create()
    killable.window.write_text("after the answer")
    child = killable.server.launch(run, resume=False)
    worker = Worker.of_process(run, child)
    wait_until(lambda: not worker.is_alive(), "the end of the child")
    # Run monitoring reports it after `start_timeout_seconds`.
    assert deployment.run(run).status is dg.DagsterRunStatus.NOT_STARTED
    assert not (deployment.root / "first" / run).exists()


@pytest.mark.nightly
def test_a_run_starts_even_if_its_launcher_dies_before_it_has_the_answer(deployment: Deployment) -> None:
    run = deployment.create()
    server = _server(deployment, run)
    server._channel.send(run=run, resume=False)
    server.close()
    assert deployment.ended(run) is dg.DagsterRunStatus.SUCCESS
    wait_until(server.has_ended, "the end of the server")
    assert os.getpid() != deployment.seen(run)[0]
