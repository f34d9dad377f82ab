"""An Airflow that `eventsql bench airflow` measures."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg import sql

from eventsql_orchestration.airflow.local import LocalAirflow, connection_of
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Publication

DIRECTORY: Final = "EVENTSQL_BENCH_DIRECTORY"
TOPIC: Final = "EVENTSQL_BENCH_TOPIC"
"""Variables of the environment of Airflow's processes: where tasks write their times, and the topic."""

CONSUMER: Final = "bench"

PUBLISHED: Final = "published"
LINES: Final = "lines"
"""Files with the times of the tasks of both DAGs."""

DAGS: Final = "# An Airflow DAG file.\nfrom eventsql_orchestration.bench.airflow_dags import lines, published\n"

LIMIT: Final = 180.0
"""Seconds that a step may take on a busy machine."""

REST: Final = 3.0
"""Seconds at most between the end of a run and the next event, besides a second: any moment of Airflow's loops."""


@dataclass(frozen=True, slots=True)
class RunningAirflow:
    """An Airflow with a DAG that consumes `topic`, and one that runs for the lines of a file in `directory`."""

    session: Session
    local: LocalAirflow
    topic: str
    directory: Path

    def cold_starts(self, runs: int) -> tuple[list[float], list[float]]:
        """Seconds from an event to the first instruction of its task, of so many events and lines in turns.

        No run is under way when an event is published. One of each is not measured: Airflow has to begin to look.
        """
        published, lines = list[float](), list[float]()
        for number in range(runs + 1):
            for name, emit, delays in ((PUBLISHED, self._publish, published), (LINES, self._write_line, lines)):
                delay = self._cold_start(name, emit)
                if number:
                    delays.append(delay)
            self.session.report("cold starts", number, runs)
        return published, lines

    def _cold_start(self, name: str, emit: Callable[[], None]) -> float:
        self._rest()
        before, began = len(self._times(name)), time.time()
        emit()
        self._await(lambda: len(self._times(name)) > before, f"a task of {name}")
        return self._times(name)[before] - began

    def _publish(self) -> None:
        platform = self.session.platform
        with self.session.databases[0].transaction() as connection:
            platform.publisher.publish_all([Publication(self.topic, b"ride")], connection=connection)
        platform.transfer.run_once([self.topic])

    def _write_line(self) -> None:
        with (self.directory / f"{LINES}.in").open("a", encoding="utf-8") as file:
            file.write("line\n")

    def _times(self, name: str) -> list[float]:
        file = self.directory / name
        return [float(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    def _rest(self) -> None:
        def idle() -> bool:
            under_way = self.local.api.pages("/dags/~/dagRuns", "dag_runs", state=["queued", "running"])
            return not any(under_way)

        self._await(idle, "the end of the runs")
        time.sleep(1.0 + random.uniform(0, REST))  # noqa: S311 - any moment of the loops

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            self.local.check()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{what} did not come within {LIMIT:.0f} s: see the logs in {self.local.home}")
            time.sleep(0.05)


@contextmanager
def airflow(session: Session) -> Iterator[RunningAirflow]:
    """An Airflow for the block. Raises `LocalAirflowError` if it does not start."""
    database = session.databases[0]
    with (
        session.topic("airflow", partitions=1) as topic,
        tempfile.TemporaryDirectory(prefix="eventsql-bench-") as made,
        ExitStack() as cleaning,
    ):
        session.consumer(topic, CONSUMER)
        directory, name = Path(made), sql.Identifier(f"{topic}_airflow")
        session.connection.execute(sql.SQL("CREATE DATABASE {}").format(name))
        cleaning.callback(session.connection.execute, sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))
        (directory / "dags").mkdir()
        (directory / "dags" / "bench.py").write_text(DAGS, encoding="utf-8")
        url = database.url.set(drivername="postgresql")
        local = LocalAirflow(
            directory / "airflow", directory / "dags",
            url.set(database=f"{topic}_airflow", query={}).render_as_string(hide_password=False),
            connections={"eventsql_default": connection_of([database.dsn], database.schema)},
            environment={DIRECTORY: str(directory), TOPIC: topic},
        )  # fmt: skip
        session.report("starting Airflow", 0, 1)
        local.migrate()
        local.run("dags", "reserialize")
        cleaning.enter_context(local)
        local.start()
        local.wait_until_ready()
        yield RunningAirflow(session, local, topic, directory)
