"""A Spark Connect server for the sessions of many processes: nothing of a session outlives its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

from eventsql_orchestration.orchestration.local_processes import free_port, python_path
from eventsql_orchestration.spark.connect_server import AUTHENTICATION, ConnectServer
from tests.spark.connect import answers, environment
from tests.spark.processes import kill
from tests.waiting import wait_until

CLIENT: Final = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
spark.addArtifacts(sys.argv[2], pyfile=True)
spark.range(1).createOrReplaceTempView("mine")

@udf("string")
def answer(number):
    import added, importable
    return f"{added.ANSWER} {importable.ANSWER}"

print(spark.range(1).select(answer("id")).first()[0])
"""
"""A program that uses modules in Spark's Python, and does not end its session. It adds one of them to the session."""


class Server:
    def __init__(self, directory: Path) -> None:
        self._modules = directory / "modules"
        self._modules.mkdir()
        self.port, self._ui_port = free_port(0), free_port(0)
        # The environment of a program that has a session of Spark Connect, as a notebook gives it to its commands.
        of_client = {"SPARK_API_MODE": "connect", "SPARK_CONNECT_MODE_ENABLED": "1"}
        variables = {**environment(directory), **of_client, "PYTHONPATH": python_path(self._modules)}
        self._server = ConnectServer(
            directory, port=self.port, ui_port=self._ui_port, environment=variables,
            settings={"spark.driver.memory": "768m"},
        )  # fmt: skip
        self.process = psutil.Process(self._server.start().pid)

    def answer_of_client(self, number: int) -> list[int]:
        """The answer of a client if both modules have this number."""
        ran = self.run_client(number)
        assert ran.returncode == 0, ran.stderr[-4000:]
        return [int(word) for word in ran.stdout.split()]

    def run_client(self, number: int, **environment: str) -> subprocess.CompletedProcess[str]:
        added, importable = self._modules.parent / "added.py", self._modules / "importable.py"
        for module in (added, importable):
            module.write_text(f"ANSWER = {number}\n")
        return subprocess.run(
            [sys.executable, "-c", CLIENT, self._server.remote, str(added)],
            env={**os.environ, **self._server.client_environment, **environment}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def sessions(self) -> int:
        """The number of sessions, by the server's own page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ui_port}/connect/") as page:
            text = re.sub(r"<[^>]*>", " ", page.read().decode())
        (found,) = re.findall(r"(\d+)\s*session\(s\) are online", text)
        return int(found)

    def python_processes(self) -> set[int]:
        """The processes that start Spark's Python workers."""
        (java,) = self.process.children()
        found = set()
        for each in java.children():
            # The script that started Java may have left a process that has ended.
            with suppress(psutil.NoSuchProcess):
                if "pyspark.daemon" in each.cmdline():
                    found.add(each.pid)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("connect_server"))
    try:
        wait_until(lambda: answers(running.process, running.port), "the Connect server answers")
        yield running
    finally:
        kill(running.process)


def test_sessions_share_python_processes_and_each_sees_its_modules_as_they_are(server: Server) -> None:
    assert server.answer_of_client(10) == [10, 10]
    processes = server.python_processes()
    assert processes
    assert server.answer_of_client(222) == [222, 222]
    assert server.python_processes() == processes


def test_a_session_ends_with_its_process(server: Server) -> None:
    server.answer_of_client(3)
    assert server.sessions() == 0


def test_a_client_needs_the_token_of_the_server(server: Server) -> None:
    ran = server.run_client(4, **{AUTHENTICATION: "another"})
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "UNAUTHENTICATED" in ran.stderr
