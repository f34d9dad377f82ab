"""`eventsql dev`: the whole system on this machine."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.parameters import DIRECTORY, FILE, Number, command, option
from eventsql_orchestration.errors import ConfigurationError, MissingExtraError

DAGSTER_PORT: Final = 3000
AIRFLOW_PORT: Final = 8080

NO_LOCATION: Final = "there is no code location here, neither a `dg` project nor definitions.py"


@command(short_help="Run the whole system on this machine.")
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
        type=click.IntRange(1, 65535), metavar="PORT",
    )],
    timeout: Annotated[float, option(
        "Limit of Dagster's start, of each job of the setup, and of the round of --once.",
        default=600.0, type=Number(1.0), metavar="SECONDS",
    )],
    orders: Annotated[int | None, option(
        "Ride orders per round of the reference location's simulation  [default: 200].", type=click.IntRange(1, 100_000)
    )],
    cold_spark: Annotated[bool, option("Start a Spark for each run, instead of one for all.")],
) -> None:  # fmt: skip
    """Run a code location here, with a database, Dagster's webserver and daemon.

    The code location is -f or -m; else the `dg` project of this directory, else its definitions.py. At the start, the
    jobs register its topics and consumers (`build_definitions` makes the job). If it has no transfer, this command
    moves events.

    Without a database URL, it uses the embedded PostgreSQL of this directory, starts it again if it dies, and stops it
    when this command ends; its data stays. Dagster's own tables are in schema dagster_dev of the database. Give each
    checkout a database of its own: on a shared one, they end each other's runs. Ctrl-C ends everything within two
    seconds.

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
        from eventsql_orchestration.cli.airflow_development import (  # noqa: PLC0415 - loads Airflow's parts
            AirflowDevelopment,
        )

        AirflowDevelopment(
            context=context, dags=dags, port=port or AIRFLOW_PORT, timeout=timeout, orders=orders, cold_spark=cold_spark
        ).run(once=once)
        return

    from eventsql_orchestration.cli.development import Development  # noqa: PLC0415 - loads Dagster

    Development(
        context=context, location=location_of(file, module), port=port or DAGSTER_PORT, timeout=timeout, orders=orders,
        cold_spark=cold_spark,
    ).run(once=once)  # fmt: skip


def location_of(file: Path | None, module: str | None) -> dict[str, Any]:
    """The fields of the `CodeLocation` that the options or this directory name.

    Raises `ConfigurationError` for a pyproject.toml that cannot be read, and `click.UsageError` if there is none.
    """
    if file is not None and module is not None:
        raise click.UsageError("-f and -m both name the code location: give one of them")
    if module is not None:
        return _imported(module)
    if file is not None:
        if not file.exists():
            raise click.UsageError(f"{file} does not exist")
        return {"file": file}
    if (here := location_here()) is None:
        raise click.UsageError(f"{NO_LOCATION}: name one with -f or -m, or make a project with `eventsql init`")
    return here


def location_here() -> dict[str, Any] | None:
    """The fields of the `CodeLocation` of this directory: its `dg` project, else its definitions.py; None without both.

    Raises `ConfigurationError` for a pyproject.toml that cannot be read.
    """
    if (module := _module_of(Path("pyproject.toml"))) is not None:
        return _imported(module)
    file = Path("definitions.py")
    return {"file": file} if file.exists() else None


def _imported(module: str) -> dict[str, Any]:
    # A project that is not installed is imported from where its sources are.
    sources = Path("src")
    return {"module": module, "imports": sources if (sources / module.partition(".")[0]).exists() else None}


def _module_of(file: Path) -> str | None:
    """The module of definitions of a project for `dg` or `dagster dev`; None if the file names none."""
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from None
    named = tool.get("dg", {}).get("project", {})
    root = named.get("root_module")
    module: str | None = named.get("code_location_target_module") or (f"{root}.definitions" if root else None)
    return module or tool.get("dagster", {}).get("module_name")
