"""The process of a run, as run monitoring and terminations find it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from eventsql_orchestration.dagster.launcher.dagster_internals import GRPC_INFO_TAG
from eventsql_orchestration.dagster.launcher.run_launcher import TERMINATE_TAG, PreforkRunLauncher
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


def test_no_other_process_and_no_other_run_is_taken_for_the_one_in_the_tag(process: subprocess.Popen[bytes]) -> None:
    worker = Worker.of_process("run", process.pid)
    assert Worker.of("another run", worker.tags()) is None
    assert worker.started != Worker.of_process("run", os.getpid()).started
    # The system has given the number to another process since.
    former = replace(worker, started="0")
    assert not former.is_alive()
    assert not former.interrupt()


def test_a_process_that_has_ended_is_not_alive_before_its_parent_asks(process: subprocess.Popen[bytes]) -> None:
    worker = Worker.of_process("run", process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not worker.is_alive()


def test_a_program_may_have_any_name(tmp_path: Path) -> None:
    program = tmp_path / "a) Z b"
    program.symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen(["sleep", "600"], executable=program) as process:
        worker = Worker.of_process("run", process.pid)
        alive = worker.is_alive()
        process.kill()
    assert worker.started.isdecimal()
    assert alive


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
        others = watching()
        for _ in range(2):
            assert instance.run_launcher.check_run_worker_health(watched).status.value == "RUNNING"
        assert len(watching() - others) == 1
        instance.report_run_canceling(watched)
        instance.add_run_tags(run.run_id, {TERMINATE_TAG: run.run_id})
        assert process.wait(120) == -signal.SIGTERM


def watching() -> set[threading.Thread]:
    """The threads of launchers."""
    return {thread for thread in threading.enumerate() if thread.name == "eventsql-launcher"}


def test_a_launcher_ends_runs_again_after_the_storage_was_away(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        run = create_run_for_test(instance, status=dg.DagsterRunStatus.CANCELING)
        worker = Worker.of_process(run.run_id, process.pid)
        instance.add_run_tags(run.run_id, {TERMINATE_TAG: run.run_id, **worker.tags()})
        look, away = PreforkRunLauncher._end_terminated_runs, [OSError("the storage is away")]

        def look_later(launcher: PreforkRunLauncher, ended: set[str]) -> set[str]:
            if away:
                raise away.pop()
            return look(launcher, ended)

        monkeypatch.setattr(PreforkRunLauncher, "_end_terminated_runs", look_later)
        instance.run_launcher.check_run_worker_health(run)
        assert process.wait(120) == -signal.SIGTERM
        assert not away


def test_a_launcher_ends_no_other_run_than_one_of_this_machine_whose_own_tag_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Worker, "interrupt", lambda worker: asked.append(worker.run))
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, PreforkRunLauncher)
        not_asked, copied, elsewhere = (
            create_run_for_test(instance, status=dg.DagsterRunStatus.CANCELING).run_id for _ in range(3)
        )
        instance.add_run_tags(not_asked, Worker.of_process(not_asked, os.getpid()).tags())
        # Dagster copies the tags of a run to its re-execution.
        instance.add_run_tags(copied, {TERMINATE_TAG: not_asked, **Worker.of_process(copied, os.getpid()).tags()})
        worker = replace(Worker.of_process(elsewhere, os.getpid()), processes="of another machine")
        instance.add_run_tags(elsewhere, {TERMINATE_TAG: elsewhere, **worker.tags()})
        assert launcher._end_terminated_runs(set()) == set()
    assert asked == []


def test_a_process_that_may_not_be_ended_keeps_no_other_run_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    def refuse(worker: Worker) -> bool:
        asked.add(worker.run)
        raise PermissionError

    monkeypatch.setattr(Worker, "interrupt", refuse)
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, PreforkRunLauncher)
        runs = {create_run_for_test(instance, status=dg.DagsterRunStatus.CANCELING).run_id for _ in range(2)}
        for run in runs:
            instance.add_run_tags(run, {TERMINATE_TAG: run, **Worker.of_process(run, os.getpid()).tags()})
        assert launcher._end_terminated_runs(set()) == asked == runs


def test_a_forked_re_execution_of_a_run_of_dagsters_launcher_is_terminated(process: subprocess.Popen[bytes]) -> None:
    """Dagster copies its launcher's tag to the re-execution."""
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        run = create_run_for_test(instance, status=dg.DagsterRunStatus.STARTED)
        worker = Worker.of_process(run.run_id, process.pid)
        instance.add_run_tags(run.run_id, {GRPC_INFO_TAG: "{}", **worker.tags()})
        assert instance.run_launcher.terminate(run.run_id)
        assert process.wait(120) == -signal.SIGTERM


def test_a_run_is_asked_to_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt would break off what the run does to end."""
    asked: list[int] = []
    monkeypatch.setattr(Worker, "interrupt", lambda worker: asked.append(worker.pid))
    with dg.instance_for_test(overrides=LAUNCHER) as instance:
        launcher = instance.run_launcher
        assert isinstance(launcher, PreforkRunLauncher)
        run = create_run_for_test(instance, status=dg.DagsterRunStatus.CANCELING)
        worker = Worker.of_process(run.run_id, os.getpid())
        instance.add_run_tags(run.run_id, {TERMINATE_TAG: run.run_id, **worker.tags()})
        ended = launcher._end_terminated_runs(set())
        assert launcher._end_terminated_runs(ended) == ended == {run.run_id}
        assert asked == [os.getpid()]
        instance.report_run_canceled(run)
        assert launcher._end_terminated_runs(ended) == set()


def test_a_run_on_another_machine_is_alive_for_a_launcher_without_a_queue() -> None:
    """Each machine launches runs, and none takes over from another."""
    immediate = {"run_coordinator": {"module": "dagster.core.run_coordinator", "class": "DefaultRunCoordinator"}}
    with dg.instance_for_test(overrides={**LAUNCHER, **immediate}) as instance:
        run = create_run_for_test(instance, status=dg.DagsterRunStatus.STARTED)
        worker = replace(Worker.of_process(run.run_id, os.getpid()), processes="of another machine")
        instance.add_run_tags(run.run_id, worker.tags())
        watched = instance.get_run_by_id(run.run_id)
        assert watched is not None
        assert instance.run_launcher.check_run_worker_health(watched).status.value == "RUNNING"
