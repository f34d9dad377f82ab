"""`eventsql dev`: the whole system on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Final

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.parameters import DIRECTORY, FILE, Seconds, Whole, command, option
from eventsql_orchestration.errors import MissingExtraError

DAGSTER_PORT: Final = 3000
AIRFLOW_PORT: Final = 8080


@command()
def dev(
    context: CliContext,
    *,
    file: Annotated[Path | None, option("The code location is this file.", "-f", "--file", type=FILE)],
    module: Annotated[str | None, option("The code location is this module.", "-m", "--module", metavar="NAME")],
    dags: Annotated[
        Path | None, option("Run Airflow with the DAGs of this directory, instead of Dagster.", type=DIRECTORY)
    ],
    once: Annotated[bool, option("Run one round: end when every consumer's lag is 0, and print a table.")],
    port: Annotated[int | None, option(
        f"The UI's port; if it is taken, a free one  [default: {DAGSTER_PORT}, Airflow's {AIRFLOW_PORT}].",
        type=Whole(1, 65535), metavar="PORT",
    )],
    timeout: Annotated[float, option(
        "Limit of the start of Dagster or Airflow, of each job or DAG of the setup, and of the round of --once.",
        default=600.0, type=Seconds(1.0), metavar="SECONDS",
    )],
    orders: Annotated[int | None, option(
        "Ride orders per round of the reference location's simulation  [default: 200].", type=Whole(1, 100_000)
    )],
    cold_spark: Annotated[bool, option("Start a Spark for each run, instead of one for all.")],
) -> None:  # fmt: skip
    """Run a code location here, with a database, Dagster's webserver and daemon.

    The code location is -f or -m; else the `dg` project of this directory, else its definitions.py. Its job that
    registers topics and consumers, which `build_definitions` makes, runs at the start. If the code location has no
    transfer, this command moves events.

    Without a database URL, it uses the embedded PostgreSQL of this directory, starts it again if it dies, and stops it
    when this command ends; its data stays. Dagster's own tables are in schema dagster_dev of the database. Give each
    checkout a database of its own: on a shared one, they end each other's runs. Ctrl-C ends everything, Dagster
    within two seconds.

    Where the packages of pyspark[connect] are installed, runs and tasks share one warm Spark, through Spark Connect.
    EVENTSQL_SPARK_CONFIG names a file with other settings.

    With --once, it ends when every consumer that is not paused has consumed everything. A simulation of the location
    runs once before. It fails if an event is lost or consumed twice, and if the lag is not 0 within --timeout.

    With --dags, it runs the DAGs of a directory in the Airflow of this environment, with the connection
    eventsql_default; they can import the code of this directory. Airflow's own tables are in a further database of
    the server. DAGs with the tag eventsql:setup run at the start, DAGs with eventsql:simulation in each round, and DAGs
    with eventsql:verification after a round of --once.
    """
    if dags is not None:
        if file is not None or module is not None:
            raise click.UsageError("--dags is for Airflow, -f and -m are for Dagster: give one of them")
        if importlib.util.find_spec("airflow") is None:
            raise MissingExtraError("airflow", "Airflow")
        from eventsql_orchestration.cli.airflow_development import develop as develop_dags  # noqa: PLC0415 - loads Airflow's parts

        develop_dags(
            context, dags, once=once, port=port or AIRFLOW_PORT, timeout=timeout, orders=orders, cold_spark=cold_spark
        )
        return

    from eventsql_orchestration.cli.development import develop  # noqa: PLC0415 - loads Dagster

    develop(
        context, file, module, once=once, port=port or DAGSTER_PORT, timeout=timeout, orders=orders,
        cold_spark=cold_spark,
    )  # fmt: skip
