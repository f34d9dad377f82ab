"""An Airflow that `eventsql bench airflow` measures."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import quote

from eventsql_orchestration.airflow.local import LocalAirflow, connection_of
from eventsql_orchestration.bench.airflow_redis import Redis, start_redis
from eventsql_orchestration.bench.processes import Crew
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.model import Publication

DIRECTORY: Final = "EVENTSQL_BENCH_DIRECTORY"
TOPIC: Final = "EVENTSQL_BENCH_TOPIC"
WITH_REDIS: Final = "EVENTSQL_BENCH_REDIS"
"""Variables of Airflow's processes: where tasks write their times, the topic, and whether Redis is measured (1)."""

CONSUMER: Final = "bench"

PUBLISHED: Final = "published"
LINES: Final = "least"
MESSAGES: Final = "redis"
"""The names of the files with the times of tasks; the DAG of each has the prefix `bench_`."""

DAGS: Final = (
    "# An Airflow DAG file.\nfrom eventsql_orchestration.bench.airflow_dags import lines, messages, published\n"
)

LIMIT: Final = 180.0
"""Seconds that a step may take on a busy machine."""

REST: Final = 3.0
"""The next event comes 1 s after the end of a run, plus up to this number of seconds: the moment is random in Airflow's
loops."""


Start: TypeAlias = dict[str, float]
"""The steps of Airflow for an event: seconds from the event on.

Airflow stored the asset event, made the run, queued its task, and started the task's process (`started`). Then the
task's first instruction ran (`first`).
"""


@dataclass(frozen=True, slots=True)
class RunningAirflow:
    """An Airflow with DAGs that run for the events of `topic`, for lines of a file in `directory`, and for Redis."""

    session: Session
    local: LocalAirflow
    topic: str
    directory: Path
    crew: Crew
    redis: Redis | None

    def cold_starts(self, runs: int) -> dict[str, list[Start]]:
        """Measure `runs` starts by each kind of event, in turns. No run is under way when an event comes.

        The first start of each kind is not measured: Airflow has to begin to look.
        """
        emitters = {PUBLISHED: self._publish, LINES: self._write_line}
        if self.redis is not None:
            emitters[MESSAGES] = self.redis.publish
        kinds = {name: partial(self._cold_start, name, emit) for name, emit in emitters.items()}
        return {name: found[1:] for name, found in self.session.in_turns("cold starts", runs + 1, kinds).items()}

    def _cold_start(self, name: str, emit: Callable[[], None]) -> Start:
        self._rest()
        before, began = len(self._times(name)), time.time()
        emit()
        self._await(lambda: len(self._times(name)) > before, f"a task of {name}")
        return self._start(f"bench_{name}", began, self._times(name)[before])

    def _start(self, dag: str, began: float, first: float) -> Start:
        """The steps of Airflow for the latest run of a DAG, by the times in its tables; the clock is this machine's."""
        run = self.local.api.ask("GET", f"/dags/{dag}/dagRuns?order_by=-id&limit=1")["dag_runs"][0]
        path = f"/dags/{dag}/dagRuns/{quote(run['dag_run_id'], safe='')}"
        task = self.local.api.ask("GET", f"{path}/taskInstances")["task_instances"][0]
        event = self.local.api.ask("GET", f"{path}/upstreamAssetEvents")["asset_events"][0]
        times = {
            "stored": (event, "timestamp"), "made": (run, "queued_at"), "queued": (task, "queued_when"),
            "started": (task, "start_date"),
        }  # fmt: skip
        found = {step: datetime.fromisoformat(answer[field]).timestamp() for step, (answer, field) in times.items()}
        return {step: at - began for step, at in {**found, "first": first}.items()}

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
            return not any(under_way) and (self.redis is None or self.redis.heard())

        self._await(idle, "the end of the runs")
        time.sleep(1.0 + random.uniform(0, REST))  # noqa: S311 - any moment of the loops

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            self.local.require_running()
            return condition()

        self.crew.wait(reached, limit=LIMIT, what=f"{what} (see the logs in {self.local.home})")


@contextmanager
def airflow(session: Session) -> Iterator[RunningAirflow]:
    """An Airflow for the block. Raises `LocalAirflowError` if it does not start."""
    database = session.databases[0]
    with (
        session.topic("airflow", partitions=1) as topic,
        tempfile.TemporaryDirectory(prefix="eventsql-bench-") as made,
        session.crew() as crew,
        session.made("DATABASE", f"{topic}_airflow") as tables,
    ):
        session.consumer(topic, CONSUMER)
        directory, server = Path(made), start_redis(crew, made)
        (directory / "dags").mkdir()
        (directory / "dags" / "bench.py").write_text(DAGS, encoding="utf-8")
        url = database.url.set(drivername="postgresql", database=tables)
        local = LocalAirflow(
            directory / "airflow", directory / "dags", url.render_as_string(hide_password=False),
            connections={
                "eventsql_default": connection_of([database.given_dsn], database.schema),
                **({} if server is None else {"redis_default": server.url}),
            },
            environment={DIRECTORY: str(directory), TOPIC: topic, WITH_REDIS: "" if server is None else "1"},
        )  # fmt: skip
        session.report("starting Airflow", 0, 1)
        local.migrate()
        local.run("dags", "reserialize")
        with local:
            local.start()
            local.wait_until_ready()
            yield RunningAirflow(session, local, topic, directory, crew, server)
