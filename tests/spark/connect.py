"""Spark's own program for a Spark Connect server, as a team's server runs it, without a Python driver."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyspark
import pytest

from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.spark import spark_config
from eventsql_orchestration.spark.connect_server import AUTHENTICATION, HOST
from eventsql_orchestration.spark.java import ensure_java
from tests.spark.processes import kill
from tests.waiting import wait_until

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


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
    settings = {
        **spark_config(),
        "spark.driver.memory": "768m",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "true",
        "spark.ui.port": str(free_port(0)),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    variables = {**environment(home), AUTHENTICATION: secrets.token_urlsafe(32)}
    program = [str(Path(variables["SPARK_HOME"]) / "bin" / "spark-submit"), "--class", SERVER]
    confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    started = subprocess.Popen([*program, *confs, "spark-internal"], cwd=home, env=variables, stdin=subprocess.DEVNULL)
    process = psutil.Process(started.pid)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(AUTHENTICATION, variables[AUTHENTICATION])
            wait_until(lambda: answers(process, port), "the Connect server answers")
            yield f"sc://{HOST}:{port}"
    finally:
        kill(process)


def answers(server: psutil.Process, port: int) -> bool:
    assert server.is_running(), "the Connect server has died"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
