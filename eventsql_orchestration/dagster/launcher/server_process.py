"""The launcher's side of a fork server: start it, ask it for runs, let it end."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from eventsql_orchestration.dagster.launcher import dagster_internals as internals
from eventsql_orchestration.dagster.launcher.channel import Channel, ChannelClosedError

_ANSWER_TIMEOUT = 60.0
"""Seconds for the answer to a request. A fork takes milliseconds; a swapping machine may need longer."""


@dataclass(frozen=True, slots=True)
class Unforkable(Exception):  # noqa: N818 - a finding, after which the run is launched in another way
    """A location that no server can load for forks. `reason` says why."""

    reason: str


class ServerGoneError(Exception):
    """The server has ended."""


class LocationChangedError(Exception):
    """Files of the location have changed since the server loaded them."""


class TooManyRunsError(internals.DagsterUserCodeUnreachableError):
    """As many runs as the launcher allows are under way; Dagster's queue tries again."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} runs of this location are under way: bound the queue (concurrency.runs.max_concurrent_runs), or "
            "raise `max_runs` of the run launcher, in dagster.yaml"
        )
        self.limit = limit


class ServerProcess:
    """A fork server that has loaded a location."""

    def __init__(
        self, location: str, origin: internals.RepositoryPythonOrigin, instance: internals.InstanceRef, *,
        max_runs: int, timeout: float,
    ) -> None:  # fmt: skip
        """Raises `Unforkable` if the location cannot be loaded within `timeout` seconds, or is not safe to fork."""
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        since = time.time_ns()
        command = [origin.executable_path, "-m", "eventsql_orchestration.dagster.launcher.server", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                command, cwd=internals.working_directory(origin), stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        except OSError as error:
            self._channel.close()
            raise Unforkable(f"its Python program or directory is not on this machine ({error})") from error
        finally:
            theirs.close()
        try:
            self._channel.send(
                location=location, origin=internals.serialize_value(origin),
                instance=internals.serialize_value(instance), since=since, max_runs=max_runs,
            )  # fmt: skip
            answer = self._channel.receive(timeout=timeout)
        except TimeoutError:
            self._kill()
            raise Unforkable(f"it was not imported within {timeout:.0f} s") from None
        except ChannelClosedError:
            self._kill()
            raise Unforkable(f"the process that imports it ended with exit code {self._process.returncode}") from None
        except BaseException:
            self._kill()
            raise
        if "ready" not in answer:
            self._kill()
            raise Unforkable(str(answer.get("unsafe") or f"its import failed: {answer['failed']}"))

    @property
    def pid(self) -> int:
        """The server's process number."""
        return self._process.pid

    def launch(self, run_id: str, *, resume: bool) -> int:
        """Fork a process for a run; gives its number.

        Raises `ServerGoneError`, `LocationChangedError`, and `TooManyRunsError`, in each case without a process.
        """
        answer = self._ask(run=run_id, resume=resume)
        if "changed" in answer:
            raise LocationChangedError(answer["changed"])
        if "full" in answer:
            raise TooManyRunsError(int(answer["full"]))
        return int(answer["pid"])

    def _ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            try:
                self._channel.send(**request)
                try:
                    return self._channel.receive(timeout=_ANSWER_TIMEOUT)
                except TimeoutError:
                    # Once it is dead, its answer is there or never comes: a run is not launched twice.
                    self._process.kill()
                    return self._channel.receive()
            except ChannelClosedError as error:
                raise ServerGoneError from error

    def close(self) -> None:
        """Tell the server to end once its runs have ended."""
        self._channel.close()

    def has_ended(self) -> bool:
        """Whether the process has ended; its entry in the process table is gone then."""
        return self._process.poll() is not None

    def _kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


def runs_here(origin: internals.RepositoryPythonOrigin) -> str | None:
    """Why a location cannot run on this machine, from its image's name; None if it can."""
    own = os.environ.get("DAGSTER_CURRENT_IMAGE")
    if origin.container_image and own and origin.container_image != own:
        return f"its image is {origin.container_image}, and this process is of {own}"
    return None
