"""Runs that are forked from a process that has loaded their location."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import dagster as dg
import psutil
import pytest
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher import run_launcher
from eventsql_orchestration.dagster.launcher.dagster_internals import LaunchRunContext, ResumeRunContext
from eventsql_orchestration.dagster.launcher.run_launcher import TERMINATE_TAG, LauncherClosedError, PreforkRunLauncher
from eventsql_orchestration.dagster.launcher.server_process import ReplacedError, ServerProcess
from eventsql_orchestration.dagster.launcher.worker import Worker
from tests.dagster.launcher.conftest import Deployment, deployed, descriptors, write_location
from tests.waiting import PATIENCE, ended, wait_until

SUCCESS, FAILURE, CANCELED = (dg.DagsterRunStatus(name) for name in ("SUCCESS", "FAILURE", "CANCELED"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of the locations `first` and `second`, for all tests of this module."""
    with deployed(tmp_path_factory.mktemp("deployment"), "first", "second") as made:
        yield made


def test_each_run_is_a_process_forked_from_the_process_that_imported_the_location(
    deployment: Deployment,
) -> None:
    runs = [deployment.launch() for _ in range(2)]
    assert [deployment.ended(run) for run in runs] == [SUCCESS, SUCCESS]
    seen = [deployment.seen(run) for run in runs]
    assert len({pid for pid, *_ in seen}) == 2
    assert {parent for _, parent, *_ in seen} == {deployment.servers()[-1]}


@pytest.mark.nightly
def test_a_run_has_the_step_processes_of_the_multiprocess_executor(deployment: Deployment) -> None:
    run = deployment.launch(job="in_processes")
    assert deployment.ended(run) is SUCCESS
    assert deployment.seen(run)[0] != deployment.worker(run).pid


def test_a_failing_step_fails_the_run_and_not_its_process(deployment: Deployment) -> None:
    run = deployment.launch("fail")
    assert deployment.ended(run) is FAILURE
    assert not any("Run execution process" in message for message in deployment.said(run))


@pytest.mark.parametrize(("then", "named"), [("die", "SIGKILL"), ("exit", "code 3"), ("leave", "code 0")])
def test_the_log_of_a_run_whose_process_dies_names_the_signal_or_exit_code(
    deployment: Deployment, then: str, named: str
) -> None:
    run = deployment.launch(then)
    assert deployment.ended(run) is FAILURE
    assert any(named in message for message in deployment.said(run))


@pytest.mark.parametrize("other", [False, True], ids=["its own launcher", "the launcher of another process"])
def test_a_terminated_run_is_canceled_and_its_process_ends(deployment: Deployment, other: bool) -> None:
    run = deployment.waiting()
    with dg.DagsterInstance.from_ref(deployment.instance.get_ref()) as instance:
        launcher = instance.run_launcher if other else deployment.launcher
        assert launcher.terminate(run)
        assert deployment.ended(run) is CANCELED
        wait_until(lambda: not deployment.worker(run).is_alive(), "the end of the process")
        assert not launcher.terminate(run)
        assert deployment.run(run).status is CANCELED


def test_a_run_that_is_canceled_before_its_process_begins_is_reported_as_canceled(deployment: Deployment) -> None:
    run = deployment.create()
    deployment.instance.report_run_canceling(deployment.run(run))
    workspace = deployment.workspace.create_request_context()
    deployment.launcher.launch_run(LaunchRunContext(deployment.run(run), workspace))
    assert deployment.ended(run) is CANCELED
    assert not (deployment.root / "first" / run).exists()


def test_a_launcher_whose_instance_is_closed_refuses_a_launch(deployment: Deployment) -> None:
    run = deployment.create()
    workspace = deployment.workspace.create_request_context()
    servers = deployment.servers()
    with dg.DagsterInstance.from_ref(deployment.instance.get_ref()) as instance:
        launcher = instance.run_launcher
        launcher.dispose()
        with pytest.raises(LauncherClosedError):
            launcher.launch_run(LaunchRunContext(deployment.run(run), workspace))
    assert deployment.servers() == servers


def test_a_launcher_waits_for_servers_that_ended_at_once() -> None:
    launcher = PreforkRunLauncher()
    # One that ends looks whether the former ones have ended.
    first, *others = servers = [Mock(ServerProcess, pid=number) for number in range(3)]
    slots = [run_launcher._Slot(threading.Lock(), "first", server) for server in servers]

    def end_others() -> None:
        for slot in slots[1:]:
            launcher._end(slot, "the location was reloaded")

    ending = threading.Thread(target=end_others)

    def look() -> bool:
        first.has_ended.side_effect = None
        ending.start()
        wait_until(lambda: not ending.is_alive() or launcher._servers.lock.locked(), "the others, or that they wait")
        return False

    first.has_ended.side_effect = look
    first.has_ended.return_value = False
    for other in others:
        other.has_ended.return_value = False
    launcher._end(slots[0], "the location was reloaded")
    ending.join()
    assert launcher._servers.ending == servers


def test_the_servers_of_an_instance_that_is_dropped_without_being_closed_end(tmp_path: Path) -> None:
    """Its runs go on, and so do the servers of another instance of the same storage."""
    # Other tests take the last server of a deployment to be alive.
    with deployed(tmp_path, "first") as deployment:
        others = deployment.waiting()
        run = deployment.create("wait")
        workspace = deployment.workspace.create_request_context()
        instance = dg.DagsterInstance.from_ref(deployment.instance.get_ref())
        launcher = instance.run_launcher
        assert isinstance(launcher, PreforkRunLauncher)
        launcher.launch_run(LaunchRunContext(deployment.run(run), workspace))
        wait_until((deployment.root / "first" / run).exists, "the step of the run")
        kept, dropped = deployment.servers()
        server, watch = psutil.Process(dropped), launcher._servers.watch
        assert watch is not None
        del instance
        gc.collect()
        wait_until(lambda: not watch.is_alive(), "the end of the launcher's thread")

        following = deployment.launch()
        assert deployment.ended(following) is SUCCESS
        assert deployment.seen(following)[1] == kept
        assert not deployment.run(run).is_finished
        deployment.go()
        assert [deployment.ended(each) for each in (run, others)] == [SUCCESS, SUCCESS]
        wait_until(lambda: ended(server), "the end of the server")


def test_a_process_of_another_machine_ends_a_run_through_the_launcher_that_forked_it(deployment: Deployment) -> None:
    run = deployment.waiting()
    deployment.instance.report_run_canceling(deployment.run(run))
    deployment.instance.add_run_tags(run, {TERMINATE_TAG: run})
    assert deployment.ended(run) is CANCELED


def test_a_process_of_another_user_ends_a_run_through_the_launcher_that_forked_it(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Worker.interrupt

    def refused_here(worker: Worker) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise PermissionError
        return interrupt(worker)

    monkeypatch.setattr(Worker, "interrupt", refused_here)
    run = deployment.waiting()
    assert deployment.launcher.terminate(run)
    assert deployment.ended(run) is CANCELED


def test_a_run_goes_on_when_the_server_is_killed_and_the_next_run_has_a_new_server(deployment: Deployment) -> None:
    run = deployment.waiting()
    killed = deployment.servers()[-1]
    os.kill(killed, signal.SIGKILL)
    following = deployment.launch()
    assert deployment.ended(following) is SUCCESS
    assert deployment.seen(following)[1] == deployment.servers()[-1] != killed
    assert any("SIGKILL" in message for message in deployment.said(following))
    assert deployment.launcher.check_run_worker_health(deployment.run(run)).status.value == "RUNNING"
    deployment.go()
    assert deployment.ended(run) is SUCCESS


def test_a_launch_that_sees_a_dead_server_late_leaves_its_successor_alone(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deployment.ended(deployment.launch()) is SUCCESS
    killed = deployment.servers()[-1]
    launch, between = ServerProcess.launch, []

    def launch_late(server: ServerProcess, run_id: str, *, resume: bool) -> int:
        try:
            return launch(server, run_id, resume=resume)
        except ReplacedError:
            monkeypatch.setattr(ServerProcess, "launch", launch)
            between.append(deployment.launch())
            raise

    monkeypatch.setattr(ServerProcess, "launch", launch_late)
    os.kill(killed, signal.SIGKILL)
    runs = [deployment.launch(), *between]
    assert [deployment.ended(run) for run in runs] == [SUCCESS, SUCCESS]
    assert [deployment.seen(run)[1] for run in runs] == [deployment.servers()[-1]] * 2
    assert deployment.servers()[-2] == killed


def test_the_new_process_of_a_resumed_run_is_known_before_it_begins(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = deployment.create()
    dead = replace(Worker.of_process(run, os.getpid()), started="0")
    deployment.instance.add_run_tags(run, dead.tags())
    # The process does not begin.
    monkeypatch.setattr(ServerProcess, "launch", lambda *_, **__: os.getpid())
    workspace = deployment.workspace.create_request_context()
    deployment.launcher.resume_run(ResumeRunContext(deployment.run(run), workspace, 1))
    assert deployment.worker(run) == Worker.of_process(run, os.getpid())


@pytest.mark.nightly
def test_a_run_is_resumed_in_a_new_process(deployment: Deployment) -> None:
    run = deployment.waiting()
    worker = deployment.worker(run)
    os.kill(deployment.servers()[-1], signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    deployment.go()
    deployment.instance.resume_run(run, deployment.workspace.create_request_context(), 1)
    # Run monitoring may look before the process has begun.
    assert deployment.worker(run) != worker
    assert deployment.ended(run) is SUCCESS


def test_a_run_after_a_change_of_a_file_executes_the_new_code(deployment: Deployment) -> None:
    before = deployment.waiting()
    write_location(deployment.root, "first", version="2")
    after = deployment.launch()
    assert deployment.ended(after) is SUCCESS
    assert deployment.seen(after)[2] == "2"
    assert any("has changed" in message for message in deployment.said(after))
    deployment.go()
    assert deployment.ended(before) is SUCCESS


def test_a_reload_of_the_location_replaces_the_server(deployment: Deployment) -> None:
    assert deployment.ended(deployment.launch()) is SUCCESS
    before, older = deployment.servers()[-1], deployment.workspace.create_request_context()
    deployment.workspace.reload_code_location("first")
    run = deployment.launch()
    assert deployment.ended(run) is SUCCESS
    replaced = deployment.seen(run)[1]
    assert replaced != before
    assert any("reloaded" in message for message in deployment.said(run))
    # A thread of the daemon may still have the view from before the reload.
    late = deployment.create()
    deployment.launcher.launch_run(LaunchRunContext(deployment.run(late), older))
    assert deployment.ended(late) is SUCCESS
    assert deployment.seen(late)[1] == replaced


@pytest.mark.nightly
def test_the_server_of_a_removed_location_ends_before_the_launcher_and_after_its_runs(tmp_path: Path) -> None:
    with deployed(tmp_path, "first", "second") as deployment:
        runs = {name: deployment.waiting(location=name) for name in ("first", "second")}
        servers = {name: psutil.Process(deployment.servers(name)[-1]) for name in runs}
        opened = descriptors(servers["second"].pid)
        deployment.remove("second")
        wait_until(lambda: descriptors(servers["second"].pid) < opened, "the end of the launcher's socket")
        deployment.go(location="second")
        assert deployment.ended(runs["second"]) is SUCCESS
        wait_until(lambda: ended(servers["second"]), "the end of the server")
        assert deployment.launcher.check_run_worker_health(deployment.run(runs["first"])).status.value == "RUNNING"
        assert not ended(servers["first"])


@pytest.mark.nightly
def test_the_server_of_a_reloaded_location_ends_without_a_further_run(deployment: Deployment) -> None:
    assert deployment.ended(deployment.launch()) is SUCCESS
    server = psutil.Process(deployment.servers()[-1])
    deployment.workspace.reload_code_location("first")
    wait_until(lambda: ended(server), "the end of the server")


def test_servers_of_removed_locations_end_while_another_location_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, workspace = PreforkRunLauncher(), Mock()
    slots = {
        name: run_launcher._Slot(threading.Lock(), name, Mock(ServerProcess, pid=1)) for name in ("imported", "removed")
    }
    launcher._servers.slots.update(slots)
    launcher._servers.workspace = weakref.ref(workspace)
    monkeypatch.setattr(internals, "code_servers", lambda _: {})
    looking = threading.Thread(target=launcher._end_unused_servers)
    with slots["imported"].lock:
        looking.start()
        wait_until(lambda: not looking.is_alive(), "the end of the look")
    assert slots["imported"].server is not None
    assert slots["removed"].server is None


def test_a_server_goes_on_while_the_code_server_of_its_location_is_not_known(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The location has an error, or its code server starts."""
    assert deployment.ended(deployment.launch()) is SUCCESS
    deployment.workspace.reload_code_location("first")
    assert deployment.ended(deployment.launch()) is SUCCESS
    server = deployment.servers()[-1]
    monkeypatch.setattr(internals, "code_servers", lambda _: {"first": "", "second": ""})
    deployment.launcher._end_unused_servers()
    run = deployment.launch()
    assert deployment.ended(run) is SUCCESS
    assert deployment.seen(run)[1] == server


def test_ctrl_c_in_the_terminal_of_the_launcher_leaves_the_server_to_the_launcher(deployment: Deployment) -> None:
    assert deployment.ended(deployment.launch()) is SUCCESS
    server = deployment.servers()[-1]
    os.kill(server, signal.SIGINT)
    run = deployment.launch()
    assert deployment.ended(run) is SUCCESS
    assert deployment.seen(run)[1] == server


def test_a_run_has_no_settings_of_the_servers_signals(deployment: Deployment) -> None:
    assert deployment.ended(deployment.launch("signals")) is SUCCESS


def test_a_process_that_dies_after_its_run_has_ended_changes_nothing_of_the_run(deployment: Deployment) -> None:
    run = deployment.launch("die at exit")
    assert deployment.ended(run) is SUCCESS
    process = deployment.seen(run)[0]
    server = psutil.Process(deployment.seen(run)[1])
    wait_until(lambda: not psutil.pid_exists(process), "the end of the process")
    # Before its next answer, the server has begun the report.
    assert deployment.ended(deployment.launch()) is SUCCESS
    wait_until(lambda: not server.children(), "the end of the report")
    assert deployment.run(run).status is SUCCESS


@pytest.mark.nightly
def test_two_launchers_of_one_instance_have_the_same_server(deployment: Deployment) -> None:
    """Threads of the daemon that ask an instance for its launcher at the same time make several launchers."""
    assert deployment.ended(deployment.launch()) is SUCCESS
    server = deployment.servers()[-1]
    other = PreforkRunLauncher()
    other.register_instance(deployment.instance)
    run = deployment.create()
    workspace = deployment.workspace.create_request_context()
    other.launch_run(LaunchRunContext(deployment.run(run), workspace))
    assert deployment.ended(run) is SUCCESS
    assert deployment.seen(run)[1] == server == deployment.servers()[-1]


def test_runs_of_two_locations_see_their_own_modules_and_environment(deployment: Deployment) -> None:
    runs = {name: deployment.waiting(location=name) for name in ("first", "second")}
    seen = {name: deployment.seen(run, location=name) for name, run in runs.items()}
    assert {name: variable for name, (*_, variable) in seen.items()} == {"first": "first", "second": "second"}
    assert seen["first"][1] != seen["second"][1]
    for name, run in runs.items():
        deployment.go(location=name)
        assert deployment.ended(run) is SUCCESS


REGISTERING = """
import atexit, os, pathlib, tempfile

KEPT = tempfile.TemporaryDirectory()


@atexit.register
def leave():
    with (pathlib.Path(__file__).parent / "left").open("a") as left:
        left.write(f"{os.getpid()}\\n")
"""


def test_a_refused_launch_goes_back_into_the_queue_and_each_process_executes_its_own_exit_handlers(
    tmp_path: Path,
) -> None:
    queue = {"max_user_code_failure_retries": 5, "user_code_failure_retry_delay": 0}
    config = {"run_coordinator": {"module": "dagster", "class": "QueuedRunCoordinator", "config": queue}}
    with deployed(tmp_path, "first", before=REGISTERING, config=config, max_runs=1) as deployment:
        first = deployment.waiting()
        second = deployment.create("use")
        deployment.instance.submit_run(second, deployment.workspace.create_request_context())
        with QueuedRunCoordinatorDaemon(interval_seconds=1) as daemon:
            list(daemon.run_iteration(deployment.workspace))
            assert deployment.run(second).status is dg.DagsterRunStatus.QUEUED
            assert any("re-submitting the run into the queue" in message for message in deployment.said(second))
            assert any("TooManyRunsError" in str(error) for error in deployment.errors(second))

            deployment.go()
            assert deployment.ended(first) is SUCCESS
            (pid,) = deployment.servers()
            server = psutil.Process(pid)
            wait_until(lambda: not server.children(), "the end of the first process")
            list(daemon.run_iteration(deployment.workspace))
            assert deployment.ended(second) is SUCCESS

        wait_until((tmp_path / "first" / f"{second}.ended").exists, "the run's own exit handler")
        wait_until((tmp_path / "first" / f"{second}.freed").exists, "the deletion of an object that refers to itself")
        wait_until(lambda: not server.children(), "the end of the second process")
        assert not list((tmp_path / "first").glob(f"{second}.own*"))
        # The directory that the import made is still there.
        third = deployment.launch("use")
        assert deployment.ended(third) is SUCCESS

        assert deployment.servers() == [pid]
        processes = {deployment.seen(run)[0] for run in (first, second, third)}
        deployment.launcher.join(60)
        left = {int(line) for line in (tmp_path / "first" / "left").read_text().splitlines()}
        assert pid in left
        assert not left & processes


@pytest.mark.nightly
def test_runs_go_on_and_begin_while_the_code_server_is_dead(tmp_path: Path) -> None:
    with deployed(tmp_path, "first") as deployment:
        running = deployment.waiting()
        prepared = deployment.create()
        workspace = deployment.workspace.create_request_context()
        (code_server,) = (
            each
            for each in psutil.Process().children()
            if not ended(each) and "grpc" in each.cmdline() and str(tmp_path) in " ".join(each.cmdline())
        )
        code_server.kill()
        code_server.wait(PATIENCE)
        deployment.launcher.launch_run(LaunchRunContext(deployment.run(prepared), workspace))
        assert deployment.ended(prepared) is SUCCESS
        deployment.go()
        assert deployment.ended(running) is SUCCESS
        # Dagster starts another code server, which may have other code.
        deployment.workspace.reload_code_location("first")
        following = deployment.launch()
        assert deployment.ended(following) is SUCCESS
        assert deployment.seen(following)[1] == deployment.servers()[-1] != deployment.servers()[0]


@pytest.mark.nightly
def test_two_runs_draw_different_numbers_from_numpy(tmp_path: Path) -> None:
    with deployed(tmp_path, "first", before="import numpy.random") as deployment:
        runs = [deployment.launch("draw") for _ in range(2)]
        assert [deployment.ended(run) for run in runs] == [SUCCESS, SUCCESS]
        assert len({(tmp_path / "first" / f"{run}.drawn").read_text() for run in runs}) == 2


THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, name='poller', daemon=True).start()"


def test_a_location_with_a_thread_is_launched_by_dagsters_launcher_and_this_is_said_once(tmp_path: Path) -> None:
    with deployed(tmp_path, "first", before=THREAD) as deployment:
        first = deployment.launch()
        assert deployment.ended(first) is SUCCESS
        # The code server watches the process of such a run, and its launcher can end it.
        waiting = deployment.waiting()
        said = [
            [message for message in deployment.said(run) if "default launcher" in message] for run in (first, waiting)
        ]
        assert [len(messages) for messages in said] == [1, 0]
        assert "poller" in said[0][0]
        assert deployment.launcher.check_run_worker_health(deployment.run(waiting)).status.value == "RUNNING"
        assert deployment.launcher.terminate(waiting)
        assert deployment.ended(waiting) is CANCELED


def test_runs_of_a_location_whose_files_keep_changing_are_launched_by_dagsters_launcher_until_it_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise ReplacedError("a file has changed")

    monkeypatch.setattr(run_launcher, "_ATTEMPTS", 2)
    with deployed(tmp_path, "first") as deployment:
        with monkeypatch.context() as patched:
            patched.setattr(ServerProcess, "launch", refuse)
            runs = [deployment.launch() for _ in range(2)]
        assert [deployment.ended(run) for run in runs] == [SUCCESS, SUCCESS]
        assert [sum("keep changing" in said for said in deployment.said(run)) for run in runs] == [1, 0]
        assert len(deployment.servers()) == 2
        deployment.workspace.reload_code_location("first")
        assert deployment.ended(deployment.launch()) is SUCCESS
        assert len(deployment.servers()) == 3


@pytest.mark.parametrize("runs", [5, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_short_runs_leave_no_memory_files_or_processes_behind(deployment: Deployment, runs: int) -> None:
    assert deployment.ended(deployment.launch()) is SUCCESS
    server = psutil.Process(deployment.servers()[-1])
    wait_until(lambda: not server.children(), "the end of the first process")
    files, memory = descriptors(server.pid), server.memory_info().rss
    for _ in range(runs):
        run = deployment.launch()
        assert deployment.ended(run) is SUCCESS
        # The log says why there is another server.
        assert deployment.seen(run)[1] == server.pid, deployment.said(run)
    wait_until(lambda: not server.children(), "the end of the processes")
    assert descriptors(server.pid) == files
    # Less than a kilobyte for each run of the nightly test.
    assert server.memory_info().rss - memory < 1_000_000


def test_run_monitoring_sees_the_death_of_a_process_whose_server_is_dead(deployment: Deployment) -> None:
    # The last test here: another one would need another server.
    run = deployment.waiting()
    worker = deployment.worker(run)
    os.kill(deployment.servers()[-1], signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_alive(), "the end of the process")
    assert deployment.launcher.check_run_worker_health(deployment.run(run)).status.value == "FAILED"
    assert not deployment.launcher.terminate(run)
    deployment.instance.report_run_failed(deployment.run(run))
