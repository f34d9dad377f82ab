"""A real PgBouncer before the tests' server, in transaction mode as mean as it can be set.

Each transaction of a client is answered by another of its few connections to the server, in turn.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from sqlalchemy.engine import make_url

from eventsql_orchestration.orchestration.local_processes import free_port
from tests.waiting import PATIENCE, wait_until

SERVERS: Final = 6
"""Connections to the server that the pooler has for each database."""

PROGRAM: Final = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

MISSING: Final = "no PgBouncer is installed here: `make pgbouncer` installs it where it can"

_SETTINGS = """
[databases]
* = host={host} port={port} user={user} password={password}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {servers}
max_client_conn = 500
server_round_robin = 1
query_wait_timeout = 5
server_login_retry = 0.1
logfile = {home}/pgbouncer.log
pidfile = {home}/pgbouncer.pid
"""

_NOT_LEFT = (
    "application_name", "client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings",
    "transaction_isolation", "transaction_read_only", "transaction_deferrable",
)  # fmt: skip
"""Settings that the pooler itself gives a server's session, as the present client has them, and settings that begin
again with each transaction."""


@dataclass
class PgBouncer:
    """One that runs; `port` is where it listens on loopback."""

    home: Path
    port: int
    uid: int
    gid: int
    _process: subprocess.Popen[bytes] | None = None

    def url(self, dsn: str) -> str:
        """The URL of a database that leads through the pooler."""
        return make_url(dsn).set(host="127.0.0.1", port=self.port, query={}).render_as_string(hide_password=False)

    def start(self) -> None:
        assert PROGRAM is not None
        root = os.geteuid() == 0
        self._process = process = subprocess.Popen(
            [PROGRAM, "--quiet", str(self.home / "pgbouncer.ini")],
            # It refuses to run as root.
            user=self.uid if root else None,
            group=self.gid if root else None,
            extra_groups=[] if root else None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: process.poll() is not None or self._listens(), "PgBouncer listens")
        assert process.poll() is None, (self.home / "pgbouncer.log").read_text()

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            self._process = None


@contextmanager
def running(dsn: str, *, servers: int = SERVERS, mode: str = "transaction") -> Iterator[PgBouncer]:
    """One before the server that `dsn` names, with so many connections to it for each database.

    `mode` says for how long a client has one of them: a transaction or its session.
    """
    url = make_url(dsn)
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    home = Path(tempfile.mkdtemp(prefix="eventsql-pooler-"))
    port = free_port(0)
    settings = home / "pgbouncer.ini"
    settings.touch(mode=0o600)
    settings.write_text(
        _SETTINGS.format(
            host=url.host, port=url.port, user=url.username, password=url.password,
            listen=port, servers=servers, home=home, mode=mode,
        )
    )  # fmt: skip
    if os.geteuid() == 0:
        for path in (home, settings):
            os.chown(path, account.pw_uid, account.pw_gid)
    pooler = PgBouncer(home, port, account.pw_uid, account.pw_gid)
    try:
        pooler.start()
        yield pooler
    finally:
        pooler.stop()
        shutil.rmtree(home, ignore_errors=True)


def left_behind(dsn: str, *, servers: int = SERVERS) -> list[tuple[object, ...]]:
    """What the sessions of the pooler on the server keep: each is held by a transaction while the others are looked at.

    Settings, prepared statements, channels, advisory locks and temporary tables.
    """
    found: list[tuple[object, ...]] = []
    with ExitStack() as opened:
        for _ in range(servers):
            connection = opened.enter_context(psycopg.connect(dsn, prepare_threshold=None))
            found += connection.execute(
                """
                SELECT 'setting', name || ' = ' || setting FROM pg_settings
                WHERE source = 'session' AND NOT name = ANY (%s)
                UNION ALL SELECT 'statement', name FROM pg_prepared_statements
                UNION ALL SELECT 'channel', channel FROM pg_listening_channels() channel
                UNION ALL SELECT 'lock', l.objid::text FROM pg_locks l
                          WHERE l.locktype = 'advisory' AND l.pid = pg_backend_pid()
                UNION ALL SELECT 'table', relname FROM pg_class WHERE relnamespace = pg_my_temp_schema()
                """,
                [list(_NOT_LEFT)],
            ).fetchall()
    return found
