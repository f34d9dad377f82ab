"""A Redis beside Airflow, for the trigger of Airflow's own Redis provider."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from dataclasses import dataclass
from typing import Final

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.orchestration.local_processes import HOST, free_port

CHANNEL: Final = "eventsql_bench"

TIMEOUT: Final = 30.0
"""Seconds for an answer, and until the server must answer first."""


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

    def answers(self) -> bool:
        try:
            return self._ask("PING") == "+PONG"
        except OSError:
            return False

    def _ask(self, command: str) -> str:
        """The first line of the answer to a command."""
        with socket.create_connection((HOST, self.port), timeout=TIMEOUT) as connection:
            connection.sendall(f"{command}\r\n".encode())
            with connection.makefile(encoding="utf-8") as answer:
                return answer.readline().rstrip()


def missing() -> list[str]:
    """The programs and packages that have to be installed for Redis to be measured."""
    program = [] if shutil.which("redis-server") else ["redis-server"]
    # Airflow's package has a spec even if its providers are missing.
    provider = [] if importlib.util.find_spec("redis") else ["apache-airflow-providers-redis"]
    return program + provider


def start_redis(crew: Crew, directory: str) -> Redis | None:
    """Start a server without files in use; None if it is `missing`. Raises `BenchmarkError`."""
    program = shutil.which("redis-server")
    if program is None or missing():
        return None
    server = Redis(free_port(0))
    command = [program, "--bind", HOST, "--port", str(server.port), "--save", "", "--appendonly", "no"]
    crew.start(roles.run_program, "redis-server", command=command, directory=directory, environment={})
    crew.go()
    crew.wait(server.answers, limit=TIMEOUT, what="the start of redis-server")
    return server
