"""Spark for the runs of `eventsql dev`: its Java, its settings, and one warm server for all runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from eventsql_orchestration.cli.output import complain, say
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import MissingExtraError
from eventsql_orchestration.orchestration.local_processes import SPARK_LOCK, free_port, kill_group, start_group
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE
from eventsql_orchestration.spark.connect_server import ConnectServer, connect_is_installed
from eventsql_orchestration.spark.java import ensure_java

_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""In a short session, optimizing compilation costs more than it saves: for one range, Java takes 8 s of processor time
with these options and 14 s without."""

WARM_UP: Final = "eventsql_orchestration.spark.warm_up"
"""A module that loads Spark, so that this process does not import it."""


def provide_java(home: Path) -> bool:
    """Set the Java runtime for Spark, if Spark is installed. False if there is no Spark or no Java."""
    if importlib.util.find_spec("pyspark") is None:
        return False
    try:
        java = ensure_java(home)
    except MissingExtraError as error:
        complain(f"Spark will not run: {error.message}")
        return False
    say(f"Java {java.version} from {java.source}: {java.home}")
    return True


def settings_for(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings for Spark in an environment. They name its TMPDIR, because Java does not look at that variable."""
    directory = environment.get("TMPDIR")
    java = "" if directory is None else f" -Djava.io.tmpdir={shlex.quote(directory)}"
    return {"spark.driver.extraJavaOptions": _JAVA_OPTIONS + java}


def spark_settings(directory: Path, settings: Mapping[str, str]) -> Path:
    """Write a file of settings for the sessions of runs."""
    file = directory / "spark.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()), encoding="utf-8")
    return file


class WarmSpark:
    """A Spark Connect server for the runs of `eventsql dev`. With it, a session starts in one second.

    The server gets the environment of this process and `environment`.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._lock = directory / SPARK_LOCK
        self._port = free_port(0)
        self._inherited = {**os.environ, **environment}
        self._server = ConnectServer(
            directory, port=self._port, ui_port=free_port(0), environment=self._inherited,
            settings=settings_for(environment),
        )  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._warming: subprocess.Popen[bytes] | None = None
        self.environment = {
            SPARK_CONFIG_VARIABLE: str(spark_settings(directory, {"spark.remote": self._server.remote})),
            **self._server.client_environment,
        }
        """For the processes of runs."""

    def keep(self) -> None:
        """Start the server, or start it again if it has died."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            complain(f"Spark has died, see {self._server.log}: starting it again")
            # Its Java may still have the port.
            kill_group(self._process.pid)
        self._process = start_group(self._lock, lambda lock: self._server.start(pass_fds=(lock,)))
        self._end_warming()
        self._warming = subprocess.Popen(
            [sys.executable, "-m", WARM_UP, str(self._port)], env={**self._inherited, **self.environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        self._end_warming()
        if self._process is not None:
            # It has nothing to lose: a session ends with its run.
            kill_group(self._process.pid)
            self._process.wait()

    def _end_warming(self) -> None:
        if self._warming is not None:
            self._warming.kill()
            self._warming.wait()


def spark_environment(platform: EventSQL) -> dict[str, str]:
    """Variables that processes with Spark need to read this platform's topics."""
    database = platform.database
    database.ensure_schema()
    return {
        "EVENTSQL_DSN": database.given_dsn, "EVENTSQL_SCHEMA": database.schema, "PYSPARK_PYTHON": sys.executable
    }  # fmt: skip


@contextmanager
def spark_for_runs(
    directory: Path, environment: Mapping[str, str], *, warm: bool
) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """The environment that gives runs their Spark sessions, and a function that starts Spark again if it has died.

    The file that EVENTSQL_SPARK_CONFIG names has precedence. Without `warm`, each run starts a Spark of its own.
    """
    if chosen := os.environ.get(SPARK_CONFIG_VARIABLE):
        yield {SPARK_CONFIG_VARIABLE: chosen}, lambda: None
        return
    if not warm or not connect_is_installed():
        settings = spark_settings(directory, settings_for(environment))
        yield {SPARK_CONFIG_VARIABLE: str(settings)}, lambda: None
        return

    spark = WarmSpark(directory, environment)
    spark.keep()
    try:
        yield spark.environment, spark.keep
    finally:
        spark.stop()
