"""A fork server to which the system refuses processes while the file that the variable REFUSING names is there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from eventsql_orchestration.dagster.launcher import server

fork = os.fork


def refusing_fork() -> int:
    if Path(os.environ["REFUSING"]).exists():
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


if __name__ == "__main__":
    os.fork = refusing_fork
    server.main()
