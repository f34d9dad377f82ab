"""The surroundings of a figure: the machine, the server and its settings. Without them a figure says nothing."""

from __future__ import annotations

import os
import platform
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
