"""The machine and the server of a figure with their settings, and the processor time that processes take."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from eventsql_orchestration.database import Connection, Queries

_SETTINGS: Final = (
    "autovacuum", "autovacuum_naptime", "checkpoint_timeout", "effective_cache_size", "fsync", "full_page_writes",
    "jit", "maintenance_work_mem", "max_connections", "max_wal_size", "shared_buffers", "synchronous_commit",
    "synchronous_standby_names", "wal_buffers", "wal_compression", "wal_level", "wal_sync_method", "work_mem",
)  # fmt: skip

_PARENT: Final = 1
_TIMES: Final = slice(11, 15)
"""Places in /proc/PID/stat after the program's name: the parent, and the ticks of the process and of its ended
children, in their own code and in the kernel."""


def describe(connection: Connection, queries: Queries) -> dict[str, object]:
    """The machine of this process, and the server of `connection` with its settings of speed and durability."""
    settings = {
        str(name): str(value) for name, value in connection.execute(queries("server_settings"), {"names": [*_SETTINGS]})
    }
    return {
        "package": version("eventsql-orchestration"), "python": platform.python_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(), "cpu_model": _cpu_model(), "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "postgresql": connection.info.parameter_status("server_version"),
        "durable": not undurable(settings), "undurable_because": undurable(settings), "server_settings": settings,
    }  # fmt: skip


def undurable(settings: dict[str, str]) -> list[str]:
    """The settings with which a crash of the server's machine loses acknowledged events."""
    return [f"{name} is off" for name in ("fsync", "synchronous_commit") if settings.get(name) == "off"]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


class Meter:
    """A meter that starts when it is made. `groups` are the ids of the processes of each kind of work."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = {name: tuple(pids) for name, pids in groups.items()}
        self._before = self._now()

    def taken(self) -> dict[str, float]:
        """Processor seconds of each kind of work since the start. Empty on a system without /proc, such as macOS."""
        now = self._now()
        return {name: now[name] - before for name, before in self._before.items()}

    def per_event(self, events: int) -> dict[str, float]:
        """Processor microseconds of each kind of work for each of `events`."""
        return {name: seconds / events * 1e6 for name, seconds in self.taken().items()}

    def _now(self) -> dict[str, float]:
        stats = {int(entry.name): stat for entry in Path("/proc").glob("[0-9]*") if (stat := _stat(int(entry.name)))}
        return {name: _seconds(pids, stats) for name, pids in self._groups.items()} if stats else {}


def server_of(backend: int) -> int | None:
    """The server of a PostgreSQL session of this machine; None if there is no such process here."""
    with suppress(OSError):
        if Path(f"/proc/{backend}/comm").read_text(encoding="utf-8").strip() == "postgres":
            return stat[0] if (stat := _stat(backend)) else None
    return None


def _seconds(roots: Iterable[int], stats: Mapping[int, tuple[int, int]]) -> float:
    """Processor seconds of these processes and their descendants until now."""
    ticks, left = 0, [pid for pid in roots if pid in stats]
    while left:
        pid = left.pop()
        ticks += stats[pid][1]
        left += [child for child, (parent, _) in stats.items() if parent == pid]
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> tuple[int, int] | None:
    """The parent of a process, and the ticks of the process and its ended children; None if it has ended."""
    with suppress(OSError):
        # The program's name is in brackets, and may contain any character.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return int(fields[_PARENT]), sum(map(int, fields[_TIMES]))
    return None
