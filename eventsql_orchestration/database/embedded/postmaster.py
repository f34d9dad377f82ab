"""The server process of a data directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eventsql_orchestration.database.embedded.programs import run_program


@dataclass(frozen=True)
class Postmaster:
    """The server process of a data directory, as its postmaster.pid tells and the process table confirms."""

    pid: int
    port: int
    ready: bool

    @classmethod
    def of(cls, data: Path) -> Postmaster | None:
        """The live postmaster of the data directory, ready or not."""
        lines = _pid_file_lines(data)
        if len(lines) < 2 or not lines[0].isdigit():
            return None
        pid, served = int(lines[0]), lines[1]
        # Another directory's server wrote this file if the data was copied while it ran.
        if Path(served).exists() and not data.samefile(served):
            return None
        if not _runs_postgres_on(pid, served):
            return None
        port = int(lines[3]) if len(lines) > 3 and lines[3].isdigit() else 0
        return cls(pid, port, ready=len(lines) > 7 and lines[7].strip() == "ready")


def _pid_file_lines(data: Path) -> list[str]:
    try:
        return (data / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []


def _runs_postgres_on(pid: int, data: str) -> bool:
    """Whether the process is a live `postgres -D data`; a zombie and a stranger with a reused number are not.

    By its command line: /proc/<pid>/cwd would say the same, but a container's root may not read it.
    """
    if Path("/proc/self/cmdline").exists():
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return arguments[0].endswith(b"/postgres") and os.fsencode(data) in arguments
    command = run_program(["ps", "-ww", "-o", "command=", "-p", str(pid)], None).stdout
    return "postgres" in command and data in command


def remove_misleading_files(data: Path) -> None:
    """Remove what a dead server left behind and PostgreSQL would take for signs of a live one.

    That is a postmaster.pid whose number now belongs to a stranger or a zombie, and any socket. A postmaster.pid whose
    process is gone stays: PostgreSQL replaces it itself, after it has made sure that no session of the dead server
    is left. (It also makes sure without the file, by the inode of the data directory.)
    """
    for socket_file in data.glob(".s.PGSQL.*"):
        socket_file.unlink(missing_ok=True)
    lines = _pid_file_lines(data)
    if not lines or not lines[0].isdigit():
        return
    try:
        os.kill(int(lines[0]), 0)
    except ProcessLookupError:
        return
    except PermissionError:
        pass  # It exists, and is another user's.
    (data / "postmaster.pid").unlink(missing_ok=True)
