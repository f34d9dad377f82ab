"""Runs `eventsql dev --dags`: Airflow with a directory of DAGs, their setup and rounds, and a table of the lag."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import psycopg
from psycopg import sql
from rich.progress import Progress
from sqlalchemy.engine.url import make_url

from eventsql_orchestration.airflow.api import URL_FILE
from eventsql_orchestration.airflow.backfills import UNDER_WAY
from eventsql_orchestration.airflow.local import LocalAirflow, connection_of, kill_session
from eventsql_orchestration.airflow.round_runs import run_counts, runs_since
from eventsql_orchestration.cli.airflow_url import airflow_home
from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.rounds import (
    Simulations,
    consume_all,
    find_java,
    interrupt,
    report,
    serve,
    spark_environment,
    spark_for_runs,
    steps_shown,
    transferring,
)
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.orchestration.errors import LocalAirflowError, RoundError
from eventsql_orchestration.orchestration.local_processes import (
    PROCESSES_LOCK,
    lock_file,
    only_one,
    take_lock,
    temporary_directory,
)
from eventsql_orchestration.orchestration.rounds import Counts, account
from eventsql_orchestration.signals import handling

SETUP: Final = "eventsql:setup"
SIMULATION: Final = "eventsql:simulation"
VERIFICATION: Final = "eventsql:verification"
"""Tags of DAGs that this command runs: at the start, once a round, and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AirflowDevelopment:
    """A directory of DAGs under `eventsql dev --dags`."""

    context: CliContext
    dags: Path
    port: int
    timeout: float
    orders: int | None
    cold_spark: bool

    def run(self, *, once: bool) -> None:
        """Run until Ctrl-C, or with `once` until a round is done. Raises `RoundError` for a round with faults."""
        home = airflow_home(self.context.settings.home)
        # Take the lock first: a second `dev` must not stop the server of the first one.
        with (
            handling(interrupt, signal.SIGTERM, signal.SIGHUP),
            only_one(home, kill=kill_session),
            temporary_directory(home) as temporary,
            self.context.whole_system() as platform,
            lock_file(home / PROCESSES_LOCK) as lock,
            steps_shown() as progress,
        ):
            take_lock(lock, home)
            warm = find_java(self.context.settings.home) and not self.cold_spark
            environment = {
                **spark_environment(platform),
                "TMPDIR": str(temporary),
                # DAGs import the code beside which this command runs, as with `airflow standalone` in this directory.
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])),
            }
            started, before = datetime.now(UTC), Counts.take(platform)
            # Airflow's tasks move no events.
            with (
                spark_for_runs(home, environment, warm=warm) as (spark, keep_spark),
                self._airflow(platform, home, lock, {**environment, **spark}) as airflow,
                transferring(platform, stop_seconds=5.0),
            ):
                running = _Running(self.context, platform, airflow, progress, self.orders, keep_spark)
                running.start(self.dags, self.timeout)
                if not once:
                    running.serve()
                faults = running.round(self.timeout)
                failed = [run["dag_id"] for run in runs_since(airflow.api, started) if run["state"] == "failed"]
                counts = run_counts(airflow.api, started)
                topics = account(before, Counts.take(platform), counts, alone=bool(running.tagged(SIMULATION)))
        report(failed, topics, faults)

    def _airflow(self, platform: EventSQL, home: Path, lock: int, environment: Mapping[str, str]) -> LocalAirflow:
        urls = [shard.database.dsn for shard in platform.shards]
        return LocalAirflow(
            home, self.dags, _metadata_database(urls[0]),
            connections={"eventsql_default": connection_of(urls, platform.shards[0].database.schema)},
            # More tasks at once only slow one another down.
            environment={**environment, "AIRFLOW__CORE__PARALLELISM": "2"}, port=self.port, lock=lock,
            start_timeout=self.timeout,
        )  # fmt: skip


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


@dataclass(slots=True)
class _Running:
    """The running system. `keep_spark` starts Spark again if it has died."""

    context: CliContext
    platform: EventSQL
    airflow: LocalAirflow
    progress: Progress
    orders: int | None
    keep_spark: Callable[[], None]

    def start(self, dags: Path, timeout: float) -> None:
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
            raise LocalAirflowError(f"{dags} has no DAGs: name the directory that has them")
        if self.orders is not None and not self.tagged(SIMULATION):
            raise click.UsageError(f"--orders is for DAGs with a simulation, and {dags} has none")
        self.progress.update(task, description=f"Airflow runs at {airflow.url}", completed=1)
        if not (setup := self.tagged(SETUP)):
            say(
                f"no DAG has the tag {SETUP!r}: register topics and consumers with `eventsql topic create` and "
                "`eventsql consumer create`"
            )
        for dag in setup:
            self._run(dag, timeout)
        # Its watchers would look for consumers that are not there yet.
        airflow.start(["triggerer"])
        airflow.wait_until_ready()
        (airflow.home / URL_FILE).write_text(airflow.url, encoding="utf-8")

    def tagged(self, tag: str | None = None) -> list[str]:
        """The DAGs that have a tag; without a tag, all DAGs."""
        query: dict[str, Any] = {} if tag is None else {"tags": tag}
        return [dag["dag_id"] for dag in self.airflow.api.pages("/dags", "dags", **query)]

    def round(self, timeout: float) -> list[str]:
        """Simulate, wait until all events are consumed, and verify. Gives the faults that the checks found."""
        deadline = time.monotonic() + timeout
        simulations = self.tagged(SIMULATION)
        begun = datetime.now(UTC)
        runs = [(dag, self.simulate(dag)) for dag in simulations]
        for dag, run in runs:
            if self._wait(dag, run, deadline) == "failed":
                raise RoundError(f"DAG {dag} failed: see its log in {self.airflow.home}")
        consume_all(
            self.platform, self.progress, deadline, busy=lambda: self._consuming(begun), check=self._check,
            log=self.airflow.home,
        )  # fmt: skip
        if not simulations:
            return []
        return [fault for dag in self.tagged(VERIFICATION) for fault in self._verify(dag, deadline)]

    def _check(self) -> None:
        self.airflow.check()
        self.keep_spark()

    def simulate(self, dag: str) -> str:
        """Start a simulation and return its run. A DAG with a parameter `orders` gets the number of orders."""
        params = self.airflow.api.ask("GET", f"/dags/{dag}/details")["params"] or {}
        conf = {} if self.orders is None or "orders" not in params else {"orders": self.orders}
        return self.airflow.api.trigger(dag, conf)

    def _run(self, dag: str, timeout: float) -> None:
        task = self.progress.add_task(f"DAG {dag}", total=1)
        if self._wait(dag, self.airflow.api.trigger(dag), time.monotonic() + timeout) == "failed":
            raise LocalAirflowError(f"DAG {dag} failed: see its log at {self.airflow.url}, or in {self.airflow.home}")
        self.progress.update(task, completed=1)

    def _wait(self, dag: str, run: str, deadline: float) -> str:
        """Wait for the end of a run; gives its state. Raises `RoundError` after the deadline."""
        while (state := self.airflow.api.state(dag, run)) in UNDER_WAY:
            self.airflow.check()
            if time.monotonic() > deadline:
                raise RoundError(f"DAG {dag} is not done in time: see the logs in {self.airflow.home}")
            time.sleep(0.5)
        return state

    def _consuming(self, since: datetime) -> bool:
        return any(run["state"] in UNDER_WAY for run in runs_since(self.airflow.api, since))

    def _verify(self, dag: str, deadline: float) -> Sequence[str]:
        """Run a DAG of checks; gives its tasks that failed."""
        task = self.progress.add_task(f"DAG {dag}", total=1)
        run = self.airflow.api.trigger(dag)
        self._wait(dag, run, deadline)
        self.progress.update(task, completed=1)
        tasks = self.airflow.api.pages(f"/dags/{dag}/dagRuns/{run}/taskInstances", "task_instances")
        return [
            f"check {each['task_id']} of DAG {dag} did not pass: see its log in {self.airflow.home}"
            for each in tasks
            if each["state"] != "success"
        ]

    def serve(self) -> NoReturn:
        """Show lag, and simulate a round every minute if there is a simulation, until the user ends it."""
        airflow = self.airflow
        simulations = Simulations(
            lambda: [(dag, self.simulate(dag)) for dag in self.tagged(SIMULATION)],
            lambda run: airflow.api.state(*run) not in UNDER_WAY,
        )
        serve(
            self.context, self.platform, self.progress, simulations, ui=f"The Airflow UI is at {airflow.url}",
            check=airflow.check, keep_spark=self.keep_spark, passing=(DatabaseUnavailableError, LocalAirflowError),
        )  # fmt: skip
