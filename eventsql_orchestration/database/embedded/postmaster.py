"""The server process of a data directory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from eventsql_orchestration.database.embedded.programs import run_program


@dataclass(frozen=True)
class Postmaster:
    """A live server process: postmaster.pid names it, and the process table confirms it."""

    pid: int
    port: int
    ready: bool

    @classmethod
    def of(cls, data: Path) -> Postmaster | None:
        """The live postmaster of the data directory, ready or not."""
        try:
            lines = (data / "postmaster.pid").read_text().splitlines()
            pid, served = int(lines[0]), lines[1]
        except (FileNotFoundError, NotADirectoryError, ValueError, IndexError):
            return None

        # Data that was copied while its server ran has the original's file.
        if Path(served).exists() and not data.samefile(served):
            return None
        if not _runs_postgres_on(pid, served):
            return None
        port = int(lines[3]) if len(lines) > 3 and lines[3].isdigit() else 0
        return cls(pid, port, ready=len(lines) > 7 and lines[7].strip() == "ready")


def _runs_postgres_on(pid: int, data: str) -> bool:
    """Whether the process is a live `postgres -D data`, by its command line: even root may not read its cwd."""
    if not Path("/proc/self/cmdline").exists():
        command = run_program(["ps", "-ww", "-o", "command=", "-p", str(pid)], None).stdout
        return "postgres" in command and data in command
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return arguments[0].endswith(b"/postgres") and os.fsencode(data) in arguments


def remove_misleading_files(data: Path) -> None:
    """Remove files of a dead server that PostgreSQL would take for files of a live server.

    These are sockets, and a postmaster.pid whose number now belongs to another process. A postmaster.pid without a
    process stays: PostgreSQL replaces it after all sessions of the dead server have ended.
    """
    for socket_file in data.glob(".s.PGSQL.*"):
        socket_file.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError, ProcessLookupError):
        # Signal 0 only asks whether the process exists.
        with contextlib.suppress(PermissionError):
            os.kill(int((data / "postmaster.pid").read_text().splitlines()[0]), 0)
        (data / "postmaster.pid").unlink()
