"""A Spark Connect server of this machine, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyspark

from eventsql_orchestration.spark import spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.spark.processes import free_port, kill, wait_until

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


def environment(home: Path) -> dict[str, str]:
    """What Spark's own programs need of their environment, and nothing that stands in for a missing option."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("EVENTSQL_", "SPARK_"))},
        "JAVA_HOME": str(ensure_java(home).home),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": sys.executable,
        # Left to itself it announces this machine's address.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextmanager
def connect_server(home: Path) -> Iterator[str]:
    """A server for the block, on loopback alone; gives the address of its clients."""
    port = free_port()
    settings = {
        **spark_config(**{"spark.driver.memory": "768m"}),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.sql.shuffle.partitions": "1",
    }
    confs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    environ = environment(home)
    with (home / "connect.log").open("wb") as log:
        server = psutil.Popen(
            [f"{environ['SPARK_HOME']}/bin/spark-submit", "--class", SERVER, *confs, "spark-internal"],
            cwd=home, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: _answers(server, port), "the Connect server answers")
        yield f"sc://127.0.0.1:{port}"
    finally:
        kill(server)
        server.wait(60)


def _answers(server: psutil.Popen, port: int) -> bool:
    assert server.poll() is None, "the Connect server has died"
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
