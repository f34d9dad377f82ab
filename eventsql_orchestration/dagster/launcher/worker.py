"""The process of a run, as a tag of the run names it: machine, process number and start time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

WORKER_TAG: Final = "eventsql/worker"
"""The tag of a run with its process. A re-execution copies the tag, so the tag names its run, too."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that executes a run. `started` tells it from a later process with the same number."""

    run: str
    host: str
    pid: int
    started: str

    @classmethod
    def this_process(cls, run: str) -> Self:
        """The worker that this process is for a run."""
        pid = os.getpid()
        return cls(run, this_host(), pid, _started(pid) or "")

    @classmethod
    def of(cls, run: str, tags: Mapping[str, str]) -> Self | None:
        """The worker that the tags of a run name; None if the tags name none, or that of another run."""
        try:
            found = cls(**json.loads(tags[WORKER_TAG]))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.run == run else None

    def tags(self) -> dict[str, str]:
        """The tags for the run."""
        values = {"run": self.run, "host": self.host, "pid": self.pid, "started": self.started}
        return {WORKER_TAG: json.dumps(values)}

    @property
    def is_here(self) -> bool:
        """Whether this process sees the worker's process numbers."""
        return self.host == this_host()

    def is_alive(self) -> bool:
        """Whether the process runs. The worker has to be here."""
        return _started(self.pid) == self.started

    def interrupt(self) -> bool:
        """Ask the process to end its run. Gives False if the process has ended."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True


def this_host() -> str:
    """The name of this machine and, on Linux, the set of process numbers that this process sees."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{name} {Path('/proc/self/ns/pid').readlink()} {boot}"
    except OSError:
        return name


def _started(pid: int) -> str | None:
    """When a process started, in the system's own words; None for a process that has ended."""
    if _PROC.exists():
        try:
            # The name of the program, in parentheses, may hold spaces.
            fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    listed = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = listed.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()
