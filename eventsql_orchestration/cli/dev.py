"""`eventsql dev`: the whole system on this machine, and a ride simulation to look at."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import click
import dagster as dg
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.lag import lag_table
from eventsql_orchestration.cli.output import Columns, counted, same, say, show_items
from eventsql_orchestration.cli.parameters import FILE, Number, command, option
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.dagster.local.dagster_process import UNDER_WAY, LocalDagster, only_one
from eventsql_orchestration.dagster.local.instance import instance_directory, write_instance
from eventsql_orchestration.dagster.local.round_report import Counts, RunCounts, TopicRound, account
from eventsql_orchestration.dagster.tags import FINISHED, TRANSFER_TAG
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.errors import RoundError
from eventsql_orchestration.signals import handling
from eventsql_orchestration.spark import SPARK_CONFIG_VARIABLE
from eventsql_orchestration.spark.java import ensure_java

SETUP_JOB = "setup"
SIMULATION_JOB = "simulation"
VERIFICATION_JOB = "verification"

SPARK_SETTINGS = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""In a short session, optimizing compilation costs more than it saves: for one range, Java takes 8 s of processor time
with these settings and 14 s without. The file of EVENTSQL_SPARK_CONFIG has precedence."""

SIMULATION_SECONDS = 60.0
"""Seconds between two rounds of the simulation, without `--once`."""


@command(short_help="Run the whole system on this machine.")
def dev(
    context: CliContext,
    *,
    once: Annotated[bool, option("Run one bounded round until every consumer's lag is 0, print a table, end.")],
    orders: Annotated[int, option("Ride orders per round.", default=200, type=click.IntRange(1, 100_000))],
    port: Annotated[int, option(
        "The Dagster UI's port; if it is taken, a free one.", default=3000, type=click.IntRange(1, 65535),
        metavar="PORT",
    )],
    timeout: Annotated[float, option(
        "Limit of the round of --once, and of the setup before it.", default=600.0, type=Number(1.0), metavar="SECONDS"
    )],
    definitions: Annotated[Path, option(
        "The code location to run; it has the jobs `setup`, `simulation` and `verification`.",
        default="definitions.py", type=FILE,
    )],
    simulates: Annotated[str, option(
        "The topic whose asset, in the job `simulation`, takes the config `orders`.", default="ride_orders",
        metavar="TOPIC",
    )],
) -> None:  # fmt: skip
    """Run the whole system here: database, Dagster's webserver and daemon, the code location, a ride simulation.

    Without a database URL, it uses the embedded PostgreSQL of this directory, which stops when this command ends; its
    data stays. Dagster's own tables are in schema dagster_dev of the database. Give each checkout its own database: two
    that share one end each other's runs. Ctrl-C ends everything.
    """
    if not definitions.exists():
        raise click.UsageError(
            f"{definitions} does not exist here: run this in a checkout of the reference location, or name its file "
            "with --definitions"
        )
    config = {"ops": {topic_key(simulates).to_python_identifier(): {"config": {"orders": orders}}}}
    console = Console(stderr=True)
    home = context.settings.home
    # Take the lock first: a second `dev` must not stop the server of the first one.
    with (
        handling(_interrupt, signal.SIGTERM, signal.SIGHUP),
        only_one(instance_directory(home)),
        context.whole_system() as platform,
    ):
        java = ensure_java(home)
        console.print(f"Java {java.version} from {java.source}: {java.home}", highlight=False)
        dagster = _dagster(platform, definitions, home, port)
        # Do this before the daemon starts: its sensors launch runs for events that already wait.
        started, before = datetime.now(UTC), Counts.take(platform)
        columns = (SpinnerColumn(finished_text="✓"), "{task.description}", TimeElapsedColumn())
        with Progress(*columns, console=console) as progress, dagster:
            starting = progress.add_task("Dagster starts")
            dagster.start(on_wait=lambda what: progress.update(starting, description=f"Dagster starts: {what}"))
            progress.update(starting, description=f"Dagster runs at {dagster.url}", completed=1, total=1)
            with dagster.instance() as instance:
                running = _Running(platform, dagster, instance, progress, config)
                # The schedule begins only at the next full minute.
                for job in dagster.jobs_with(TRANSFER_TAG):
                    dagster.launch(job)
                running.run(SETUP_JOB, timeout=timeout)
                if not once:
                    progress.stop()
                    running.serve(console)
                faults = running.round(timeout)
                runs = instance.get_runs(dg.RunsFilter(created_after=started))
                topics = account(before, Counts.take(platform), RunCounts.take(instance, runs))

    failed = [run for run in runs if run.status is dg.DagsterRunStatus.FAILURE]
    if failed:
        say(f"{counted(len(failed), 'run')} failed, of job {failed[0].job_name} for example; later runs did their work")
    _show(topics)
    faults += [f"topic {entry.topic}: {fault}" for entry in topics for fault in entry.faults]
    if faults:
        raise RoundError("; ".join(faults))


def _dagster(platform: EventSQL, definitions: Path, home: Path, port: int) -> LocalDagster:
    database = platform.database
    database.ensure_schema()
    environment = {
        "EVENTSQL_DSN": database.dsn, "EVENTSQL_SCHEMA": database.schema, "PYSPARK_PYTHON": sys.executable,
        SPARK_CONFIG_VARIABLE: os.environ.get(SPARK_CONFIG_VARIABLE) or str(_spark_settings(home)),
    }  # fmt: skip
    instance_home = write_instance(home, database.dsn)
    return LocalDagster(definitions, instance_home=instance_home, port=port, environment=environment)


def _interrupt(*_: object) -> None:
    """End the command, with everything that it started, as Ctrl-C does."""
    raise KeyboardInterrupt


def _spark_settings(home: Path) -> Path:
    """Write a file of settings for sessions of a few seconds."""
    file = instance_directory(home) / "spark.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in SPARK_SETTINGS.items()), encoding="utf-8")
    return file


@dataclass(frozen=True, slots=True)
class _Running:
    """The running system. `config` is the config of the job that simulates."""

    platform: EventSQL
    dagster: LocalDagster
    instance: dg.DagsterInstance
    progress: Progress
    config: Mapping[str, object]

    def run(self, job: str, *, timeout: float, config: Mapping[str, object] | None = None) -> dg.DagsterRun:
        task = self.progress.add_task(f"Job {job}", total=1)
        run = self.dagster.wait(self.instance, self.dagster.launch(job, run_config=config), timeout=timeout)
        self.progress.update(task, completed=1)
        return run

    def round(self, timeout: float) -> list[str]:
        """Simulate, wait until all events are consumed, and verify. Gives the faults that the checks found."""
        deadline = time.monotonic() + timeout
        self.run(SIMULATION_JOB, config=self.config, timeout=timeout)
        task = self.progress.add_task("Consuming", total=None)
        settled: Counts | None = None
        while True:
            counts = Counts.take(self.platform)
            behind = sum(counts.lag.values()) + sum(counts.buffered.values())
            self.progress.update(task, description=f"Consuming: {behind} events to go")
            # Two equal counts: one count is no snapshot, because events move between topics while they are counted.
            if not behind and counts == settled and not self._consuming():
                break
            settled = counts if not behind else None
            self.dagster.require_running()
            if time.monotonic() > deadline:
                raise RoundError(
                    f"the round is not done after {timeout:.0f} s: {_left(self.platform)}; see {self.dagster.log}"
                )
            time.sleep(0.5)

        self.progress.update(task, description="Consumed", completed=1, total=1)
        left = max(1.0, deadline - time.monotonic())
        return _failed_checks(self.instance, self.run(VERIFICATION_JOB, timeout=left))

    def _consuming(self) -> bool:
        """Whether a run is under way that may publish or consume: any run except the transfer's."""
        return any(TRANSFER_TAG not in run.tags for run in self.instance.get_runs(UNDER_WAY))

    def serve(self, console: Console) -> NoReturn:
        """Simulate a round every minute and show lag, until the user ends it."""
        console.print(f"The Dagster UI is at {self.dagster.url} - Ctrl-C ends everything", highlight=False)
        due, simulating = 0.0, None
        with Live(lag_table(self.platform.lag()), console=console, refresh_per_second=2) as live:
            while True:
                self.dagster.require_running()
                # Only one run at a time: two runs would place the same orders.
                if time.monotonic() >= due and (simulating is None or self._ended(simulating)):
                    simulating = self.dagster.launch(SIMULATION_JOB, run_config=self.config)
                    due = time.monotonic() + SIMULATION_SECONDS
                live.update(lag_table(self.platform.lag()))
                time.sleep(1.0)

    def _ended(self, run_id: str) -> bool:
        run = self.instance.get_run_by_id(run_id)
        return run is None or run.status in FINISHED


def _left(platform: EventSQL) -> str:
    behind = [lag for lag in platform.lag() if lag.events]
    return "; ".join(f"{lag.topic}/{lag.consumer}[{lag.partition}] lacks {lag.events} ({lag.cause})" for lag in behind)


def _failed_checks(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[str]:
    """The asset checks of a run that did not pass, with their figures."""
    evaluations = [
        entry.dagster_event.asset_check_evaluation_data
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        if entry.dagster_event is not None
    ]
    if not evaluations:
        return [f"the job {VERIFICATION_JOB!r} evaluated no asset check"]
    failed = []
    for evaluation in evaluations:
        if not evaluation.passed:
            figures = json.dumps({name: value.value for name, value in evaluation.metadata.items()}, default=str)
            asset = evaluation.asset_key.to_user_string()
            failed.append(f"check {evaluation.check_name} of {asset} did not pass: {figures}")
    return failed


def _show(topics: list[TopicRound]) -> None:
    """Print the topics that have consumers, events or faults, without empty topics of dead letters."""
    columns: Columns = {
        **same("topic", "published", "transferred", "consumed", "consumers", "runs", "lag"),
        "result": lambda entry: "; ".join(entry.faults) or "exact",
    }
    show_items([entry for entry in topics if entry.published or entry.consumers or entry.faults], columns)
