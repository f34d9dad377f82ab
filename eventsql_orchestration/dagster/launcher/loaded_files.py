"""The files that a location was loaded from, and whether one has changed since."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

_Stamp = tuple[int, ...] | frozenset[str] | None

_SOURCES: Final = (".py", ".so", ".yaml", ".yml", ".toml")
"""Endings of source files. A source file that is added to or removed from a directory is a change of the location."""

_LOOKED_AT: Final = 1_000
"""Maximum number of entries of a new directory that are searched for a source. A directory of data has more."""


class LoadedFiles:
    """The files and directories that this process has read to load a location.

    They are modules, files that the location opened, and directories outside of the environment's packages. A file that
    changed while it was loaded counts as changed: `since` is the time before the process started, in ns since the
    epoch. A file whose change time is in the future counts as unchanged: it comes from a machine whose clock is fast.

    For a package's file, the change time of the inode does not count. Installers link one copy of a package into
    several environments, and each link sets that time.
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
        """Record during the block. Python cannot remove an audit hook, so a process may do this only once."""
        # Otherwise, Python would not list again a directory that it has listed before, and the hook would miss it.
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
                stamp = self._stamps.setdefault(path, self._file_stamp(path))
                # Python may have read the module before this change.
                if isinstance(stamp, tuple) and self._since <= stamp[0] <= time.time_ns():
                    self._changed = path

    def watch(self, path: str) -> None:
        """Watch a file that need not exist."""
        self._stamps.setdefault(path, self._file_stamp(path))

    def changed(self) -> str | None:
        """The path of a file that was changed, added or removed since the load; None if there is none."""
        for path, stamp in self._stamps.items():
            if isinstance(stamp, frozenset):
                if differing := stamp ^ _directory_stamp(path):
                    return os.path.join(path, min(differing))  # noqa: PTH118 - a path is a str here
            elif self._file_stamp(path) != stamp:
                return path
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
                # Listing the directory and its subdirectories causes further audit events.
                self._recording = False
                self._stamps[path] = _directory_stamp(path)
                self._recording = True
        elif len(arguments) < 3 or not _writes(arguments[2]):
            stamp = self._file_stamp(path)
            if stamp is not None:
                self._stamps[path] = stamp

    def _file_stamp(self, path: str) -> _Stamp:
        """The time of a file's last change in ns, its size and its inode. Another file at the path has other values."""
        try:
            found = os.stat(path)  # noqa: PTH116 - thousands of files for each run
        except OSError:
            return None
        if path.startswith(self._packages):
            return (found.st_mtime_ns, found.st_size, found.st_ino)
        return (max(found.st_mtime_ns, found.st_ctime_ns), found.st_mtime_ns, found.st_size, found.st_ino)


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _directory_stamp(path: str) -> frozenset[str]:
    """The sources in a directory, and the directories in it that have sources.

    Other files and directories do not count, because the location's runs may write them.
    """
    try:
        with os.scandir(path) as entries:
            return frozenset(entry.name for entry in entries if _is_source(entry) or _has_source(entry))
    except OSError:
        return frozenset()


def _is_source(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(_SOURCES) and not entry.name.startswith(".")


def _has_source(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a directory with a source. Looks only at the first entries in and below it."""
    directories, left = [entry], _LOOKED_AT
    while directories and left:
        entry = directories.pop(0)
        if entry.name.startswith((".", "__pycache__")):
            continue
        try:
            if not entry.is_dir():
                continue
            with os.scandir(entry.path) as entries:
                found = list(islice(entries, left))
        except OSError:
            continue
        if any(map(_is_source, found)):
            return True
        directories += found
        left -= len(found)
    return False
