"""The processor time of processes and of all processes that they started: the cost of a figure at any rate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_PARENT: Final = 1
_TIMES: Final = slice(11, 15)
"""Places in /proc/PID/stat after the program's name: the parent, and the ticks of the process and of its ended
children, in their own code and in the kernel."""


class Meter:
    """A meter that starts when it is made. `groups` are the ids of the processes of each kind of work."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = {name: tuple(pids) for name, pids in groups.items()}
        self._before = self._now()

    def taken(self) -> dict[str, float]:
        """Processor seconds of each kind of work since the start. Empty on a system without /proc, such as macOS."""
        now = self._now()
        return {name: now[name] - before for name, before in self._before.items()}

    def _now(self) -> dict[str, float]:
        stats = _stats()
        return {name: _seconds(pids, stats) for name, pids in self._groups.items()} if stats else {}


def parent(pid: int) -> int | None:
    """The parent of a PostgreSQL process of this machine; None if there is no such process here."""
    with suppress(OSError):
        name, _, fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        if name.partition("(")[2] == "postgres":
            return int(fields.split()[_PARENT])
    return None


def _seconds(roots: Iterable[int], stats: Mapping[int, tuple[int, int]]) -> float:
    """Processor seconds of these processes and their descendants until now."""
    ticks, left = 0, [pid for pid in roots if pid in stats]
    while left:
        pid = left.pop()
        ticks += stats[pid][1]
        left += [child for child, (parent, _) in stats.items() if parent == pid]
    return ticks / os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, tuple[int, int]]:
    """The parent of each process, and the ticks of the process and its ended children."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program's name is in brackets, and may contain any character.
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            # The process has ended meanwhile.
            continue
        found[int(entry.parent.name)] = (int(fields[_PARENT]), sum(map(int, fields[_TIMES])))
    return found
