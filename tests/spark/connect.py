"""A Spark Connect server of this machine, in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyspark
import pytest

from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.spark.connect_server import AUTHENTICATION, ConnectServer
from eventsql_orchestration.spark.java import ensure_java
from tests.spark.processes import kill
from tests.waiting import wait_until


def environment(home: Path) -> dict[str, str]:
    """What Spark's own programs need of their environment, and nothing that stands in for a missing option."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == AUTHENTICATION or not name.startswith(("EVENTSQL_", "SPARK_"))
    }
    return {
        **kept,
        "JAVA_HOME": str(ensure_java(home).home),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        # Left to itself it announces this machine's address.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextmanager
def connect_server(home: Path) -> Iterator[str]:
    """A server for the block, on loopback alone; gives its address. Its token is in the environment of clients."""
    port = free_port(0)
    settings = {"spark.driver.memory": "768m", "spark.sql.shuffle.partitions": "1"}
    server = ConnectServer(
        home, port=port, ui_port=free_port(0), environment=environment(home), settings=settings
    )  # fmt: skip
    process = psutil.Process(server.start().pid)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.client_environment.items():
                patch.setenv(name, value)
            wait_until(lambda: _answers(process, port), "the Connect server answers")
            yield server.remote
    finally:
        kill(process)


def _answers(server: psutil.Process, port: int) -> bool:
    assert server.is_running(), "the Connect server has died"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
