"""A real daemon with storage of its own and this package's sensors, for `eventsql bench dagster`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from psycopg import sql

from eventsql_orchestration.bench import roles
from eventsql_orchestration.bench.dagster_location import TRANSFER_VARIABLE, VARIABLE, recording_consumer
from eventsql_orchestration.bench.processes import Crew, WorkerProcess
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.dagster.local.instance import (
    CONFIG_FILE,
    STORAGE_SCHEMA,
    STORAGE_VARIABLE,
    instance_config,
    storage_url,
)
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.model import Publication

STARTING: Final = 180.0
RUN_LIMIT: Final = 240.0

SENSOR: Final = "SENSOR"
TRANSFER: Final = "SCHEDULE"
"""The type of ticks in Dagster's storage. The transfer is the only schedule."""


@dataclass(frozen=True, slots=True)
class Handled:
    """An event that a run handled: the time of its publication, the time of the handling, and the process."""

    published: float
    at: float
    process: int

    @property
    def delay(self) -> float:
        """Seconds from publish to handler."""
        return self.at - self.published


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon on one topic. The consumer's function writes the events of its runs to `record`."""

    session: Session
    instance: dg.DagsterInstance
    storage: str
    topic: str
    record: Path
    crew: Crew
    process: WorkerProcess
    transfers: bool
    """Whether its schedule transfers the events."""

    def publish(self, *partitions: int) -> float:
        """Publish an event to each partition in one transaction. Transfer them, unless the daemon does.

        Gives the time of the publication.
        """
        now = time.time()
        platform = self.session.platform
        with self.session.databases[0].transaction() as connection:
            events = (Publication(self.topic, str(now).encode(), partition=partition) for partition in partitions)
            platform.publisher.publish_all(events, connection=connection)
        if not self.transfers:
            platform.transfer.run_once([self.topic])
        return now

    def handled(self) -> list[Handled]:
        """The events of all runs, in the order of their handling."""
        if not self.record.exists():
            return []
        lines = (line.split() for line in self.record.read_text().splitlines())
        return [Handled(float(published), float(at), int(process)) for published, at, process in lines]

    def runs(self) -> list[dg.RunRecord]:
        """The runs, newest first."""
        return list(self.instance.get_run_records())

    def await_(self, condition: Callable[[], bool], what: str, *, limit: float = RUN_LIMIT) -> None:
        """Raises `BenchmarkError` after `limit` seconds, or when the daemon ends."""
        self.crew.wait(condition, limit=limit, what=what)

    def await_quiet(self) -> None:
        self.await_(lambda: self.ended_runs() == self._count("runs"), "the end of all runs")

    def ended_runs(self) -> int:
        return self._count("runs", status=[status.value for status in FINISHED])

    def begun_steps(self) -> int:
        return self._count("event_logs", dagster_event_type=[dg.DagsterEventType.STEP_START.value])

    def first_step(self, run_id: str) -> float | None:
        """When the first step of a run began."""
        starts = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START)
        return min((entry.timestamp for entry in starts), default=None)

    def ticks(self, kind: str = SENSOR) -> int:
        """The number of ticks of sensors or schedules that have ended so far."""
        return self._count("job_ticks", status=["SKIPPED", "SUCCESS"], type=[kind])

    def _count(self, table: str, **values: list[str]) -> int:
        """The rows of a table of the storage that have some values. To read the runs would delay them."""
        one_of = sql.SQL("{} OPERATOR(pg_catalog.=) ANY (%s)")
        conditions = [sql.SQL("true"), *(one_of.format(sql.Identifier(column)) for column in values)]
        query = sql.SQL("SELECT pg_catalog.count(*) FROM {} WHERE {}").format(
            sql.Identifier(self.storage, table), sql.SQL(" AND ").join(conditions)
        )
        row = self.session.connection.execute(query, list(values.values())).fetchone()
        assert row is not None, "an aggregate gives one row"
        return int(row[0])


@contextmanager
def daemon(
    session: Session,
    label: str,
    *,
    partitions: int = 1,
    sensor: str = "partition",
    drain: float = 0.0,
    idle: float | None = None,
    launcher: str = "prefork",
    transfers: bool = False,
) -> Iterator[Daemon]:
    """A daemon with one consumer on a topic of its own for the block; with `transfers`, also with the transfer.

    Runs drain for `drain` seconds. They end earlier if no event comes for `idle` seconds. Raises `BenchmarkError` if
    the daemon does not begin to tick.
    """
    database = session.databases[0]
    with (
        session.topic(label, partitions=partitions) as topic,
        tempfile.TemporaryDirectory(prefix="eventsql-bench-") as directory,
        session.made("SCHEMA", f"{topic}_dagster") as storage,
        _instance(Path(directory), storage_url(database.dsn), storage, launcher) as instance,
        session.crew() as crew,
    ):
        record = Path(directory, "handled")
        limits = {"max_wait": 0.0, "drain_seconds": drain, "drain_idle": drain if idle is None else idle}
        consumer = {
            "topic": topic, "partitions": partitions, "record": str(record), "sensor": sensor, "limits": limits,
        }  # fmt: skip
        recording_consumer(**consumer).register(session.platform)  # type: ignore[arg-type]  # as JSON gives them back
        environment = {
            "DAGSTER_HOME": directory,
            "EVENTSQL_DSN": session.dsns[0],
            "EVENTSQL_SCHEMA": session.schema,
            VARIABLE: json.dumps(consumer),
            **({TRANSFER_VARIABLE: "yes"} if transfers else {}),
        }
        program = str(Path(sys.executable).with_name("dagster-daemon"))
        process = crew.start(
            roles.run_program, "Dagster's daemon", command=[program, "run", "-m", recording_consumer.__module__],
            directory=directory, environment=environment,
        )  # fmt: skip
        crew.go()
        running = Daemon(session, instance, storage, topic, record, crew, process, transfers)
        running.await_(lambda: running.ticks() > 0, "the first tick of a sensor", limit=STARTING)
        yield running


@contextmanager
def _instance(home: Path, url: str, storage: str, launcher: str) -> Iterator[dg.DagsterInstance]:
    """An instance in a directory, as `eventsql dev` configures it, with its storage in a schema and a launcher."""
    config = instance_config()
    if launcher == "default":
        del config["run_launcher"]
    (home / CONFIG_FILE).write_text(yaml.safe_dump(config), encoding="utf-8")
    before = os.environ.get(STORAGE_VARIABLE)
    os.environ[STORAGE_VARIABLE] = url.replace(f"search_path%3D{STORAGE_SCHEMA}", f"search_path%3D{storage}")
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            # The daemon finds its tables.
            instance.get_runs_count()
            yield instance
    finally:
        del os.environ[STORAGE_VARIABLE]
        if before is not None:
            os.environ[STORAGE_VARIABLE] = before
