"""The process of a run: machine, process number and start time. A tag of the run names it. For Linux."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from eventsql_orchestration.dagster.tags import FORMER, HIDDEN

WORKER_TAG: Final = f"{HIDDEN}worker"
"""The tag that names a run's process. A re-execution copies the tag, so the value also names the run."""

_FORMER_TAG: Final = f"{FORMER}worker"


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that executes a run.

    `host` is the machine's name, which may change: it is only for messages. `processes` names the boot of the machine
    and the PID namespace of `pid`. `started` tells the process from a later process with the same number.
    """

    run: str
    host: str
    processes: str
    pid: int
    started: str

    @classmethod
    def of_process(cls, run: str, pid: int) -> Self:
        """The worker for process `pid` of this machine, which executes `run`."""
        return cls(run, socket.gethostname(), visible_processes(), pid, _started(pid) or "")

    @classmethod
    def of(cls, run: str, tags: Mapping[str, str]) -> Self | None:
        """The worker that the tags of a run name; None if they name none, or the worker of another run."""
        try:
            found = cls(**json.loads(tags.get(WORKER_TAG) or tags[_FORMER_TAG]))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.run == run else None

    def tags(self) -> dict[str, str]:
        return {WORKER_TAG: json.dumps(asdict(self))}

    @property
    def is_here(self) -> bool:
        """Whether this process sees the worker's process number."""
        return self.processes == visible_processes()

    def is_alive(self) -> bool:
        """Whether the process runs. The worker has to be here."""
        return _started(self.pid) == self.started

    def interrupt(self) -> bool:
        """Ask the process to end its run. Gives False if the process has ended. Raises `PermissionError`."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True


def visible_processes() -> str:
    """The boot and the PID namespace of this process; empty if the system does not tell them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The start time of a process in clock ticks since the boot; None for a process that has ended."""
    try:
        # The name of the program, in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
