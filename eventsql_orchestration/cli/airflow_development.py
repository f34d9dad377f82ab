"""Runs `eventsql dev --dags`: Airflow with a directory of DAGs, their setup and rounds, and a table of the lag."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import psycopg
from psycopg import sql
from sqlalchemy.engine.url import make_url

from eventsql_orchestration.airflow.api import URL_FILE
from eventsql_orchestration.airflow.backfills import UNDER_WAY
from eventsql_orchestration.airflow.local import LocalAirflow, connection_of, kill_session
from eventsql_orchestration.airflow.round_runs import run_counts, runs_since
from eventsql_orchestration.cli.airflow_url import airflow_home
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.rounds import RunningSystem, prepared, report, steps_shown, transferring
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.errors import AirflowAnswerError, LocalAirflowError, RoundError
from eventsql_orchestration.orchestration.local_processes import PROCESSES_LOCK, lock_file, python_path, take_lock
from eventsql_orchestration.orchestration.rounds import Counts, RunCounts

Answer = TypeVar("Answer")

SETUP: Final = "eventsql:setup"
SIMULATION: Final = "eventsql:simulation"
VERIFICATION: Final = "eventsql:verification"
"""Tags of DAGs that this command runs: at the start, once a round, and after it."""


def develop(
    context: CliContext, dags: Path, *, once: bool, port: int, timeout: float, orders: int | None, cold_spark: bool
) -> None:
    """Run a directory of DAGs until Ctrl-C, or with `once` until a round is done.

    Raises `RoundError` for a round with faults.
    """
    home = airflow_home(context.settings.home)
    variables = {
        # DAGs import the code beside which this command runs, as with `airflow standalone` in this directory.
        "PYTHONPATH": python_path(Path.cwd()),
        # More tasks at once only slow one another down.
        "AIRFLOW__CORE__PARALLELISM": "2",
    }
    with (
        prepared(context, home, cold_spark=cold_spark, kill=kill_session, **variables) as (platform, environment, keep),
        lock_file(home / PROCESSES_LOCK) as lock,
        steps_shown() as progress,
    ):
        take_lock(lock, home)
        started, before = datetime.now(UTC), Counts.take(platform)
        databases = [shard.database for shard in platform.shards]
        urls = [each.given_dsn for each in databases]
        # Airflow's tasks move no events.
        with (
            LocalAirflow(
                home, dags, _metadata_database(databases[0].dsn), environment=environment, port=port, lock=lock,
                connections={"eventsql_default": connection_of(urls, databases[0].schema)},
                start_timeout=timeout,
            ) as airflow,
            transferring(platform, stop_seconds=5.0),
        ):  # fmt: skip
            done = _Running(
                context=context, platform=platform, progress=progress, log=home, check=airflow.require_running,
                ui=f"The Airflow UI is at {airflow.url}", keep_spark=keep, before=before, airflow=airflow,
                started=started, orders=orders,
            ).run(once=once, timeout=timeout)  # fmt: skip
    report(*done)


def _metadata_database(url: str) -> str:
    """The URL of Airflow's own database, `<database>_airflow`. Makes the database if it is missing.

    Raises `LocalAirflowError`.
    """
    events = make_url(url).set(drivername="postgresql")
    name = f"{events.database or 'postgres'}_airflow"
    try:
        with psycopg.connect(events.render_as_string(hide_password=False), autocommit=True) as connection:
            known = "SELECT FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.=) %s"
            if connection.execute(known, (name,)).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise LocalAirflowError(f"the database {name!r} for Airflow cannot be made: {error}") from error
    return events.set(database=name).render_as_string(hide_password=False)


def _answer_or(late: Answer, ask: Callable[[], Answer]) -> Answer:
    """The answer of Airflow; `late` if none comes in time. Raises `AirflowAnswerError` for a refusal.

    The API server answers nothing while it imports modules for the first task: over 30 s on a busy machine.
    """
    try:
        return ask()
    except AirflowAnswerError:
        raise
    except LocalAirflowError:
        return late


@dataclass(kw_only=True)
class _Running(RunningSystem[tuple[str, str]]):
    """The running system with Airflow. A run is the id of a DAG and its own."""

    passing = (DatabaseUnavailableError, LocalAirflowError)

    airflow: LocalAirflow
    started: datetime
    orders: int | None

    @property
    def simulations(self) -> list[str]:
        return self.tagged(SIMULATION)

    def set_up(self, timeout: float) -> None:
        """Start Airflow and run the DAGs that set up. Raises `LocalAirflowError`."""
        airflow = self.airflow
        task = self.progress.add_task("Airflow starts: its tables", total=1)
        airflow.migrate()
        self.progress.update(task, description="Airflow starts: the DAGs")
        airflow.run("dags", "reserialize")
        self.progress.update(task, description="Airflow starts")
        airflow.start(["api-server", "scheduler", "dag-processor"])
        airflow.wait_until_ready()
        errors = list(airflow.api.pages("/importErrors", "import_errors"))
        if errors:
            raise LocalAirflowError(f"{errors[0]['filename']} cannot be imported: {errors[0]['stack_trace'].strip()}")
        if not self.tagged():
            raise LocalAirflowError(f"{airflow.dags} has no DAGs: name the directory that has them")
        if self.orders is not None and not self.simulations:
            raise click.UsageError(f"--orders is for DAGs with a simulation, and {airflow.dags} has none")
        self.progress.update(task, description=f"Airflow runs at {airflow.url}", completed=1)
        if not (setup := self.tagged(SETUP)):
            say(
                f"no DAG has the tag {SETUP!r}: register topics and consumers with `eventsql topic create` and "
                "`eventsql consumer create`"
            )
        for dag in setup:
            _, state = self._run(dag, time.monotonic() + timeout)
            if state != "success":
                raise LocalAirflowError(f"DAG {dag} failed: see its log at {airflow.url}, or in {self.log}")
        # Its watchers would look for consumers that are not there yet.
        airflow.start(["triggerer"])
        airflow.wait_until_ready()
        (airflow.home / URL_FILE).write_text(airflow.url, encoding="utf-8")

    def tagged(self, tag: str | None = None) -> list[str]:
        """The DAGs that have a tag; without a tag, all DAGs."""
        query: dict[str, Any] = {} if tag is None else {"tags": tag}
        return [dag["dag_id"] for dag in self.airflow.api.pages("/dags", "dags", **query)]

    def simulate(self, deadline: float) -> None:
        for dag, run in self.start_simulations():
            if self._wait(dag, run, deadline) != "success":
                raise RoundError(f"DAG {dag} failed: see its log in {self.log}")

    def start_simulations(self) -> list[tuple[str, str]]:
        """A DAG with a parameter `orders` gets the number of orders."""
        runs = []
        for dag in self.simulations:
            params = self.airflow.api.ask("GET", f"/dags/{dag}/details")["params"] or {}
            conf = {} if self.orders is None or "orders" not in params else {"orders": self.orders}
            runs.append((dag, self.airflow.api.trigger(dag, conf)))
        return runs

    def has_ended(self, run: tuple[str, str]) -> bool:
        return self.airflow.api.state(*run) not in UNDER_WAY

    def is_busy(self) -> bool:
        return _answer_or(
            True, lambda: any(run["state"] in UNDER_WAY for run in runs_since(self.airflow.api, self.started))
        )

    def verify(self, deadline: float) -> list[str]:
        return [fault for dag in self.tagged(VERIFICATION) for fault in self._failed_tasks(dag, deadline)]

    def run_counts(self) -> RunCounts:
        return run_counts(self.airflow.api, self.started)

    def _failed_tasks(self, dag: str, deadline: float) -> list[str]:
        run, _ = self._run(dag, deadline)
        tasks = self.airflow.api.pages(f"/dags/{dag}/dagRuns/{run}/taskInstances", "task_instances")
        return [
            f"check {task['task_id']} of DAG {dag} did not pass: see its log in {self.log}"
            for task in tasks
            if task["state"] != "success"
        ]

    def _run(self, dag: str, deadline: float) -> tuple[str, str]:
        """Run a DAG, as a step of the command; gives the run and its state."""
        task = self.progress.add_task(f"DAG {dag}", total=1)
        run = self.airflow.api.trigger(dag)
        state = self._wait(dag, run, deadline)
        self.progress.update(task, completed=1)
        return run, state

    def _wait(self, dag: str, run: str, deadline: float) -> str:
        """Wait for the end of a run; gives its state. Raises `RoundError` after the deadline."""
        while (state := _answer_or("running", lambda: self.airflow.api.state(dag, run))) in UNDER_WAY:
            self.check()
            if time.monotonic() > deadline:
                raise RoundError(f"DAG {dag} is not done in time: see the logs in {self.log}")
            time.sleep(0.5)
        return state
