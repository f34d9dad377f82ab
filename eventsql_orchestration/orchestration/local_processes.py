"""The processes of `eventsql dev`: one owner of a directory, its ports, and the processes that a killed owner left."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from eventsql_orchestration.orchestration.errors import LocalProcessError

HOST: Final = "127.0.0.1"

PROCESSES_LOCK: Final = "processes.lock"
"""A file with the numbers of process groups. Their processes inherit its lock, so they are alive while it is held."""

SPARK_LOCK: Final = "spark.lock"
"""The same file for the Spark Connect server, which may be started again while the other processes run."""

_OWNER_LOCK: Final = "dev.lock"

_OWN_TMPDIR: Final = "let TMPDIR name a directory of your own"

_KILL_TIMEOUT: Final = 10.0
"""Seconds in which killed processes must be gone."""


def python_path(*directories: Path) -> str:
    """PYTHONPATH for processes that import from these directories first."""
    return os.pathsep.join(filter(None, [*map(str, directories), os.environ.get("PYTHONPATH")]))


def free_port(preferred: int) -> int:
    """`preferred` if no process listens there, else a port that the system chooses."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return int(probe.getsockname()[1])
    raise LocalProcessError("no TCP port is free on 127.0.0.1")


@contextlib.contextmanager
def reserved_port(preferred: int) -> Iterator[int]:
    """As `free_port`. This function gives the port to no other process of this user during the block."""
    with _ports_lock() as lock:
        for wanted in (preferred, *[0] * 20):
            port = free_port(wanted)
            # The last owner of the lock may listen there by now.
            if _port_locked(lock, port) and free_port(port) == port:
                yield port
                return
    raise LocalProcessError("no TCP port is free on 127.0.0.1")


@contextlib.contextmanager
def _ports_lock() -> Iterator[int]:
    """The open file whose bytes stand for ports. Raises `LocalProcessError` if it belongs to another user."""
    path = Path(tempfile.gettempdir()) / f"eventsql-ports-{os.getuid()}.lock"
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(lock_file(path))
        except OSError as error:
            raise LocalProcessError(f"{path} cannot be opened: {error.strerror}; {_OWN_TMPDIR}") from error
        # Another user could hold its locks for ever.
        if os.fstat(lock).st_uid != os.getuid():
            raise LocalProcessError(f"{path} belongs to another user: {_OWN_TMPDIR}")
        yield lock


def _port_locked(lock: int, port: int) -> bool:
    # Each port is a byte of the file. A POSIX lock belongs to a process, and ends with it.
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        return True
    return False


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to the processes of a group, if any are left."""
    # macOS refuses to signal a group whose processes have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_group(group: int) -> None:
    """Kill the processes of a group, if any are left."""
    signal_group(group, signal.SIGKILL)


@contextlib.contextmanager
def only_one(directory: Path, *, kill: Callable[[int], None] = kill_group) -> Iterator[None]:
    """Keep every other `eventsql dev` out of a directory. First end the processes that a killed `eventsql dev` left.

    `kill` gets the number of each process group, and kills the group; by default it is `kill_group`. Raises
    `LocalProcessError` if another `eventsql dev` runs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with lock_file(directory / _OWNER_LOCK) as lock:
        if not try_lock(lock):
            raise LocalProcessError(f"another `eventsql dev` runs on {directory}: end it first")
        for name in (PROCESSES_LOCK, SPARK_LOCK):
            _end_orphans(directory / name, kill)
        yield


@contextlib.contextmanager
def temporary_directory(directory: Path) -> Iterator[Path]:
    """A directory for the temporary files of processes that are killed. Call it while `only_one` holds `directory`.

    It is removed at the end of the block or, if the owner is killed, at its next start. Its path is short, because it
    holds sockets. Raises `LocalProcessError` if another user has made it.
    """
    # Another user's directory could not be removed.
    name = hashlib.sha256(os.fsencode(f"{os.getuid()} {directory.resolve()}")).hexdigest()[:8]
    made = Path(tempfile.gettempdir()) / f"eventsql-dev-{name}"
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(mode=0o700)
    except FileExistsError as error:
        raise LocalProcessError(f"{made} cannot be removed, and may belong to another user: {_OWN_TMPDIR}") from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a file to lock it; gives its descriptor. It is made if it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file. False if another process has its lock."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _end_orphans(path: Path, kill: Callable[[int], None]) -> None:
    with lock_file(path) as lock:
        if try_lock(lock):
            return
        # A process that inherited the lock is alive, so no other process has the number of its group.
        groups = os.read(lock, 256).split()
        # This process's own session may have got the number of a group that has ended: leave that number out.
        for group in {int(each) for each in groups} - {os.getsid(0), os.getpgrp()}:
            kill(group)
        deadline = time.monotonic() + _KILL_TIMEOUT
        while not try_lock(lock):
            if time.monotonic() >= deadline:
                named = b", ".join(groups).decode() or "unknown"
                raise LocalProcessError(f"processes of an earlier `eventsql dev` still run (groups {named}): end them")
            time.sleep(0.05)


def take_lock(descriptor: int, directory: Path) -> None:
    """Lock an open file, and empty it. Raises `LocalProcessError` if the processes of a directory run already."""
    if not try_lock(descriptor):
        raise LocalProcessError(f"processes of `eventsql dev` run on {directory} already: end them first")
    # The number of an earlier group may be another program's by now.
    os.ftruncate(descriptor, 0)


def start_group(lock: Path, start: Callable[[int], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process that inherits the lock of a file, and leads a group of its own, which `only_one` ends.

    `start` gets the descriptor to pass on. Raises `LocalProcessError` if the processes of the lock run already.
    """
    with lock_file(lock) as descriptor:
        take_lock(descriptor, lock.parent)
        process = start(descriptor)
        os.write(descriptor, str(process.pid).encode())
    return process
