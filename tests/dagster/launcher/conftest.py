"""A deployment for tests of the launcher: an instance, a code server, and locations that the test writes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import CompositeTarget, PythonFileTarget

from eventsql_orchestration.dagster.launcher.run_launcher import PreforkRunLauncher
from eventsql_orchestration.dagster.launcher.worker import Worker
from tests.waiting import wait_until

LOCATION: Final = """
import atexit, os, signal, sys, tempfile, time
from pathlib import Path
import dagster as dg
import own_module

HERE = Path(__file__).parent
IN_SERVER = any(word.endswith("launcher.server") for word in sys.orig_argv)
with (HERE / "imports").open("a") as imports:
    imports.write(f"{os.getpid()} {IN_SERVER}\\n")


class Work(dg.Config):
    then: str = ""


class Cycle:
    def __init__(self, freed: Path) -> None:
        self.itself, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.touch()


@dg.op
def work(context: dg.OpExecutionContext, config: Work) -> None:
    assert own_module.LOCATION == HERE.name
    (HERE / context.run_id).write_text(f"{os.getpid()} {os.getppid()} {VERSION} {os.environ.get('OF_LOCATION')}")
    match config.then:
        case "fail":
            raise ValueError
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "leave":
            os._exit(0)
        case "use":
            assert Path(KEPT.name).is_dir()
            atexit.register((HERE / f"{context.run_id}.ended").touch)
            Cycle(HERE / f"{context.run_id}.freed")
            globals()["OWN"] = tempfile.TemporaryDirectory(prefix=f"{context.run_id}.own", dir=HERE)
        case "die at exit":
            atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        case "signals":
            assert signal.set_wakeup_fd(-1) == -1
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        case "draw":
            (HERE / f"{context.run_id}.drawn").write_text(str(numpy.random.random()))
        case "wait":
            while not (HERE / "go").exists():
                time.sleep(0.01)


@dg.job(executor_def=dg.in_process_executor)
def short():
    work()


@dg.job
def in_processes():
    work()


defs = dg.Definitions(jobs=[short, in_processes])
"""
"""The source of a location, without the first line, which sets `VERSION`. Each run writes a file with its process, the
parent process, the version and a variable."""


class Deployment:
    """An instance with the launcher, and a workspace of locations in the directories `<root>/<name>`."""

    def __init__(
        self, root: Path, instance: dg.DagsterInstance, workspace: WorkspaceProcessContext,
        targets: list[PythonFileTarget],
    ) -> None:  # fmt: skip
        self.root = root
        self.targets = targets
        self.instance = instance
        self.workspace = workspace

    @property
    def launcher(self) -> PreforkRunLauncher:
        launcher = self.instance.run_launcher
        assert isinstance(launcher, PreforkRunLauncher)
        return launcher

    def remove(self, location: str) -> None:
        """Remove a location from the workspace."""
        self.targets[:] = [target for target in self.targets if target.location_name != location]
        self.workspace.refresh_workspace()

    def create(self, then: str = "", *, job: str = "short", location: str = "first") -> str:
        """Create a run whose step does `then`; gives its id."""
        found = self.workspace.create_request_context().get_code_location(location)
        (repository,) = found.get_repositories().values()
        remote = repository.get_full_job(job)
        run = create_run_for_test(
            self.instance, job_name=job, run_config={"ops": {"work": {"config": {"then": then}}}},
            remote_job_origin=remote.get_remote_origin(), job_code_origin=remote.get_python_origin(),
            job_snapshot=remote.job_snapshot,
        )  # fmt: skip
        return str(run.run_id)

    def launch(self, then: str = "", *, job: str = "short", location: str = "first") -> str:
        """Launch a run whose step does `then`; gives its id."""
        run_id = self.create(then, job=job, location=location)
        self.instance.launch_run(run_id, self.workspace.create_request_context())
        return run_id

    def run(self, run_id: str) -> dg.DagsterRun:
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def ended(self, run_id: str) -> dg.DagsterRunStatus:
        """The status in which a run ends."""
        wait_until(lambda: self.run(run_id).is_finished, "the end of a run")
        return self.run(run_id).status

    def waiting(self, *, location: str = "first") -> str:
        """Launch a run whose step waits until `go`; gives its id once it waits."""
        (self.root / location / "go").unlink(missing_ok=True)
        run_id = self.launch("wait", location=location)
        seen = self.root / location / run_id
        # The file exists a moment before its text does.
        wait_until(lambda: seen.exists() and seen.read_text(), "the step of a run")
        return run_id

    def go(self, *, location: str = "first") -> None:
        """Let the steps that wait go on."""
        (self.root / location / "go").touch()

    def seen(self, run_id: str, *, location: str = "first") -> tuple[int, int, str, str]:
        """The values that a run saw: its process, the parent process, the version, and the variable of its location."""
        pid, parent, version, variable = (self.root / location / run_id).read_text().split()
        return int(pid), int(parent), version, variable

    def worker(self, run_id: str) -> Worker:
        worker = Worker.of(run_id, self.run(run_id).tags)
        assert worker is not None
        return worker

    def said(self, run_id: str) -> list[str]:
        """The engine's messages in a run's log."""
        return [entry.message for entry in self.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)]

    def errors(self, run_id: str) -> list[object]:
        """The errors that the engine's messages in a run's log report."""
        logs = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
        return [entry.get_dagster_event().engine_event_data.error for entry in logs]

    def servers(self, location: str = "first") -> list[int]:
        """The fork servers that have loaded a location, the first one first."""
        lines = (self.root / location / "imports").read_text().splitlines()
        return [int(pid) for pid, in_server in map(str.split, lines) if in_server == "True"]


def write_location(root: Path, name: str, *, version: str = "1", before: str = "") -> Path:
    """Write a location, or overwrite it. Returns its file. `before` is code that precedes the location's own code."""
    directory = root / name
    directory.mkdir(exist_ok=True)
    (directory / ".env").write_text(f"OF_LOCATION={name}\n")
    # Each location has a module with this name.
    (directory / "own_module.py").write_text(f"LOCATION = {name!r}\n")
    file = directory / f"{name}_definitions.py"
    file.write_text(f"VERSION = {version!r}\n{before}\n{LOCATION}")
    return file


@contextmanager
def deployed(
    root: Path, *names: str, before: str = "", config: Mapping[str, Any] | None = None, **options: int
) -> Iterator[Deployment]:
    """A deployment of locations, with the launcher's options; `config` is the rest of dagster.yaml."""
    home = root / "home"
    home.mkdir()
    launcher = {"module": "eventsql_orchestration.dagster", "class": "PreforkRunLauncher", "config": options}
    (home / "dagster.yaml").write_text(
        yaml.safe_dump({"run_launcher": launcher, "telemetry": {"enabled": False}, **(config or {})})
    )
    targets = [
        PythonFileTarget(
            python_file=str(write_location(root, name, before=before)), attribute=None,
            working_directory=str(root / name), location_name=name,
        )
        for name in names
    ]  # fmt: skip
    with ExitStack() as stack:
        instance = stack.enter_context(dg.DagsterInstance.from_config(str(home)))
        workspace = stack.enter_context(WorkspaceProcessContext(instance, CompositeTarget(targets=targets)))
        deployment = Deployment(root, instance, workspace, targets)
        try:
            yield deployment
        finally:
            # A code server whose run waits would not end.
            for name in names:
                deployment.go(location=name)
            deployment.launcher.join(60)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of the location `first`, for all tests of a module."""
    with deployed(tmp_path_factory.mktemp("deployment"), "first") as made:
        yield made


def descriptors(pid: int) -> int:
    """The number of open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - only the number matters
