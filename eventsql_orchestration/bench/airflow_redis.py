"""A Redis beside Airflow, for the trigger of Airflow's own Redis provider."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.orchestration.local_processes import HOST, free_port

CHANNEL: Final = "eventsql_bench"

START_TIMEOUT: Final = 30.0
"""Seconds until the server must answer."""


@dataclass(frozen=True, slots=True)
class Redis:
    """A server on a port of this machine."""

    port: int

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def publish(self) -> None:
        """Publish a message to the present listeners. Raises `BenchmarkError` if nobody does."""
        if self._ask(f"PUBLISH {CHANNEL} message") == ":0":
            raise BenchmarkError(f"nobody listens to the channel {CHANNEL!r} of Redis: see the triggerer's log")

    def heard(self) -> bool:
        """Whether a trigger listens. Raises `OSError` without a server."""
        return self._ask(f"PUBSUB CHANNELS {CHANNEL}") == "*1"

    def _ask(self, command: str) -> str:
        """The first line of the answer to a command."""
        with socket.create_connection((HOST, self.port), timeout=START_TIMEOUT) as connection:
            connection.sendall(f"{command}\r\n".encode())
            with connection.makefile(encoding="utf-8") as answer:
                return answer.readline().rstrip()


def missing() -> list[str]:
    """What has to be installed for Redis to be measured."""
    program = [] if shutil.which("redis-server") else ["redis-server"]
    # Airflow's package has a spec also where its providers are missing.
    provider = [] if importlib.util.find_spec("redis") else ["apache-airflow-providers-redis"]
    return program + provider


@contextmanager
def redis(directory: Path) -> Iterator[Redis | None]:
    """A server for the block, without files in use; None where it is `missing`. Raises `BenchmarkError`."""
    program = shutil.which("redis-server")
    if program is None or missing():
        yield None
        return
    server = Redis(free_port(0))
    command = [program, "--bind", HOST, "--port", str(server.port), "--save", "", "--appendonly", "no"]
    with (
        (directory / "redis.log").open("wb") as log,
        subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            _wait(server, process)
            yield server
        finally:
            process.terminate()


def _wait(server: Redis, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            server.heard()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"redis-server did not start: {error}") from error
        time.sleep(0.05)
