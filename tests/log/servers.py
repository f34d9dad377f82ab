"""The ways in which the fault run breaks a server of PostgreSQL, and has it back, or its standby in its place."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

import psycopg

from eventsql_orchestration.database.embedded import EmbeddedPostgres
from eventsql_orchestration.errors import EmbeddedServerError
from tests.waiting import wait_until


def stop_at_once(server: EmbeddedPostgres, _drawn: random.Random) -> None:
    server.stop(mode="immediate")
    server.start()


def kill_all(server: EmbeddedPostgres, _drawn: random.Random) -> None:
    """Kill the postmaster and every process that it has begun, as the loss of power does."""
    _lose(server)
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
    wait_until(lambda: server.status() is not None)


class Pair:
    """A primary and its synchronous standby, made of a copy of the primary's files."""

    def __init__(self, primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
        self.primary = primary
        self.standby = standby
        source = primary.start()
        primary.stop()
        shutil.copytree(primary.directory, standby.directory)
        (standby.directory / "port").unlink()
        data = standby.directory / "data"
        (data / "standby.signal").touch()
        place = f"host=127.0.0.1 port={source.port} user=eventsql password={source.password}"
        with (data / "postgresql.auto.conf").open("a") as file:
            file.write(f"primary_conninfo = '{place} application_name=standby'\n")
        with primary.start().connect("postgres") as connection:
            # It runs, and does not get ready before it is promoted.
            with suppress(EmbeddedServerError):
                standby.start(timeout=1.0)
            connection.execute("ALTER SYSTEM SET synchronous_standby_names TO 'standby'")
            connection.execute("SELECT pg_reload_conf()")
            wait_until(
                lambda: connection.execute("SELECT FROM pg_stat_replication WHERE sync_state = 'sync'").rowcount == 1
            )

    def url(self, database: str) -> str:
        """The URL of a database on whichever of both takes writes."""
        server = self.primary.start()
        port = (self.standby.directory / "port").read_text().strip()
        hosts = f"host=127.0.0.1,127.0.0.1&port={server.port},{port}&target_session_attrs=read-write"
        return f"postgresql://eventsql:{server.password}@/{database}?{hosts}"

    def promote(self, *, lose: bool = True) -> None:
        """Promote the standby. With `lose`, the primary is lost before."""
        if lose:
            _lose(self.primary)
        password, port = ((self.standby.directory / name).read_text().strip() for name in ("password", "port"))
        with psycopg.connect(
            host="127.0.0.1", port=port, user="eventsql", password=password, dbname="postgres", autocommit=True
        ) as connection:
            connection.execute("SELECT pg_promote()")


def _lose(server: EmbeddedPostgres) -> None:
    postmaster = server.start().pid
    # Stopped first: it begins no further process meanwhile.
    os.kill(postmaster, signal.SIGSTOP)
    for pid in (*_children(postmaster), postmaster):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


Way: TypeAlias = Callable[[EmbeddedPostgres, random.Random], None]

WAYS: Final[tuple[Way, ...]] = (
    stop_at_once, kill_all, kill_postmaster, kill_session,
)  # fmt: skip
