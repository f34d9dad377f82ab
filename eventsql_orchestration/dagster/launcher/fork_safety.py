"""Whether this process may be forked: it has one thread, and no sockets except the given sockets. For Linux."""

from __future__ import annotations

import os
import stat
import threading


def open_sockets() -> set[int]:
    """The file descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are enough
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
        except OSError:
            continue
    return found


def obstacle(given: set[int]) -> str | None:
    """Why this process must not be forked, in words; None if it may be. `given` are the sockets that may be open."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"it starts threads when it is imported ({', '.join(others)})"
    if opened := open_sockets() - given:
        return f"it opens {len(opened)} network connections or sockets when it is imported"
    if (threads := _threads_after_fork()) > 1:
        return f"a native library that it imports keeps {threads - 1} threads"
    return None


def _threads_after_fork() -> int:
    """The number of threads after a fork. Libraries that allow forks, as OpenBLAS does, end their threads before it."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - only the number matters
