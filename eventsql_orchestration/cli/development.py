"""Runs `eventsql dev`: a code location's setup, its rounds, and a table of its consumers' lag."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

import click
import dagster as dg
import sqlalchemy

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.location import location_of
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.rounds import RunningSystem, prepared, report, steps_shown, transferring
from eventsql_orchestration.dagster.local.dagster_process import STOP_SECONDS, UNDER_WAY, LocalDagster
from eventsql_orchestration.dagster.local.instance import instance_directory, write_instance
from eventsql_orchestration.dagster.local.run_counts import run_counts
from eventsql_orchestration.dagster.tags import (
    DEV_SETUP,
    DEV_SIMULATION,
    DEV_TAG,
    DEV_VERIFICATION,
    QUEUE_TAG,
    TRANSFER_TAG,
)
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.errors import LocalDagsterError
from eventsql_orchestration.orchestration.local_processes import python_path
from eventsql_orchestration.orchestration.rounds import Counts, RunCounts
from eventsql_orchestration.queue.lag import queue_lags

_SIMULATED: Final = "topic__ride_orders"
"""The op of the reference location's simulation that takes the config `orders`."""


def develop(
    context: CliContext, file: Path | None, module: str | None,
    *, once: bool, port: int, timeout: float, orders: int | None, cold_spark: bool,
) -> None:  # fmt: skip
    """Run the code location that the options or this directory name until Ctrl-C, or with `once` until a round is done.

    Raises as `location_of`, `LocalDagsterError` for a location that cannot be loaded, `RoundError` for a round with
    faults.
    """
    location = location_of(file, module)
    location.check()
    home = context.settings.home
    directory = instance_directory(home)
    # The functions that a run gives to Spark import the code of the location in Spark's Python.
    modules = python_path(*location.directories)
    with prepared(context, directory, cold_spark=cold_spark, PYTHONPATH=modules) as (platform, environment, keep_spark):
        dagster = LocalDagster(
            location, instance_home=write_instance(home, platform.database.dsn), port=port, environment=environment,
            on_stop=say,
        )  # fmt: skip
        # Do this before the daemon starts: its sensors launch runs for events that already wait.
        started, before = datetime.now(UTC), Counts.take(platform)
        with steps_shown() as progress, dagster, dagster.instance() as instance:
            starting = progress.add_task("Dagster starts")
            dagster.start(
                timeout=timeout, on_wait=lambda what: progress.update(starting, description=f"Dagster starts: {what}")
            )
            progress.update(starting, description=f"Dagster runs at {dagster.url}", completed=1, total=1)
            running = Running(
                context=context, platform=platform, progress=progress, log=dagster.log, before=before,
                ui=f"The Dagster UI is at {dagster.url}", check=dagster.require_running, keep_spark=keep_spark,
                dagster=dagster, instance=instance, started=started, config=_simulation_config(dagster, orders),
            )  # fmt: skip
            with running.transferring():
                done = running.run(once=once, timeout=timeout)
    report(*done)


def _simulation_config(dagster: LocalDagster, orders: int | None) -> Mapping[str, object]:
    """The config of the job that simulates: only the reference location's takes the number of orders."""
    if orders is None:
        return {}
    if not dagster.jobs_with(DEV_TAG, DEV_SIMULATION):
        raise click.UsageError(f"--orders is for a location with a simulation, and {dagster.location} has none")
    return {"ops": {_SIMULATED: {"config": {"orders": orders}}}}


@dataclass(kw_only=True)
class Running(RunningSystem[str]):
    """The running system with Dagster. `config` is the simulations' run config."""

    passing = (DatabaseUnavailableError, LocalDagsterError, sqlalchemy.exc.DBAPIError)

    dagster: LocalDagster
    instance: dg.DagsterInstance
    started: datetime
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def simulations(self) -> list[str]:
        return self.dagster.jobs_with(DEV_TAG, DEV_SIMULATION)

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Move events in the block: the location's transfer does it, or if it has none, this process."""
        jobs = self.dagster.jobs_with(TRANSFER_TAG)
        # The schedule begins only at the next full minute.
        for job in jobs:
            self.dagster.launch(job)
        if jobs:
            yield
            return

        say(
            f"{self.dagster.location} has no transfer, so this command moves events: elsewhere run `eventsql "
            "transfer`, or add build_transfer_schedule()"
        )
        with transferring(self.platform, stop_seconds=STOP_SECONDS):
            yield

    def set_up(self, timeout: float) -> None:
        jobs = self.dagster.jobs_with(DEV_TAG, DEV_SETUP)
        if not jobs:
            say(
                f"{self.dagster.location} has no job that registers its topics and consumers: `build_definitions` and "
                "`build_register_job` make one, or use `eventsql topic create` and `eventsql consumer create`"
            )
        for job in jobs:
            self._run(job, timeout=timeout)

    def _run(self, job: str, *, timeout: float, config: Mapping[str, object] | None = None) -> dg.DagsterRun:
        task = self.progress.add_task(f"Job {job}", total=1)
        run = self.dagster.wait(self.instance, self.dagster.launch(job, run_config=config), timeout=timeout)
        self.progress.update(task, completed=1)
        return run

    def simulate(self, deadline: float) -> None:
        for job in self.simulations:
            self._run(job, config=self.config, timeout=_left(deadline))

    def start_simulations(self) -> list[str]:
        return [self.dagster.launch(job, run_config=self.config) for job in self.simulations]

    def has_ended(self, run_id: str) -> bool:
        run = self.instance.get_run_by_id(run_id)
        return run is None or run.is_finished

    def is_busy(self) -> bool:
        if any(TRANSFER_TAG not in run.tags for run in self.instance.get_runs(UNDER_WAY)):
            return True
        if not (queues := self._queues):
            return False
        lags = (lag for shard in self.platform.shards for lag in queue_lags(shard.database))
        # Delayed messages may be due long after the round.
        return any(lag.queue in queues and lag.depth > lag.delayed for lag in lags)

    @cached_property
    def _queues(self) -> set[str]:
        return self.dagster.values_of(QUEUE_TAG)

    def verify(self, deadline: float) -> list[str]:
        return [
            fault
            for job in self.dagster.jobs_with(DEV_TAG, DEV_VERIFICATION)
            for fault in _failed_checks(self.instance, self._run(job, timeout=_left(deadline)))
        ]

    def run_counts(self) -> RunCounts:
        return run_counts(self.instance, self.instance.get_runs(dg.RunsFilter(created_after=self.started)))


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _failed_checks(instance: dg.DagsterInstance, run: dg.DagsterRun) -> list[str]:
    """The asset checks of a run that did not pass, with their figures."""
    evaluations = [
        entry.dagster_event.asset_check_evaluation_data
        for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        if entry.dagster_event is not None
    ]
    if not evaluations:
        return [f"the job {run.job_name!r} evaluated no asset check"]
    failed = []
    for evaluation in evaluations:
        if not evaluation.passed:
            figures = json.dumps({name: value.value for name, value in evaluation.metadata.items()}, default=str)
            asset = evaluation.asset_key.to_user_string()
            failed.append(f"check {evaluation.check_name} of {asset} did not pass: {figures}")
    return failed
