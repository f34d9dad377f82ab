"""The fork server: a process with one thread that has imported a location, and forks a child for each run.

`python -m eventsql_orchestration.dagster.launcher.server DESCRIPTOR` is started by the launcher, with one end of a pair
of sockets. The server ends when the other end is closed and the runs under way have ended.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any, Final

import dagster as dg

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher.channel import Channel, ChannelClosedError
from eventsql_orchestration.dagster.launcher.fork_safety import obstacle, open_sockets
from eventsql_orchestration.dagster.launcher.loaded_files import LoadedFiles
from eventsql_orchestration.dagster.launcher.worker import Worker

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Location:
    """The code that a server loads: a repository of the location `name`, for runs of the instance `instance`."""

    name: str
    origin: internals.RepositoryPythonOrigin
    instance: internals.InstanceRef


class ForkServer:
    """Answers requests for runs, forks, and waits for the children."""

    def __init__(self, channel: Channel, location: Location, files: LoadedFiles, *, max_runs: int) -> None:
        self._channel = channel
        self._location = location
        self._files = files
        self._max_runs = max_runs
        # The run of each child; None for a child that reports the end of another.
        self._children: dict[int, str | None] = {}
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        # A handler, because the end of a child is announced only if one is set.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # Ctrl-C in a terminal reaches every process: the runs heed it, and the launcher closes the channel.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> Callable[[], None] | None:
        """Serve until the launcher is gone and the runs have ended. In a child, gives the work of the child."""
        listening = True
        while listening or self._children:
            channel = self._channel.socket.fileno()
            ready, _, _ = select.select([self._woken, channel] if listening else [self._woken], [], [])
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
                # Otherwise `select` finds it ready for ever.
                self._channel.close()
            if work is not None:
                return work
        return None

    def _launch(self, run: str, *, resume: bool) -> Callable[[], None] | None:
        if (path := self._files.changed()) is not None:
            self._channel.send(changed=path)
        elif sum(child is not None for child in self._children.values()) >= self._max_runs:
            self._channel.send(full=self._max_runs)
        else:
            start, starting = os.pipe()
            pid = self._fork(run)
            if pid == 0:
                os.close(starting)
                return lambda: _execute(self._location.instance, run, resume=resume, start=start)
            os.close(start)
            try:
                self._channel.send(pid=pid)
            finally:
                # A launcher that is gone does not ask again: the run starts.
                os.write(starting, b"1")
                os.close(starting)
        return None

    def _fork(self, run: str | None) -> int:
        """Fork. A signal that comes before the child can heed it stays pending until `_execute` unblocks it."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._children[pid] = run
        else:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.close(self._woken)
            os.close(self._wake)
            self._channel.close()
            _draw_new_seeds()
        return pid

    def _reap(self) -> Callable[[], None] | None:
        """Wait for the children that have ended. In the child that reports a crash, gives the report."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            run = self._children.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            # A report is made by a child, because it needs connections.
            if run is not None and code != 0 and self._fork(None) == 0:
                return lambda run=run, code=code: _report_crash(self._location.instance, run, code)  # type: ignore[misc]
        return None


def _execute(ref: internals.InstanceRef, run: str, *, resume: bool, start: int) -> None:
    # A server that dies before its answer leaves a run that the launcher launches again.
    if not os.read(start, 1):
        return
    os.close(start)
    with internals.capture_interrupts():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        with internals.get_instance_for_cli(instance_ref=ref) as instance:
            # The tag comes before the run's start, so that the worker of each started run is known.
            instance.add_run_tags(run, Worker.this_process(run).tags())
            internals.execute_run(instance, run, resume=resume)


def _report_crash(ref: internals.InstanceRef, run_id: str, code: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with internals.get_instance_for_cli(instance_ref=ref) as instance:
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return
        prefix = f"Run execution process for {run_id}"
        instance.report_engine_event(internals.get_run_crash_explanation(prefix=prefix, exit_code=code), run)
        if run.status is dg.DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run)
        elif run.status is not dg.DagsterRunStatus.STARTED or not internals.resumes_runs(instance):
            instance.report_run_failed(run)


def _draw_new_seeds() -> None:
    """Draw new seeds where libraries hold one: children must not draw the same numbers. Python's own are drawn."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _load(location: Location, files: LoadedFiles, given: set[int]) -> dict[str, Any]:
    """Load the location; gives the message about it."""
    try:
        with files.recorded():
            internals.add_location_environment(location.instance, location.name)
            internals.import_storage(location.instance)
            internals.load_location(location.origin)
    except Exception:  # noqa: BLE001 - whatever a location raises, the launcher has to know
        return {"failed": traceback.format_exc(limit=-3)}
    files.watch(str(Path.cwd() / ".env"))
    if (why := obstacle(given)) is not None:
        return {"unsafe": why}
    # Children share these objects with the server: a collection would copy their pages.
    gc.collect()
    gc.freeze()
    return {"ready": os.getpid()}


def main() -> None:
    """Load, then serve. A child does its work from here, and then ends as any Python program."""
    channel = Channel(socket(fileno=int(sys.argv[1])))
    given = open_sockets()
    try:
        hello = channel.receive()
        location = Location(
            hello["location"],
            internals.deserialize_value(hello["origin"], internals.RepositoryPythonOrigin),
            internals.deserialize_value(hello["instance"], internals.InstanceRef),
        )
        files = LoadedFiles(int(hello["since"]))
        message = _load(location, files, given)
        channel.send(**message)
    except ChannelClosedError:
        return
    if "ready" not in message:
        return
    work = ForkServer(channel, location, files, max_runs=int(hello["max_runs"])).serve()
    if work is not None:
        work()


if __name__ == "__main__":
    main()
