"""The processor time that processes take, with all that they have started: what a figure costs, whatever its rate."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")

_PARENT: Final = 1
_TIMES: Final = slice(11, 15)
"""Places in /proc/PID/stat, counted after the program's name: the parent, and the ticks that the process and those of
its children that have ended took, in its own code and in the kernel's."""


def seconds(roots: Iterable[int]) -> float | None:
    """Processor seconds that the processes of these ids and their descendants have taken until now.

    None where the system does not tell (it has no /proc, as macOS).
    """
    stats = _stats()
    if not stats:
        return None
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    ticks, left = 0, [pid for pid in roots if pid in stats]
    while left:
        pid = left.pop()
        ticks += stats[pid][1]
        left += children.get(pid, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, tuple[int, int]]:
    """The parent of each process, and the ticks that it and its ended children took."""
    found = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            # The program's name is in brackets, and may hold anything.
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            # It has ended meanwhile.
            continue
        found[int(entry.parent.name)] = (int(fields[_PARENT]), sum(map(int, fields[_TIMES])))
    return found


class Meter:
    """Measures from its making on. `groups` are the processes of each kind of work, by their ids."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = {name: tuple(pids) for name, pids in groups.items()}
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        taken = {name: seconds(pids) for name, pids in self._groups.items()}
        return {name: value for name, value in taken.items() if value is not None}

    def taken(self) -> dict[str, float]:
        """Processor seconds of each kind of work since then; empty where the system does not tell."""
        now = self._now()
        return {name: now[name] - before for name, before in self._before.items()}
