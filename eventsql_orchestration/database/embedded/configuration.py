"""The settings of the embedded server, by the memory of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

HOST = "127.0.0.1"

_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 108 bytes on Linux and 104 on macOS."""


def memory_bytes() -> int:
    """The memory of this machine, or of the container where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            memory = min(memory, int(Path(limit).read_text()))
    return memory


def server_settings(memory: int, data: Path, port: int) -> dict[str, str]:
    """The settings of a server on a machine with `memory` bytes. Durability (fsync, synchronous_commit) is left on."""
    megabytes = memory // 2**20
    socket_path = os.fsencode(data / f".s.PGSQL.{port}")
    # The setting is a list: a comma or a quote in the path would end its first item. A backslash begins an escape.
    has_socket = len(socket_path) < _SOCKET_PATH_BYTES and not set(str(data)) & set(",\"'\\")
    return {
        "listen_addresses": HOST,
        "port": str(port),
        "unix_socket_directories": str(data) if has_socket else "",
        "max_connections": "200",
        "shared_buffers": f"{min(max(megabytes // 8, 128), 1024)}MB",
        "effective_cache_size": f"{max(megabytes // 2, 256)}MB",
        "maintenance_work_mem": f"{min(max(megabytes // 32, 64), 512)}MB",
        "work_mem": "16MB",
        "random_page_cost": "1.1",
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        # This means pglz in every version; the packaged server is built without lz4 and zstd.
        "wal_compression": "on",
        # A compilation costs more than the short statements of a queue.
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "lc_messages": "C",
        # PostgreSQL's default begins with "$user": a user's tables would land in the platform's schema, which has the
        # name of the server's role.
        "search_path": "public",
        "log_checkpoints": "off",
        # By default autovacuum comes once a minute, after a fifth of the rows has changed. A buffer table changes
        # wholly in between.
        "autovacuum_naptime": "15s",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_threshold": "1000",
        "autovacuum_vacuum_cost_limit": "2000",
    }


def configuration(settings: Mapping[str, str]) -> str:
    lines = [f"{name} = '{value}'" for name, value in settings.items()]
    header = "# Written anew at each start of the embedded server: change a setting with ALTER SYSTEM."
    return "\n".join([header, *lines, ""])
