"""`eventsql dev`: the whole system on this machine, and a ride simulation to look at."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import click
import dagster as dg
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.lag import lag_table
from eventsql_orchestration.cli.output import counted, say, show_table
from eventsql_orchestration.cli.parameters import Number
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.dagster.local.dagster_process import UNDER_WAY, LocalDagster, free_port, only_one
from eventsql_orchestration.dagster.local.instance import instance_directory, write_instance
from eventsql_orchestration.dagster.local.round_report import Counts, RunCounts, TopicRound, account
from eventsql_orchestration.dagster.tags import FINISHED, TRANSFER_TAG
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.errors import RoundError
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


@click.command()
@click.option("--once", is_flag=True, help="Run one bounded round until every consumer's lag is 0, print a table, end.")
@click.option(
    "--orders",
    default=200,
    show_default=True,
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Ride orders per round.",
)
@click.option(
    "--port",
    default=3000,
    show_default=True,
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The Dagster UI's port; if it is taken, a free port is used.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=Number(1.0),
    metavar="SECONDS",
    help="Seconds that the round of --once may take, and the setup before it.",
)
@click.option(
    "--definitions",
    default="definitions.py",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The code location to run; it has the jobs `setup`, `simulation` and `verification`.",
)
@click.option(
    "--simulates",
    default="ride_orders",
    show_default=True,
    metavar="TOPIC",
    help="The topic whose asset, in the job `simulation`, takes the config `orders`.",
)
@pass_context
def dev(
    context: CliContext, *, once: bool, orders: int, port: int, timeout: float, definitions: Path, simulates: str
) -> None:
    """Run the whole system here: database, Dagster's webserver and daemon, the code location, a ride simulation.

    Without a database URL, it uses the embedded PostgreSQL of this directory, which stops when this command ends; its
    data stays. Dagster's own tables are in schema dagster_dev of the database. Give each checkout its own database: two
    that share one end each other's runs. Ctrl-C ends everything.
    """
    simulation = {"ops": {topic_key(simulates).to_python_identifier(): {"config": {"orders": orders}}}}
    if not definitions.exists():
        raise click.UsageError(
            f"{definitions} does not exist here: run this in a checkout of the reference location, or name its file "
            "with --definitions"
        )
    console = Console(stderr=True)
    home = context.settings.home
    # Take the lock first: a second `dev` must not stop the server of the first one.
    with _termination_as_interrupt(), only_one(instance_directory(home)), context.whole_system() as system:
        java = ensure_java(home)
        console.print(f"Java {java.version} from {java.source}: {java.home}", highlight=False)
        platform = system.platform
        platform.database.ensure_schema()
        dagster = LocalDagster(
            definitions,
            instance_home=write_instance(home, platform.database.dsn),
            port=free_port(port),
            environment={
                "EVENTSQL_DSN": platform.database.dsn,
                "EVENTSQL_SCHEMA": platform.database.schema,
                "PYSPARK_PYTHON": sys.executable,
                SPARK_CONFIG_VARIABLE: os.environ.get(SPARK_CONFIG_VARIABLE) or str(_spark_settings(home)),
            },
        )
        # Do this before the daemon starts: its sensors launch runs for events that already wait.
        started, before = datetime.now(UTC), Counts.take(platform)
        with _progress(console) as progress, dagster:
            starting = progress.add_task("Dagster starts")
            dagster.start(on_wait=lambda what: progress.update(starting, description=f"Dagster starts: {what}"))
            progress.update(starting, description=f"Dagster runs at {dagster.url}", completed=1, total=1)
            with dagster.instance() as instance:
                # The schedule begins only at the next full minute.
                for job in dagster.jobs_with(TRANSFER_TAG):
                    dagster.launch(job)
                _run(dagster, instance, progress, SETUP_JOB, timeout=timeout)
                if not once:
                    progress.stop()
                    _serve(console, dagster, instance, platform, simulation=simulation)
                    return
                faults = _round(dagster, instance, platform, progress, simulation=simulation, timeout=timeout)
                runs = instance.get_runs(dg.RunsFilter(created_after=started))
                topics = account(before, Counts.take(platform), RunCounts.take(instance, runs))
    failed = [run for run in runs if run.status is dg.DagsterRunStatus.FAILURE]
    if failed:
        say(f"{counted(len(failed), 'run')} failed and made up for, of job {failed[0].job_name} for example")
    _show(topics)
    faults += [f"topic {entry.topic}: {fault}" for entry in topics for fault in entry.faults]
    if faults:
        raise RoundError("; ".join(faults))


def _spark_settings(home: Path) -> Path:
    """Write a file of settings for sessions of a few seconds."""
    file = instance_directory(home) / "spark.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in SPARK_SETTINGS.items()), encoding="utf-8")
    return file


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and the end of the terminal end this command as Ctrl-C does, with everything that it started."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        # A signal that nohup ignores stays ignored.
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )


def _run(
    dagster: LocalDagster,
    instance: dg.DagsterInstance,
    progress: Progress,
    job: str,
    *,
    timeout: float,
    run_config: Mapping[str, object] | None = None,
) -> dg.DagsterRun:
    task = progress.add_task(f"Job {job}", total=1)
    run = dagster.wait(instance, dagster.launch(job, run_config=run_config), timeout=timeout)
    progress.update(task, completed=1)
    return run


def _round(
    dagster: LocalDagster,
    instance: dg.DagsterInstance,
    platform: EventSQL,
    progress: Progress,
    *,
    simulation: Mapping[str, object],
    timeout: float,
) -> list[str]:
    """Simulate, wait until all events are consumed, and verify. Gives the faults that the checks found."""
    deadline = time.monotonic() + timeout
    _run(dagster, instance, progress, SIMULATION_JOB, run_config=simulation, timeout=timeout)
    task = progress.add_task("Consuming", total=None)
    settled: Counts | None = None
    while True:
        counts = Counts.take(platform)
        behind = sum(counts.lag.values()) + sum(counts.buffered.values())
        progress.update(task, description=f"Consuming: {behind} events to go")
        # Two equal counts: one count is no snapshot, because events move between topics while they are counted.
        if not behind and counts == settled and not _consuming(instance):
            break
        settled = counts if not behind else None
        dagster.require_running()
        if time.monotonic() > deadline:
            raise RoundError(f"the round is not done after {timeout:.0f} s: {_left(platform)}; see {dagster.log}")
        time.sleep(0.5)
    progress.update(task, description="Consumed", completed=1, total=1)
    left = max(1.0, deadline - time.monotonic())
    return _failed_checks(instance, _run(dagster, instance, progress, VERIFICATION_JOB, timeout=left))


def _consuming(instance: dg.DagsterInstance) -> bool:
    """Whether a run is under way that may publish or consume: any run except the transfer's."""
    return any(TRANSFER_TAG not in run.tags for run in instance.get_runs(UNDER_WAY))


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


def _serve(
    console: Console,
    dagster: LocalDagster,
    instance: dg.DagsterInstance,
    platform: EventSQL,
    *,
    simulation: Mapping[str, object],
) -> None:
    """Simulate a round every minute and show lag, until the user ends it."""
    console.print(f"The Dagster UI is at {dagster.url} - Ctrl-C ends everything", highlight=False)
    due, simulating = 0.0, None
    with Live(lag_table(platform.lag()), console=console, refresh_per_second=2) as live:
        while True:
            dagster.require_running()
            # Only one run at a time: two runs would place the same orders.
            if time.monotonic() >= due and (simulating is None or _ended(instance, simulating)):
                simulating = dagster.launch(SIMULATION_JOB, run_config=simulation)
                due = time.monotonic() + SIMULATION_SECONDS
            live.update(lag_table(platform.lag()))
            time.sleep(1.0)


def _ended(instance: dg.DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is None or run.status in FINISHED


def _show(topics: list[TopicRound]) -> None:
    """Print the topics that have consumers, events or faults, without empty topics of dead letters."""
    show_table(
        ["topic", "published", "transferred", "consumed", "consumers", "runs", "lag", "result"],
        [
            (
                entry.topic,
                entry.published,
                entry.transferred,
                entry.consumed,
                entry.consumers,
                entry.runs,
                entry.lag,
                "; ".join(entry.faults) or "exact",
            )
            for entry in topics
            if entry.published or entry.consumers or entry.faults
        ],
    )
