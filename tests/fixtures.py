"""Fixtures of every room: sessions of their own, real processes, and the statements that a connection sends."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TypeAlias

import psycopg
import pytest
from psycopg.pq import Trace

from eventsql_orchestration.database import Connection, Database, single_statement
from eventsql_orchestration.publishing import batches, log_room
from eventsql_orchestration.storage import log_form, segments
from tests import worker
from tests.waiting import PATIENCE, wait_until

MEMORY_DISK_BYTES = 2**32
"""Free bytes of a disk in memory that the servers of a run of tests may need."""

Sessions: TypeAlias = Callable[[], Connection]
Terminate: TypeAlias = Callable[[Connection], None]
Until: TypeAlias = Callable[[Callable[[], object]], None]
UntilBlocked: TypeAlias = Callable[..., None]
Spawn: TypeAlias = Callable[..., "Worker"]
SaidBy: TypeAlias = Callable[[Database | Connection], "Said"]


def memory_disk() -> Path | None:
    """A disk in memory for servers, where there is one with room that runs programs: few tests are about the disk."""
    disk = Path("/dev/shm")
    if not disk.is_dir():
        return None
    state = os.statvfs(disk)
    return disk if state.f_bavail * state.f_frsize > MEMORY_DISK_BYTES and not state.f_flag & os.ST_NOEXEC else None


@pytest.fixture
def sessions(direct_dsn: str) -> Iterator[Sessions]:
    """Opens sessions whose transactions the test holds open; whatever they left is rolled back at the end."""
    opened: list[Connection] = []

    def session() -> Connection:
        opened.append(psycopg.connect(direct_dsn))
        return opened[-1]

    yield session
    for connection in opened:
        connection.close()


@pytest.fixture
def session(sessions: Sessions) -> Connection:
    """A session in autocommit mode, beside the connections of the platform."""
    opened = sessions()
    opened.autocommit = True
    return opened


@pytest.fixture
def terminate(session: Connection) -> Terminate:
    """Ends the server's session of a connection whose transaction is open, as an administrator or a failover does.

    The server tells the process number: a pooler tells its clients a number of its own.
    """

    def end(connection: Connection) -> None:
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (None,)
        assert session.execute("SELECT pg_terminate_backend(%s, 60000)", [pid]).fetchone() == (True,)

    return end


@pytest.fixture
def until() -> Until:
    """Waits until a condition holds that another thread or process brings about."""
    return wait_until


@pytest.fixture
def until_blocked(direct_dsn: str, until: Until) -> UntilBlocked:
    """Waits until so many sessions of the test's database wait for a lock, one by default."""

    def wait(sessions: int = 1) -> None:
        blocked = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        with psycopg.connect(direct_dsn, autocommit=True) as connection:
            until(lambda: connection.execute(blocked).rowcount >= sessions)

    return wait


class Worker:
    """A process of `worker.py`, forked from one that has imported everything already."""

    def __init__(self, *arguments: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["eventsql_orchestration.shards.shard", "tests.worker", "tests.dying"])
        self._wire, theirs = context.Pipe()
        self._process = context.Process(target=worker.play, args=(theirs, *arguments))
        self._process.start()
        theirs.close()

    def line(self) -> str:
        """The next line that it says."""
        assert self._wire.poll(PATIENCE), "the process says nothing"
        return str(self._wire.recv())

    def tell(self, line: str) -> None:
        self._wire.send(line)

    def kill(self) -> None:
        """SIGKILL: it has no time for anything."""
        self._process.kill()
        self._process.join(PATIENCE)

    def end(self) -> int | None:
        """Wait for its end; gives its exit code."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._wire.close()


@pytest.fixture
def spawn(dsn: str) -> Iterator[Spawn]:
    """Starts processes on the test's database; none outlives the test."""
    started: list[Worker] = []

    def start(role: str, *arguments: object) -> Worker:
        started.append(Worker(role, dsn, *map(str, arguments)))
        return started[-1]

    yield start
    for each in started:
        each.close()


class Said:
    """The statements that connections send, as the driver sends them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._position = 0

    def listen(self, connection: Connection) -> None:
        connection.pgconn.trace(self._file.fileno())
        connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)

    def statements(self) -> list[str]:
        """Those since the last time, in order; `;` is the pool's look whether a connection is alive."""
        texts: dict[str, str] = {}
        bound, found = "", []
        for message in re.split(r"^(?=[FB]\t\d+\t)", self._new(), flags=re.MULTILINE):
            kind, _, rest = message.partition("\t")[2].partition("\t")[2].partition("\t")
            if not message.startswith("F"):
                continue
            if kind == "Query":
                found.append(" ".join(rest.strip().removeprefix('"').removesuffix('"').split()))
            elif kind == "Parse":
                name, _, statement = rest.strip().partition(" ")
                texts[name] = " ".join(statement.removeprefix('"').split())
            elif kind == "Bind":
                bound = rest.split()[1]
            elif kind == "Execute":
                found.append(texts.get(bound, bound))
        return found

    def verbs(self) -> list[str]:
        """The first words of those since the last time."""
        return [statement.split()[0] for statement in self.statements()]

    def round_trips(self) -> int:
        """How often the driver has waited for an answer since the last time."""
        return len(re.findall(r"^F\t\d+\t(?:Sync|Query)\b", self._new(), flags=re.MULTILINE))

    def _new(self) -> str:
        self._file.seek(self._position)
        text = self._file.read().decode(errors="replace")
        self._position = self._file.tell()
        return text


@pytest.fixture
def said_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[SaidBy]:
    """Listens to what a connection, or the one that a pool hands out to one thread, says from here on."""
    if sys.platform != "linux":
        pytest.skip("psycopg traces connections on Linux alone")
    heard: list[Connection] = []
    with tempfile.TemporaryFile("w+b") as file:

        def listen(source: Database | Connection) -> Said:
            said = Said(file)
            # On a busy machine, a form or a plan may be looked up again in the middle of what is counted.
            log_form._known.update({log: (math.inf, form) for log, (_, form) in log_form._known.items()})
            monkeypatch.setattr(single_statement, "BRIEF_SECONDS", math.inf)
            with source.connection() if isinstance(source, Database) else nullcontext(source) as connection:
                heard.append(connection)
                said.listen(connection)
            said.statements()
            return said

        yield listen
        for connection in heard:
            if not connection.closed:
                connection.pgconn.untrace()


@pytest.fixture
def single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a batch go into the buffer event by event in either form: one row each, which a transfer may move alone."""
    monkeypatch.setattr(batches, "LEAST_IN_BLOCK", 10**9)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of ten ids, so that a test can fill several, and a look for each batch whether there are some ahead."""
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 10)
    monkeypatch.setattr(log_room, "ROOM_CHECK", 1)
