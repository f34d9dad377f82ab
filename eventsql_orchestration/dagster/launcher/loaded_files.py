"""The files that a location was loaded from, and whether one has changed since."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_Stamp = tuple[int, ...] | frozenset[str] | None

_SOURCES: Final = (".py", ".so", ".yaml", ".yml", ".toml")
"""Endings of the files whose coming and going in a directory of the location is a change."""


class LoadedFiles:
    """The files and directories that this process has read to load a location.

    Modules, files that the location opened, and directories outside of the environment's packages. A file that changed
    while it was loaded counts as changed: `since` is the time before the process started, in ns since the epoch. A file
    that was changed in the future is taken for unchanged: it comes from a machine whose clock is fast.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._stamps: dict[str, _Stamp] = {}
        self._recording = False
        self._changed: str | None = None
        packages = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._packages = tuple(path.rstrip("/") + os.sep for path in {*packages, "/proc", "/dev", "/sys"})

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record in the block. Python cannot remove an audit hook, so a process may do this once."""
        # A directory that Python has listed before would not be listed again.
        importlib.invalidate_caches()
        sys.addaudithook(self._audit)
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str):
                stamp = self._stamps.setdefault(path, _file_stamp(path))
                # Python may have read the module before this change.
                if isinstance(stamp, tuple) and self._since <= stamp[1] <= time.time_ns():
                    self._changed = path

    def watch(self, path: str) -> None:
        """Watch a file that need not exist."""
        self._stamps.setdefault(path, _file_stamp(path))

    def changed(self) -> str | None:
        """The path of a file that changed, came or went; None if all is as it was loaded."""
        if self._changed is None:
            for path, stamp in self._stamps.items():
                now = _directory_stamp(path) if isinstance(stamp, frozenset) else _file_stamp(path)
                if now != stamp:
                    self._changed = path
                    break
        return self._changed

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._recording or event not in {"open", "os.listdir", "os.scandir"}:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else None
        if path is None or path.endswith(".pyc"):
            return
        path = os.path.abspath(path)  # noqa: PTH100 - called for each file of an import
        if path in self._stamps:
            return
        if event != "open":
            if not f"{path}{os.sep}".startswith(self._packages):
                # The look at the directory is an event itself.
                self._stamps[path] = frozenset()
                self._stamps[path] = _directory_stamp(path)
        elif len(arguments) < 3 or not _writes(arguments[2]):
            stamp = _file_stamp(path)
            if stamp is not None:
                self._stamps[path] = stamp


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _file_stamp(path: str) -> _Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of files for each run
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def _directory_stamp(path: str) -> _Stamp:
    try:
        with os.scandir(path) as entries:
            return frozenset(
                entry.name for entry in entries
                if not entry.name.startswith((".", "__pycache__")) and (entry.name.endswith(_SOURCES) or entry.is_dir())
            )  # fmt: skip
    except OSError:
        return frozenset()
