"""The measurements of `eventsql bench dagster`: a real daemon with storage of its own and this package's sensors."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, LiteralString

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types
from psycopg import sql

from eventsql_orchestration.bench.dagster_location import TRANSFER_VARIABLE, VARIABLE, recording_consumer
from eventsql_orchestration.bench.processor import Meter
from eventsql_orchestration.bench.session import Session
from eventsql_orchestration.dagster.local.instance import (
    CONFIG_FILE,
    STORAGE_SCHEMA,
    STORAGE_VARIABLE,
    instance_config,
    storage_url,
)
from eventsql_orchestration.dagster.tags import FINISHED
from eventsql_orchestration.errors import BenchmarkError
from eventsql_orchestration.model import Publication

STARTING: Final = 180.0
RUN_LIMIT: Final = 240.0

SENSOR_LOOP: Final = 5.0
"""Seconds between two evaluations of all sensors by Dagster's daemon. Events are published at random moments in it."""

PREFORK: Final = "prefork"
"""The launcher of this package."""

DEFAULT: Final = "default"
"""Dagster's default launcher."""

SENSOR: Final = "SENSOR"
TRANSFER: Final = "SCHEDULE"
"""The type of ticks in Dagster's storage. The transfer is the only schedule."""

AROUND: Final = 1.0
"""Events this many seconds before and after a hand-over count as events around it."""


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
    process: int
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
        """Raises `BenchmarkError` after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"waited {limit:.0f} s for {what}")
            time.sleep(0.05)

    def await_quiet(self) -> None:
        """Wait until no run is under way."""
        self.await_(lambda: self.ended_runs() == self._count("runs"), "the end of all runs")

    def ended_runs(self) -> int:
        """The number of runs that have ended so far."""
        return self._count("runs", *(status.value for status in FINISHED))

    def begun_steps(self) -> int:
        """The number of steps that have begun so far."""
        return self._count("event_logs", dg.DagsterEventType.STEP_START.value, column="dagster_event_type")

    def first_step(self, run_id: str) -> float | None:
        """When the first step of a run began."""
        starts = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START)
        return min((entry.timestamp for entry in starts), default=None)

    def ticks(self, kind: str = SENSOR) -> int:
        """The number of ticks of sensors or schedules that have ended so far."""
        count = sql.SQL(
            "SELECT pg_catalog.count(*) FROM {} WHERE status OPERATOR(pg_catalog.=) ANY (ARRAY['SKIPPED', 'SUCCESS']) "
            "AND type OPERATOR(pg_catalog.=) %s"
        )
        table = sql.Identifier(self.storage, "job_ticks")
        return self._number(count.format(table), [kind])

    def _count(self, table: str, *values: str, column: str = "status") -> int:
        """The rows of a table of the storage, or only rows with some values. To read the runs would delay them."""
        count = sql.SQL("SELECT pg_catalog.count(*) FROM {} WHERE %s OR {} OPERATOR(pg_catalog.=) ANY (%s)")
        query = count.format(sql.Identifier(self.storage, table), sql.Identifier(column))
        return self._number(query, [not values, list(values)])

    def _number(self, query: sql.Composed, parameters: Sequence[object]) -> int:
        row = self.session.connection.execute(query, parameters).fetchone()
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
    launcher: str = PREFORK,
    transfers: bool = False,
) -> Iterator[Daemon]:
    """A daemon with one consumer on a topic of its own for the block; with `transfers`, also with the transfer.

    Runs drain for `drain` seconds. They end earlier if no event comes for `idle` seconds. Raises `BenchmarkError` if
    the daemon does not begin to tick.
    """
    platform, database = session.platform, session.databases[0]
    with (
        session.topic(label, partitions=partitions) as topic,
        tempfile.TemporaryDirectory(prefix="eventsql-bench-") as directory,
        contextlib.ExitStack() as cleaning,
    ):
        storage, home, record = f"{topic}_dagster", Path(directory), Path(directory) / "handled"
        limits = {"max_wait": 0.0, "drain_seconds": drain, "drain_idle": drain if idle is None else idle}
        consumer = {
            "topic": topic, "partitions": partitions, "record": str(record), "sensor": sensor, "limits": limits,
        }  # fmt: skip
        recording_consumer(**consumer).register(platform)  # type: ignore[arg-type]  # as JSON gives them back

        def execute(statement: LiteralString) -> None:
            session.connection.execute(sql.SQL(statement).format(sql.Identifier(storage)))

        execute("CREATE SCHEMA {}")
        cleaning.callback(execute, "DROP SCHEMA {} CASCADE")

        config = instance_config()
        if launcher == DEFAULT:
            del config["run_launcher"]
        (home / CONFIG_FILE).write_text(yaml.safe_dump(config), encoding="utf-8")
        url = storage_url(database.dsn).replace(f"search_path%3D{STORAGE_SCHEMA}", f"search_path%3D{storage}")
        cleaning.enter_context(_variable(STORAGE_VARIABLE, url))
        instance = cleaning.enter_context(dg.DagsterInstance.from_config(str(home)))
        instance.get_runs_count()

        environment = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "EVENTSQL_DSN": database.dsn,
            "EVENTSQL_SCHEMA": database.schema,
            VARIABLE: json.dumps(consumer),
            **({TRANSFER_VARIABLE: "yes"} if transfers else {}),
        }
        with (home / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("dagster-daemon"), "run", "-m", recording_consumer.__module__],
                cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        cleaning.callback(_end, process)

        running = Daemon(session, instance, storage, topic, record, process.pid, transfers)
        running.await_(lambda: running.ticks() > 0, "the first tick of a sensor", limit=STARTING)
        yield running


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cold_starts(running: Daemon, runs: int, *, within: float = SENSOR_LOOP) -> list[float]:
    """Seconds from publish to the first step of a run, for each run from rest.

    At rest, no run is under way, and Dagster has looked at the sensor since the last run. An event is published after a
    random delay of up to `within` seconds. A run before them is not measured: it waits for the import of the location.
    """
    running.await_quiet()
    before = running.ended_runs()
    running.publish(0)
    running.await_(lambda: running.ended_runs() > before, "the first run")
    delays = []
    for number in range(runs):
        running.await_quiet()
        time.sleep(SENSOR_LOOP + random.uniform(0, within))  # noqa: S311 - any moment of the loop
        steps = running.begun_steps()
        published = running.publish(0)

        def begun(before: int = steps) -> bool:
            return running.begun_steps() > before

        running.await_(begun, "the first step of a run")
        began = running.first_step(running.runs()[0].dagster_run.run_id)
        assert began is not None, "a step has begun"
        delays.append(began - published)
        running.session.report("cold starts", number + 1, runs)
    return delays


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment in the block."""
    before, os.environ[name] = os.environ.get(name), value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def drained(running: Daemon, events: int, every: float) -> list[float]:
    """Seconds from publish to handler, for events that a run finds while it drains: one every `every` seconds."""
    handled = _publish_while_draining(running, events, every, "draining")
    if len(running.runs()) > 1:
        raise BenchmarkError("the run that drains ended too early: measure fewer events")
    return [event.delay for event in handled]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Events in the order of their handling, by runs that take over from one another. Times are in seconds."""

    events: Sequence[Handled]

    @property
    def delays(self) -> list[float]:
        """From publish to handler."""
        return [event.delay for event in self.events]

    @property
    def runs(self) -> int:
        """The number of runs that handled the events."""
        return len({event.process for event in self.events})

    @property
    def hand_overs(self) -> list[tuple[Handled, Handled]]:
        """Pairs of neighbouring events that two different runs handled.

        One change of runs makes several pairs: for some seconds both runs claim, and the faster gets the next range.
        """
        return [(last, first) for last, first in pairwise(self.events) if last.process != first.process]

    @property
    def gaps(self) -> list[float]:
        """Time between the two events of each hand-over. It includes the gap that the traffic itself leaves."""
        return [first.at - last.at for last, first in self.hand_overs]

    @property
    def gaps_within(self) -> list[float]:
        """Time between neighbouring events that one run handled."""
        return [after.at - before.at for before, after in pairwise(self.events) if before.process == after.process]

    @property
    def delays_around(self) -> list[float]:
        """Delays of the events that were published at most `AROUND` before or after a hand-over."""
        between = [(last.at - AROUND, first.at + AROUND) for last, first in self.hand_overs]
        return [event.delay for event in self.events if any(a <= event.published <= b for a, b in between)]


def steady_traffic(running: Daemon, seconds: float, every: float) -> Traffic:
    """Publish an event every `every` seconds for `seconds` seconds, from the first draining run on.

    Raises `BenchmarkError` if an event is lost, comes twice or comes before an event that was published earlier.
    """
    return Traffic(_publish_while_draining(running, round(seconds / every), every, "steady traffic"))


def _publish_while_draining(running: Daemon, events: int, every: float, step: str) -> list[Handled]:
    """Publish events from the first draining run on. Returns the events in the order in which they were handled."""
    running.publish(0)
    running.await_(lambda: len(running.handled()) == 1, "the run that drains")

    published = []
    started = time.monotonic()
    for number in range(events):
        # Each event has its fixed time; a slow event does not delay the next.
        time.sleep(max(0.0, started + (number + 1) * every - time.monotonic()))
        published.append(running.publish(0))
        running.session.report(step, number + 1, events)

    running.await_(lambda: len(running.handled()) > events, "every event")
    handled = running.handled()[1:]
    if [event.published for event in handled] != published:
        raise BenchmarkError(f"the handled events are not the {events} published ones, or not in their order")
    return handled


def ticks_per_minute(running: Daemon, seconds: float) -> float:
    """Evaluations per minute of all sensors together, with nothing to consume."""
    before, started = running.ticks(), time.monotonic()
    time.sleep(seconds)
    return (running.ticks() - before) / (time.monotonic() - started) * 60


@dataclass(frozen=True, slots=True)
class TransferHistory:
    """The runs and ticks that the transfer leaves in Dagster's history in an hour of an empty buffer."""

    runs: float
    ticks: float


def transfer_at_rest(running: Daemon, seconds: float) -> TransferHistory:
    """Runs and ticks of the transfer per hour, from its first tick on, with nothing to move."""
    running.await_(lambda: running.ticks(TRANSFER) > 0, "the first tick of the transfer")
    ticks, runs, started = running.ticks(TRANSFER), len(running.runs()), time.monotonic()
    time.sleep(seconds)
    hours = (time.monotonic() - started) / 3_600
    return TransferHistory((len(running.runs()) - runs) / hours, (running.ticks(TRANSFER) - ticks) / hours)


def transfer_delays(running: Daemon) -> list[float]:
    """Seconds from the publication of each event of the topic to its move into the log."""
    events = running.session.platform.reader.stream(running.topic)
    return [(event.created_at - event.buffered_at).total_seconds() for batch in events for event in batch]


@dataclass(frozen=True, slots=True)
class RunRate:
    """Runs that a daemon finishes per second, and processor seconds per run, ticks included."""

    per_second: float
    processor_seconds: float | None


def runs_at_once(running: Daemon, runs: int) -> RunRate:
    """Give each of `runs` partitions an event at once.

    Call it once before with one run: the first run of a fork server waits for the import of the location.
    """
    seen, meter = running.ended_runs(), Meter({"daemon": [running.process]})
    running.publish(*range(runs))
    running.await_(lambda: running.ended_runs() >= seen + runs, "the end of all runs")

    records = running.runs()[:runs]
    began = min(run.create_timestamp.timestamp() for run in records)
    ended = max(run.end_time or 0.0 for run in records)
    seconds = meter.taken().get("daemon")
    return RunRate(runs / (ended - began), None if seconds is None else seconds / runs)
