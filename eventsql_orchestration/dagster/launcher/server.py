"""The fork server: a process with one thread that has imported a location, and forks a child for each run.

The launcher starts `python -m eventsql_orchestration.dagster.launcher.server DESCRIPTOR` with one end of a pair of
sockets. The server ends when the other end is closed and the runs under way have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any, Final, Never

import dagster as dg

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher.channel import Channel, ChannelClosedError
from eventsql_orchestration.dagster.launcher.exit_handlers import ExitHandlers
from eventsql_orchestration.dagster.launcher.fork_safety import obstacle, open_sockets
from eventsql_orchestration.dagster.launcher.loaded_files import LoadedFiles
from eventsql_orchestration.dagster.launcher.worker import Worker

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_DONE: Final = 100
"""Exit code of a child that has seen the end of its run. 0 is no proof: code of the run may call `os._exit(0)`."""

_RETRY_AFTER: Final = 1.0
"""Seconds until a report is tried again if no process could be forked for it."""


@dataclass(frozen=True, slots=True)
class Location:
    """The code that a server loads: a repository of the location `name`, for runs of the instance `instance`."""

    name: str
    origin: internals.RepositoryPythonOrigin
    instance: internals.InstanceRef


@dataclass(frozen=True, slots=True)
class _Death:
    """A child that ended before its run was seen to end."""

    run: str
    pid: int
    code: int


class ForkServer:
    """Answers requests for runs, forks, and waits for the children."""

    def __init__(
        self, channel: Channel, location: Location, files: LoadedFiles, exits: ExitHandlers, *, max_runs: int
    ) -> None:
        self._channel = channel
        self._location = location
        self._files = files
        self._exits = exits
        self._max_runs = max_runs
        # The run of each child; None for a child that reports the end of another child.
        self._children: dict[int, str | None] = {}
        self._unreported: deque[_Death] = deque()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        # Set a handler: without one, Python does not announce the end of a child.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # Ctrl-C in a terminal reaches every process: the runs heed it, and the launcher closes the channel.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> Callable[[], int] | None:
        """Serve until the launcher is gone and the runs have ended.

        In a child, returns the work of the child: a function that returns the exit code.
        """
        listening = True
        while listening or self._children or self._unreported:
            channel = self._channel.socket.fileno()
            heard = [self._woken, channel] if listening else [self._woken]
            ready, _, _ = select.select(heard, [], [], _RETRY_AFTER if self._unreported else None)
            if self._woken in ready:
                os.read(self._woken, 4096)
            if (work := self._reap()) is not None:
                return work
            if channel not in ready:
                continue
            try:
                request = self._channel.receive()
                work = self._launch(str(request["run"]), resume=bool(request["resume"]))
            except ChannelClosedError:
                listening = False
                self._channel.close()
            if work is not None:
                return work
        return None

    def _launch(self, run: str, *, resume: bool) -> Callable[[], int] | None:
        if (path := self._files.changed()) is not None:
            self._channel.send(changed=path)
        elif sum(child is not None for child in self._children.values()) >= self._max_runs:
            self._channel.send(full=self._max_runs)
        else:
            try:
                pid, start, starting = self._fork_with_pipe(run)
            except OSError as error:
                self._channel.send(busy=str(error))
                return None
            if pid == 0:
                os.close(starting)
                return lambda: _execute(self._location.instance, run, resume=resume, start=start)
            os.close(start)
            try:
                self._channel.send(pid=pid)
            finally:
                # A launcher that is gone does not ask again: the run starts. A child that was killed does not read.
                with contextlib.suppress(BrokenPipeError):
                    os.write(starting, b"1")
                os.close(starting)
        return None

    def _fork_with_pipe(self, run: str) -> tuple[int, int, int]:
        """Fork. Returns the child's number and the ends of a pipe to it. After an `OSError`, both ends are closed."""
        start, starting = os.pipe()
        try:
            return self._fork(run), start, starting
        except OSError:
            os.close(start)
            os.close(starting)
            raise

    def _fork(self, run: str | None) -> int:
        """Fork. A signal that comes before the child can heed it stays pending until `_execute` unblocks it."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if pid:
            self._children[pid] = run
        else:
            self._exits.drop()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._woken)
            os.close(self._wake)
            self._channel.close()
            _draw_new_seeds()
        return pid

    def _reap(self) -> Callable[[], int] | None:
        """Wait for the children that have ended. In the child that reports a crash, returns the report."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            run = self._children.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if run is not None and code != _DONE:
                self._unreported.append(_Death(run, pid, code))

        while self._unreported:
            death = self._unreported[0]
            try:
                # A child makes the report, because a report needs connections.
                child = self._fork(None)
            except OSError:
                break
            if child == 0:
                return lambda: _report(self._location.instance, death)
            self._unreported.popleft()
        return None


def _execute(ref: internals.InstanceRef, run_id: str, *, resume: bool, start: int) -> int:
    # If the server died before it could answer, the launcher launches the run again.
    if not os.read(start, 1):
        return 0
    os.close(start)
    with internals.capture_interrupts():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        with internals.get_instance_for_cli(instance_ref=ref) as instance:
            worker = Worker.of_process(run_id, os.getpid())
            run = instance.get_run_by_id(run_id)
            if run is None or _has_other_process(run, worker):
                return _DONE
            if run.status is dg.DagsterRunStatus.CANCELING:
                # Otherwise, Dagster would treat it as a run that has begun before.
                instance.report_run_canceled(run)
                return _DONE

            # The tag comes before the run's start, so that the worker of each started run is known.
            instance.add_run_tags(run_id, worker.tags())
            internals.execute_run(instance, run_id, resume=resume)

            run = instance.get_run_by_id(run_id)
            return _DONE if run is None or run.is_finished else 1


def _has_other_process(run: dg.DagsterRun, worker: Worker) -> bool:
    """Whether a living process other than `worker` executes a run."""
    other = Worker.of(run.run_id, run.tags)
    return other is not None and other != worker and other.is_here and other.is_alive()


def _report(ref: internals.InstanceRef, death: _Death) -> int:
    """Report a crash and exit at once, without exit handlers: this child has executed no run."""
    try:
        _report_crash(ref, death)
    except Exception:  # noqa: BLE001 - it is logged, and run monitoring will find the crash
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _report_crash(ref: internals.InstanceRef, death: _Death) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with internals.get_instance_for_cli(instance_ref=ref) as instance:
        run = instance.get_run_by_id(death.run)
        if run is None or run.is_finished:
            return
        worker = Worker.of(death.run, run.tags)
        if worker is not None and not (worker.is_here and worker.pid == death.pid):
            # Another process executes the run.
            return

        prefix = f"Run execution process for {death.run}"
        instance.report_engine_event(internals.get_run_crash_explanation(prefix=prefix, exit_code=death.code), run)
        if run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run)
        elif run.status is not dg.DagsterRunStatus.STARTED or not internals.resumes_runs(instance):
            instance.report_run_failed(run)


def _draw_new_seeds() -> None:
    """Draw new seeds in libraries, so that children do not draw the same numbers. Python renews its own seed."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _load(location: Location, files: LoadedFiles, exits: ExitHandlers, given: set[int]) -> dict[str, Any]:
    """Load the location. Returns the message to the launcher."""
    # The file may be created while the location is loaded.
    files.watch(str(Path.cwd() / ".env"))
    try:
        with files.recorded(), exits.recorded():
            internals.add_location_environment(location.instance, location.name)
            internals.import_storage(location.instance)
            internals.load_location(location.origin)
    except Exception:  # noqa: BLE001 - whatever a location raises, the launcher has to know
        return {"failed": traceback.format_exc(limit=-3)}
    if (why := obstacle(given)) is not None:
        return {"unsafe": why}
    # Children share these objects with the server: a collection would copy their pages.
    gc.collect()
    gc.freeze()
    return {"ready": os.getpid()}


def main() -> None:
    """Load, then serve. A child does its work from here, and then ends as any Python program."""
    channel = Channel(socket(fileno=int(sys.argv[1])))
    channel.socket.set_inheritable(False)
    given = open_sockets()
    try:
        hello = channel.receive()
        location = Location(
            hello["location"],
            dg.deserialize_value(hello["origin"], internals.RepositoryPythonOrigin),
            dg.deserialize_value(hello["instance"], internals.InstanceRef),
        )
        files = LoadedFiles(int(hello["since"]))
        exits = ExitHandlers()
        message = _load(location, files, exits, given)
        channel.send(**message)
    except ChannelClosedError:
        return
    if "ready" not in message:
        return
    work = ForkServer(channel, location, files, exits, max_runs=int(hello["max_runs"])).serve()
    if work is not None:
        _end(work())


def _end(code: int) -> Never:
    """End as a Python program does, but without tearing modules and their objects down.

    The teardown would take a fifth of the processor time of a short run.
    """
    # Python itself calls both when it ends. `multiprocessing` ends its children in the same way.
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    # Objects in cycles may hold files, for example in the traceback of a handled error.
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
