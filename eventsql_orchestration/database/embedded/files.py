"""Files of the embedded server that several processes share, and the ports that it listens on."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path

from eventsql_orchestration.database.embedded.configuration import HOST
from eventsql_orchestration.database.embedded.programs import Account
from eventsql_orchestration.errors import EmbeddedServerError

POLL = 0.02
"""Seconds between two looks at a server that starts or stops."""

_PORTS = range(20000, 27000)
"""Below the ports that the kernel lends to outgoing connections (from 32768 on Linux, 49152 on macOS), so that no
connection of another program sits on our port while the server is down; and free of the better known services."""


def write_file(path: Path, content: str, owner: Account | None = None) -> None:
    """Write a file that only its owner reads (0600); a reader finds all of the old or all of the new content."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    new = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if owner is not None:
            os.chown(new, owner.uid, owner.gid)
        new.replace(path)
    except BaseException:
        new.unlink()
        raise


def lock_file(path: Path, deadline: float) -> int:
    """Lock the file for this descriptor; the kernel frees the lock when its process dies."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that was removed meanwhile locks nobody out.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise EmbeddedServerError(f"another process has held {path} for too long: see which with fuser {path}")
        time.sleep(POLL)


def is_free_port(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PostgreSQL does: connections that linger in TIME_WAIT do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    for _ in range(100):
        port = secrets.choice(_PORTS)
        if is_free_port(port):
            return port
    raise EmbeddedServerError(
        f"no free port was found between {_PORTS.start} and {_PORTS.stop - 1}: end the programs that hold them"
    )
