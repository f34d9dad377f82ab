"""Spark's processes for the tests that kill them: drivers, and a standalone cluster on this machine."""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE
from eventsql_orchestration.spark.java import ensure_java
from tests.waiting import PATIENCE, wait_until

REPOSITORY = Path(__file__).parents[2]

DRIVER = "tests.spark.driver"


def register_topics(platform: EventSQL) -> None:
    """Register the topics that the processes write to."""
    platform.registry.register_topic(Topic("orders", partitions=4)).register_topic(Topic("fares", partitions=3))


def values_in(platform: EventSQL, topic: str) -> list[int]:
    """The values of a topic's events, which are numbers, in ascending order."""
    platform.transfer.run_once()
    return sorted(int(event.value) for event in platform.reader.read(topic))


def kill(process: psutil.Process) -> None:
    """Kill a process and all that it has started, as the loss of their machine would."""
    with suppress(psutil.NoSuchProcess):
        victims = [process, *process.children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=PATIENCE)


class Driver:
    """A Spark driver in a process of its own."""

    def __init__(
        self,
        home: Path,
        settings: Mapping[str, str] | None = None,
        *,
        config: Path | None = None,
        program: str = DRIVER,
    ) -> None:
        """With these settings; `config` is what EVENTSQL_SPARK_CONFIG names."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", program],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("EVENTSQL_")},
                **({} if config is None else {SPARK_CONFIG_VARIABLE: str(config)}),
            },
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._tell({"home": str(home), "settings": {"spark.driver.memory": "512m", **(settings or {})}})
            assert self.answer() == "ready"
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.strip())
        self._answers.put("gone")

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def start(self, do: str, **arguments: object) -> None:
        self._tell({"do": do, **arguments})

    def answer(self) -> str:
        """Its next answer, or that it is gone. The limit of the test ends the wait for one that hangs."""
        return self._answers.get()

    def await_step(self, reached: Callable[[], object], what: str) -> None:
        """Wait until what it does has come to a step; fails with its answer if it ends before."""
        wait_until(lambda: reached() or not self._answers.empty(), what, seconds=math.inf)
        assert reached(), self.answer()

    def do(self, name: str, **arguments: object) -> str:
        self.start(name, **arguments)
        return self.answer()

    def kill(self) -> None:
        """Kill the driver, its Java and its Python workers."""
        kill(psutil.Process(self._process.pid))
        self.close()

    def kill_without_workers(self) -> None:
        """Kill the driver and its Java: what they have started may live on for a while."""
        process = psutil.Process(self._process.pid)
        java = [child for child in process.children(recursive=True) if "java" in child.name()]
        for victim in [process, *java]:
            victim.kill()
        self.close()

    def close(self) -> None:
        """End it, and all that it has started, and let go of the pipes."""
        with suppress(psutil.NoSuchProcess):
            kill(psutil.Process(self._process.pid))
        self._process.wait(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@contextmanager
def driver(home: Path, settings: Mapping[str, str] | None = None, *, config: Path | None = None) -> Iterator[Driver]:
    running = Driver(home, settings, config=config)
    try:
        yield running
    finally:
        running.close()


class Cluster:
    """A standalone master, and two workers with an executor each.

    The workers are two hosts, because Spark never runs two attempts of a task on one host.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._processes: list[psutil.Popen] = []
        self._port, self._web_port = free_port(0), free_port(0)
        runtime = ensure_java(home)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("EVENTSQL_", "SPARK_"))},
            "JAVA_HOME": str(runtime.home),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_DAEMON_MEMORY": "256m",
            # Where Spark looks for data sources: what the machine of a worker must have installed.
            "PYSPARK_PYTHON": sys.executable,
        }
        try:
            self._run("master.Master", "--host", "127.0.0.1", "--port", self._port, "--webui-port", self._web_port)
            self._workers = [
                self._run(
                    "worker.Worker", "--host", host, "--cores", 1, "--memory", "512m",
                    "--webui-port", free_port(0), "--work-dir", home / host, self.url,
                )
                for host in ("127.0.0.2", "127.0.0.3")
            ]  # fmt: skip
            wait_until(lambda: self._alive() == 2, "the workers are registered")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def _run(self, name: str, *arguments: object) -> psutil.Popen:
        program = Path(self._environment["SPARK_HOME"]) / "bin" / "spark-class"
        with (self._home / f"{name}-{len(self._processes)}.log").open("wb") as log:
            process = psutil.Popen(
                [str(program), f"org.apache.spark.deploy.{name}", *map(str, arguments)],
                cwd=self._home, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _alive(self) -> int:
        # Before its handlers are there, the master answers with its page.
        with (
            suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://127.0.0.1:{self._web_port}/json/") as answer,
        ):
            return int(json.load(answer)["aliveworkers"])
        return 0

    def executors(self) -> list[psutil.Process]:
        """The executors that run."""
        found = []
        for child in itertools.chain.from_iterable(worker.children(recursive=True) for worker in self._workers):
            with suppress(psutil.NoSuchProcess):
                if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                    found.append(child)
        return found

    def close(self) -> None:
        for process in reversed(self._processes):
            kill(process)
            process.wait(PATIENCE)
