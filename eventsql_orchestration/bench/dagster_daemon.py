"""What `eventsql bench dagster` measures: a real daemon, on a storage of its own, with this package's sensors."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, LiteralString, TypeAlias

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from psycopg import sql

from eventsql_orchestration.dagster.instance import (
    CONFIG_FILE,
    STORAGE_SCHEMA,
    STORAGE_VARIABLE,
    instance_config,
    storage_url,
)
from eventsql_orchestration.dagster.measured import VARIABLE, measured
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Publication
from eventsql_orchestration.platform import EventSQL

Report: TypeAlias = Callable[[str, int, int], None]

STARTING: Final = 180.0
RUN_LIMIT: Final = 240.0

SENSOR_LOOP: Final = 5.0
"""Seconds between two looks of Dagster's daemon at its sensors: events are published at any moment in it."""


@dataclass(frozen=True, slots=True)
class Handled:
    """An event that a run's function was given: when it was published, and handed over, and to which process."""

    published: float
    at: float
    process: int

    @property
    def delay(self) -> float:
        """Seconds from publish to handler."""
        return self.at - self.published


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon on one topic, in whose runs the consumer's function writes what it is given to `record`."""

    platform: EventSQL
    instance: dg.DagsterInstance
    storage: str
    topic: str
    record: Path

    def publish(self, partition: int) -> float:
        """Publish an event and transfer it; gives when."""
        now = time.time()
        self.platform.publisher.publish(Publication(self.topic, str(now).encode(), partition=partition))
        self.platform.transfer.run_once([self.topic])
        return now

    def handled(self) -> list[Handled]:
        """The events that runs were given, in the order in which they were."""
        if not self.record.exists():
            return []
        lines = (line.split() for line in self.record.read_text().splitlines())
        return [Handled(float(published), float(at), int(process)) for published, at, process in lines]

    def runs(self) -> list[dg.RunRecord]:
        """The newest first."""
        return list(self.instance.get_run_records())

    def await_(self, condition: Callable[[], bool], what: str, *, limit: float = RUN_LIMIT) -> None:
        """Raises `BenchmarkError` after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"waited {limit:.0f} s for {what}")
            time.sleep(0.05)

    def await_quiet(self) -> None:
        """Wait until no run is under way."""
        self.await_(lambda: all(run.dagster_run.status in FINISHED for run in self.runs()), "the end of all runs")

    def first_step(self, run_id: str) -> float | None:
        """When the first step of a run began."""
        starts = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START)
        return min((entry.timestamp for entry in starts), default=None)

    def ticks(self) -> int:
        """How many ticks of sensors have ended so far."""
        with self.platform.database.connection() as connection:
            row = connection.execute(
                sql.SQL("SELECT count(*) FROM {} WHERE status IN ('SKIPPED', 'SUCCESS')").format(
                    sql.Identifier(self.storage, "job_ticks")
                )
            ).fetchone()
        assert row is not None, "an aggregate gives one row"
        return int(row[0])


@contextmanager
def daemon(
    platform: EventSQL,
    topic: str,
    *,
    partitions: int,
    sensor: str = "partition",
    drain: float = 0.0,
    idle: float | None = None,
) -> Iterator[Daemon]:
    """A daemon with one consumer of `topic` for the block, whose runs drain for `drain` seconds.

    They end where nothing comes for `idle` seconds, or never before. Raises `BenchmarkError` where the daemon does not
    begin to tick.
    """
    storage = f"{topic}_dagster"
    with tempfile.TemporaryDirectory(prefix="eventsql-bench-") as directory, contextlib.ExitStack() as cleaning:
        home, record = Path(directory), Path(directory) / "handled"
        told = {
            "topic": topic, "partitions": partitions, "sensor": sensor,
            "drain": drain, "idle": drain if idle is None else idle, "record": str(record),
        }  # fmt: skip
        measured(**told).register(platform)  # type: ignore[arg-type]  # as JSON gives them back
        url = storage_url(platform.database.dsn).replace(f"search_path%3D{STORAGE_SCHEMA}", f"search_path%3D{storage}")
        (home / CONFIG_FILE).write_text(yaml.safe_dump(instance_config()), encoding="utf-8")
        before = os.environ.get(STORAGE_VARIABLE)
        os.environ[STORAGE_VARIABLE] = url
        cleaning.callback(_restore, before)
        _execute(platform, "CREATE SCHEMA {}", storage)
        cleaning.callback(_execute, platform, "DROP SCHEMA {} CASCADE", storage)
        instance = cleaning.enter_context(dg.DagsterInstance.from_config(str(home)))
        instance.get_runs_count()
        environment = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "EVENTSQL_DSN": platform.database.dsn,
            "EVENTSQL_SCHEMA": platform.database.schema,
            VARIABLE: json.dumps(told),
        }
        with (home / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("dagster-daemon"), "run", "-m", measured.__module__],
                cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        cleaning.callback(_end, process)
        running = Daemon(platform, instance, storage, topic, record)
        running.await_(lambda: running.ticks() > 0, "the first tick of a sensor", limit=STARTING)
        yield running


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(STORAGE_VARIABLE, None)
    else:
        os.environ[STORAGE_VARIABLE] = before


def _execute(platform: EventSQL, statement: LiteralString, schema: str) -> None:
    with platform.database.connection() as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(schema)))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cold_starts(running: Daemon, runs: int, report: Report) -> list[float]:
    """Seconds from publish to the first step, of so many runs, each of which finds no other under way."""
    delays = []
    for number in range(runs):
        running.await_quiet()
        time.sleep(random.uniform(0, SENSOR_LOOP))  # noqa: S311 - any moment of the loop
        seen = len(running.runs())
        published = running.publish(0)
        running.await_(lambda seen=seen: len(running.runs()) > seen, "a run")  # type: ignore[misc]
        run_id = running.runs()[0].dagster_run.run_id
        running.await_(lambda run_id=run_id: running.first_step(run_id) is not None, "its first step")  # type: ignore[misc]
        began = running.first_step(run_id)
        assert began is not None, "it was waited for"
        delays.append(began - published)
        report("cold starts", number + 1, runs)
    return delays


def drained(running: Daemon, events: int, every: float, report: Report) -> list[float]:
    """Seconds from publish to handler, of events that a run finds while it drains, one each `every` seconds."""
    running.publish(0)
    running.await_(lambda: len(running.handled()) == 1, "the run that drains")
    for number in range(events):
        time.sleep(every)
        running.publish(0)
        report("draining", number + 1, events)
    running.await_(lambda: len(running.handled()) == events + 1, "every event")
    if len(running.runs()) > 1:
        raise BenchmarkError("the run that drains ended too early: measure fewer events")
    return [event.delay for event in running.handled()[1:]]


def ticks_per_minute(running: Daemon, seconds: float) -> float:
    """How often all sensors together are looked at, with nothing to consume."""
    before, started = running.ticks(), time.monotonic()
    time.sleep(seconds)
    return (running.ticks() - before) / (time.monotonic() - started) * 60


def runs_per_second(running: Daemon, runs: int) -> float:
    """How many runs come through, with an event in each of so many partitions at once."""
    seen = len(running.runs())
    for partition in range(runs):
        running.publish(partition)
    running.await_(lambda: len(running.runs()) >= seen + runs, "runs")
    running.await_quiet()
    records = running.runs()[:runs]
    begun = min(run.create_timestamp.timestamp() for run in records)
    ended = max(run.end_time or 0.0 for run in records)
    return runs / (ended - begun)
