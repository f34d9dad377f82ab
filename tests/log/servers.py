"""The ways in which the fault run breaks a server of PostgreSQL, and has it back."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from eventsql_orchestration.database.embedded import EmbeddedPostgres

PATIENCE: Final = 60.0
"""Seconds for a server to come back by itself."""


def stop_at_once(server: EmbeddedPostgres, _drawn: random.Random) -> None:
    server.stop(mode="immediate")
    server.start()


def kill_all(server: EmbeddedPostgres, _drawn: random.Random) -> None:
    """Kill the postmaster and every process that it has begun, as the loss of power does."""
    postmaster = server.start().pid
    # Stopped first: it begins no further process meanwhile.
    os.kill(postmaster, signal.SIGSTOP)
    for pid in (*_children(postmaster), postmaster):
        os.kill(pid, signal.SIGKILL)
    server.start()


def kill_postmaster(server: EmbeddedPostgres, _drawn: random.Random) -> None:
    """Kill the postmaster alone: sessions go on until their next wait."""
    os.kill(server.start().pid, signal.SIGKILL)
    server.start()


def kill_session(server: EmbeddedPostgres, drawn: random.Random) -> None:
    """Kill the process of one session, as a system out of memory does: the server ends all others and recovers."""
    with server.start().connect("postgres") as connection:
        sessions = connection.execute(
            "SELECT pid FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND datname <> 'postgres' ORDER BY pid"
        ).fetchall()
    os.kill(drawn.choice(sessions)[0], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while server.status() is None:
        assert time.monotonic() < deadline, "the server has not come back"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


Way: TypeAlias = Callable[[EmbeddedPostgres, random.Random], None]

WAYS: Final[tuple[Way, ...]] = (
    stop_at_once, kill_all, kill_postmaster, kill_session,
)  # fmt: skip
