"""The launcher's side of a fork server: start it, ask it for runs, let it end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dagster as dg

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher.channel import Channel, ChannelClosedError
from eventsql_orchestration.signals import ending
from eventsql_orchestration.threads import start_thread

_ANSWER_TIMEOUT = 60.0
"""Seconds for the answer to a request. A fork takes milliseconds; a swapping machine may need longer."""


class Unforkable(Exception):  # noqa: N818 - a finding, after which the run is launched in another way
    """No server can load the location and then be forked. The message says why."""


class ReplacedError(Exception):
    """The run needs another server: this one has ended, or files of the location have changed. The message says why."""


class TooManyRunsError(internals.DagsterUserCodeUnreachableError):
    """The maximum number of runs is under way; Dagster's queue tries again."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} runs of this location are under way: bound the queue (concurrency.runs.max_concurrent_runs), or "
            "raise `max_runs` of the run launcher, in dagster.yaml"
        )


class MachineBusyError(internals.DagsterUserCodeUnreachableError):
    """The system refused a process for a run; Dagster's queue tries again."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the system refused a process for the run ({reason}): bound the queue "
            "(concurrency.runs.max_concurrent_runs in dagster.yaml), or raise the limits of processes and memory"
        )


class ServerProcess:
    """A fork server that has loaded a location."""

    def __init__(
        self, location: str, origin: internals.RepositoryPythonOrigin, instance: internals.InstanceRef, *,
        max_runs: int, timeout: float,
    ) -> None:  # fmt: skip
        """Raises `Unforkable` if the location cannot be loaded within `timeout` seconds, or is not safe to fork."""
        self._lock = threading.Lock()
        self._closed = False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        since = time.time_ns()
        command = [origin.executable_path, "-m", "eventsql_orchestration.dagster.launcher.server", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command, cwd=internals.working_directory(origin), env=_environment(origin.executable_path),
                stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        except OSError as error:
            self._channel.close()
            raise Unforkable(f"its Python program or directory is not on this machine ({error})") from error
        finally:
            theirs.close()
        try:
            self._channel.send(
                location=location, origin=dg.serialize_value(origin),
                instance=dg.serialize_value(instance), since=since, max_runs=max_runs,
            )  # fmt: skip
            answer = self._channel.receive(timeout=timeout)
        except TimeoutError:
            self._kill()
            raise Unforkable(f"it was not imported within {timeout:.0f} s") from None
        except ChannelClosedError:
            self._kill()
            raise Unforkable(f"the process that imports it {ending(self._process.returncode)}") from None
        except BaseException:
            self._kill()
            raise
        if "ready" not in answer:
            self._kill()
            raise Unforkable(str(answer.get("unsafe") or f"its import failed: {answer['failed']}"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def launch(self, run_id: str, *, resume: bool) -> int:
        """Fork a process for a run. Returns the process number.

        Raises `ReplacedError`, `TooManyRunsError` and `MachineBusyError`. Then there is no process.
        """
        answer = self._ask(run=run_id, resume=resume)
        if "changed" in answer:
            raise ReplacedError(f"{answer['changed']} has changed")
        if "full" in answer:
            raise TooManyRunsError(int(answer["full"]))
        if "busy" in answer:
            raise MachineBusyError(str(answer["busy"]))
        return int(answer["pid"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        why = None
        with self._lock:
            try:
                self._channel.send(**request)
                try:
                    return self._channel.receive(timeout=_ANSWER_TIMEOUT)
                except TimeoutError:
                    # A dead server has answered already, or will never answer. So the run is not launched twice.
                    self._process.kill()
                    why = f"its server did not answer for {_ANSWER_TIMEOUT:.0f} s"
                    return self._channel.receive(timeout=_ANSWER_TIMEOUT)
            except (ChannelClosedError, TimeoutError) as error:
                raise ReplacedError(why or self._how_it_ended()) from error

    def _how_it_ended(self) -> str:
        if self._closed:
            # It lives as long as its runs do.
            return "its server was told to end"
        try:
            code = self._process.wait(_ANSWER_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "its server has closed the connection"
        return f"its server {ending(code)}"

    def close(self) -> None:
        """Tell the server to end once its runs have ended, after the answer to a launch under way."""
        with self._lock:
            self._closed = True
            self._channel.close()
        # A process that nobody waits for stays in the process table once it has ended.
        start_thread("launcher-server", self._process.wait)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def _environment(executable: str) -> dict[str, str]:
    """The environment of this process. Programs of a virtual environment come first, as in Dagster's code servers."""
    programs = Path(executable).parent
    if executable == sys.executable or not (programs.parent / "pyvenv.cfg").exists():
        return dict(os.environ)
    path = os.environ.get("PATH")
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{path}" if path else str(programs)}


def obstacle_here(origin: internals.RepositoryPythonOrigin, *, remote: bool, same_code: bool) -> str | None:
    """Why runs of a location must not be forked on this machine; None if they may be.

    `remote` states that the code server may be on another machine, and `same_code` that this machine has its code.
    """
    if not Path("/proc/self/task").exists():
        return "this system does not tell how many threads a process has: runs are forked on Linux"
    own, image = os.environ.get("DAGSTER_CURRENT_IMAGE"), origin.container_image
    if own and image and own != image:
        return f"its image is {image}, and the image of this process is {own}"
    if remote and not same_code and not (own and image):
        return (
            "its code server may have other code than this machine: set DAGSTER_CURRENT_IMAGE for both, or `same_code` "
            "of the run launcher in dagster.yaml"
        )
    return None
