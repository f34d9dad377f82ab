"""`PreforkRunLauncher`: each run is a fork of a process that has loaded the location."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import dagster as dg

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher.server_process import (
    ReplacedError,
    ServerProcess,
    Unforkable,
    obstacle_here,
)
from eventsql_orchestration.dagster.launcher.worker import Worker
from eventsql_orchestration.threads import start_thread

logger = logging.getLogger(__name__)

TERMINATE_TAG: Final = "eventsql/terminate"
"""The tag of a run that a process on another machine wants to terminate. Its value is the run's id."""

_ATTEMPTS: Final = 4
"""Maximum number of servers that one launch starts, if files keep changing or servers keep dying."""

_UNFORKABLE_FOR: Final = 600.0
"""Seconds for which Dagster's launcher launches the runs of a location that cannot be forked. A reload of the location
ends this time."""

_WATCH_EVERY: Final = 2.0
"""Seconds between two looks for runs that a process on another machine wants to terminate, and for unused servers."""


class LauncherClosedError(internals.DagsterUserCodeUnreachableError):
    """The instance of the launcher has been closed."""

    def __init__(self) -> None:
        super().__init__("the instance of this run launcher is closed: launch the run with an open one")


@dataclass(slots=True)
class _Slot:
    """The present server of a location, or the reason why it has none.

    `why` is the reason why the next server starts.
    """

    lock: threading.Lock
    location: str
    server: ServerProcess | None = None
    code_server: str = ""
    replaced_code_server: str = ""
    unforkable_until: float = 0.0
    why: str = "this is its first run here"


@dataclass(slots=True)
class _Servers:
    """The servers of an instance, and the thread that looks for runs to terminate and for servers to end."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    slots: dict[str, _Slot] = field(default_factory=dict)
    ending: list[ServerProcess] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    watch: threading.Thread | None = None
    workspace: weakref.ref[internals.IWorkspaceProcessContext[Any]] | None = None


_SHARED: Final[weakref.WeakKeyDictionary[dg.DagsterInstance, _Servers]] = weakref.WeakKeyDictionary()
_SHARING: Final = threading.Lock()


class PreforkRunLauncher(internals.RunLauncher[dg.DagsterInstance], internals.ConfigurableClass):
    """Launches each run as a fork of a process that has imported Dagster and the code location.

    `max_runs` is the maximum number of runs of one location at once. `import_timeout_seconds` is the time that the
    import of a location may take. `same_code` states that this machine always has the code of code servers on other
    machines. If a location cannot be forked, Dagster's `DefaultRunLauncher` launches its runs; the log of the next run
    says why.
    """

    def __init__(
        self, max_runs: int = 100, import_timeout_seconds: int = 120, same_code: bool = False,
        inst_data: internals.ConfigurableClassData | None = None,
    ) -> None:  # fmt: skip
        self._max_runs = max_runs
        self._import_timeout = import_timeout_seconds
        self._same_code = same_code
        self._inst_data = inst_data
        self._default: internals.RunLauncher[dg.DagsterInstance] = dg.DefaultRunLauncher()
        self._servers = _Servers()
        super().__init__()  # type: ignore[no-untyped-call]  # Dagster gives it no types

    @property
    def inst_data(self) -> internals.ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        return {
            "max_runs": dg.Field(int, default_value=100, description="Maximum number of runs of one location at once."),
            "import_timeout_seconds": dg.Field(
                int, default_value=120, description="Seconds that the import of a location may take."
            ),
            "same_code": dg.Field(
                bool,
                default_value=False,
                description="Whether this machine always has the code of code servers on other machines.",
            ),
        }

    @classmethod
    def from_config_value(
        cls, inst_data: internals.ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> Self:
        return cls(inst_data=inst_data, **config_value)

    def register_instance(self, instance: dg.DagsterInstance) -> None:
        super().register_instance(instance)
        self._default.register_instance(instance)
        with _SHARING:
            # Threads that ask an instance for its launcher at the same time make several launchers, which share the
            # servers.
            self._servers = _SHARED.setdefault(instance, self._servers)

    def launch_run(self, context: internals.LaunchRunContext) -> None:
        """Fork a process for a run. The first run of a location waits for its import.

        Raises `TooManyRunsError`, `MachineBusyError`, `LauncherClosedError`. If the location cannot be forked,
        `DefaultRunLauncher` launches the run, and may raise its own errors.
        """
        if not self._fork(context, resume=False):
            self._default.launch_run(context)

    def resume_run(self, context: internals.ResumeRunContext) -> None:
        """Fork a process that goes on with a run.

        Raises `DagsterUserCodeUnreachableError` if the location cannot be forked.
        """
        if not self._fork(context, resume=True):
            raise internals.DagsterUserCodeUnreachableError(
                f"run {context.dagster_run.run_id} cannot be resumed: its location cannot be forked"
            )

    def _fork(self, context: internals.LaunchRunContext | internals.ResumeRunContext, *, resume: bool) -> bool:
        """Fork a process for a run. Returns False if the location cannot be forked."""
        run = context.dagster_run
        if run.job_code_origin is None or run.remote_job_origin is None:
            return False
        origin, location = run.job_code_origin.repository_origin, run.remote_job_origin.location_name
        code_server = internals.code_server(context.workspace, location)
        with self._servers.lock:
            if context.workspace is not None:
                self._servers.workspace = weakref.ref(context.workspace.process_context)
            slot = self._servers.slots.setdefault(f"{location} {origin.get_id()}", _Slot(threading.Lock(), location))
        for _ in range(_ATTEMPTS):
            server = None
            try:
                server = self._server(slot, run, origin, code_server)
                if server is None:
                    return False
                pid = server.launch(run.run_id, resume=resume)
                if resume:
                    # Until the new process writes its tag, run monitoring would see the tag of the process that died.
                    self._instance.add_run_tags(run.run_id, Worker.of_process(run.run_id, pid).tags())
                return True
            except ReplacedError as error:
                self._retire(slot, server, str(error))
            except Unforkable as error:
                self._say_unforkable(run, location, str(error), resume=resume)
                return False
        with slot.lock:
            slot.unforkable_until = time.monotonic() + _UNFORKABLE_FOR
        reason = "its files keep changing, or its processes keep dying"
        self._say_unforkable(run, location, reason, resume=resume)
        return False

    def _server(
        self, slot: _Slot, run: dg.DagsterRun, origin: internals.RepositoryPythonOrigin,
        code_server: internals.CodeServer,
    ) -> ServerProcess | None:  # fmt: skip
        """The server of a location, started for `run` if there is none; None while the location cannot be forked.

        Raises `Unforkable` in the launch that finds this out, and `LauncherClosedError`.
        """
        with slot.lock:
            if self._servers.closed.is_set():
                raise LauncherClosedError

            # A launch with an older view of the workspace may come after a reload.
            if code_server.id not in {"", slot.code_server, slot.replaced_code_server}:
                # The data that the location reads when it is imported, for example from a database, may have changed.
                self._end(slot, "the location was reloaded")
                slot.replaced_code_server, slot.code_server = slot.code_server, code_server.id
                slot.unforkable_until = 0.0

            if slot.server is None and time.monotonic() >= slot.unforkable_until:
                started = time.monotonic()
                try:
                    slot.server = self._start(slot.location, origin, remote=code_server.remote)
                except Unforkable:
                    slot.unforkable_until = time.monotonic() + _UNFORKABLE_FOR
                    raise
                self._watch()
                self._say_started(run, slot, slot.server, time.monotonic() - started)
            return slot.server

    def _start(self, location: str, origin: internals.RepositoryPythonOrigin, *, remote: bool) -> ServerProcess:
        if (why := obstacle_here(origin, remote=remote, same_code=self._same_code)) is not None:
            raise Unforkable(why)
        return ServerProcess(
            location, origin, self._instance.get_ref(), max_runs=self._max_runs, timeout=self._import_timeout
        )

    def _retire(self, slot: _Slot, server: ServerProcess | None, why: str) -> None:
        with slot.lock:
            # Another launch may have replaced it.
            if slot.server is server:
                self._end(slot, why)

    def _end(self, slot: _Slot, why: str) -> None:
        """End the server of a location, if there is one, once its runs have ended. Call with the slot's lock."""
        if slot.server is not None:
            logger.info("fork server %s of location %s ends, because %s", slot.server.pid, slot.location, why)
            slot.why = why
            slot.server.close()
        with self._servers.lock:
            if slot.server is not None:
                self._servers.ending.append(slot.server)
                slot.server = None
            self._servers.ending = [server for server in self._servers.ending if not server.has_ended()]

    def _say_started(self, run: dg.DagsterRun, slot: _Slot, server: ServerProcess, seconds: float) -> None:
        """Write into a run's log why the run starts later than others."""
        message = f"Fork server {server.pid} imported location {slot.location} in {seconds:.1f} s, because {slot.why}"
        logger.info(message)
        self._instance.report_engine_event(message, run, cls=self.__class__)

    def _say_unforkable(self, run: dg.DagsterRun, location: str, reason: str, *, resume: bool) -> None:
        message = f"Location {location} cannot be forked, because {reason}"
        if not resume:
            message = f"{message}. Dagster's default launcher launches its runs"
        logger.warning(message)
        self._instance.report_engine_event(message, run, cls=self.__class__)

    def terminate(self, run_id: str) -> bool:
        """Ask a run's process to end the run. Returns False if there is no such process."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        worker = Worker.of(run_id, run.tags)
        if worker is None and internals.GRPC_INFO_TAG in run.tags:
            return self._default.terminate(run_id)
        self._instance.report_run_canceling(run)
        if worker is not None and worker.is_here:
            # The process may be another user's.
            with contextlib.suppress(PermissionError):
                return worker.interrupt()
        # The launcher that forked the process ends it.
        self._instance.add_run_tags(run_id, {TERMINATE_TAG: run_id})
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> internals.CheckRunHealthResult:
        # Runs may be left from before a restart of this process.
        self._watch()
        status = internals.WorkerStatus
        worker = Worker.of(run.run_id, run.tags)
        if worker is None:
            # With Dagster's default launcher, the code server itself reports the end of its processes.
            return internals.CheckRunHealthResult(status.RUNNING)
        if worker.is_here:
            if worker.is_alive():
                return internals.CheckRunHealthResult(status.RUNNING, run_worker_id=str(worker.pid))
            return internals.CheckRunHealthResult(status.FAILED, f"process {worker.pid} has ended")
        if not internals.launched_by_queue(self._instance):
            return internals.CheckRunHealthResult(status.RUNNING)
        # A daemon on another machine forked the process, and this daemon has taken over from it.
        return internals.CheckRunHealthResult(status.NOT_FOUND, f"its process ran on {worker.host}")

    @property
    def supports_resume_run(self) -> bool:
        """True: run monitoring may have a run resumed (`run_monitoring.max_resume_run_attempts`)."""
        return True

    def dispose(self) -> None:
        """Let the servers end; runs under way go on."""
        self._servers.closed.set()
        with self._servers.lock:
            slots = list(self._servers.slots.values())
        for slot in slots:
            with slot.lock:
                self._end(slot, "its launcher ends")

    def join(self, timeout: int = 30) -> None:
        """Wait until the launched runs and their servers have ended. Raises `TimeoutError`."""
        self.dispose()
        deadline = time.monotonic() + timeout
        while any(not server.has_ended() for server in self._servers.ending):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"runs are still under way after {timeout} s")
            time.sleep(0.01)

    def _watch(self) -> None:
        with self._servers.lock:
            if self._servers.watch is None:
                self._servers.watch = start_thread("launcher", self._look_again_and_again, weakref.ref(self._instance))

    def _look_again_and_again(self, instance: weakref.ref[dg.DagsterInstance]) -> None:
        ended: set[str] = set()
        while not self._servers.closed.wait(_WATCH_EVERY):
            if instance() is None:
                # The program has dropped the instance without closing it.
                self.dispose()
                return
            try:
                self._end_unused_servers()
                ended = self._end_terminated_runs(ended)
            except Exception as error:  # noqa: BLE001 - the storage may be away for a while
                logger.warning("runs and code locations are not known at present: %s", error)

    def _end_unused_servers(self) -> None:
        """End the servers of locations that were removed from the workspace, or reloaded."""
        workspace = None if self._servers.workspace is None else self._servers.workspace()
        if workspace is None:
            return
        code_servers = internals.code_servers(workspace)
        with self._servers.lock:
            slots = list(self._servers.slots.values())
        for slot in slots:
            # The import of a location holds the lock.
            if not slot.lock.acquire(blocking=False):
                continue
            try:
                # A launch may have a newer view of the workspace, and the code server of a location with an error is
                # not known.
                now = code_servers.get(slot.location)
                if now not in {"", slot.code_server, slot.replaced_code_server}:
                    self._end(slot, "the location was removed" if now is None else "the location was reloaded")
            finally:
                slot.lock.release()

    def _end_terminated_runs(self, ended: set[str]) -> set[str]:
        """End the runs of this machine that another process wants to terminate. Skips the runs in `ended`.

        Returns the ids of all runs that were asked to end and have not ended yet.
        """
        for run in (runs := self._instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.CANCELING]))):
            worker = Worker.of(run.run_id, run.tags)
            requested = run.tags.get(TERMINATE_TAG) == run.run_id and run.run_id not in ended
            if requested and worker is not None and worker.is_here:
                ended.add(run.run_id)
                try:
                    worker.interrupt()
                except PermissionError as error:
                    logger.warning("process %s of run %s cannot be ended: %s", worker.pid, run.run_id, error)
        return ended & {run.run_id for run in runs}
