"""The Airflow that a command asks: the option for its URL, and the Airflow of `eventsql dev --dags`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.parameters import option

AirflowUrl: TypeAlias = Annotated[str | None, option(
    "Airflow's URL, with a user: http://user:password@127.0.0.1:8080. The list of processes shows this option; "
    "EVENTSQL_AIRFLOW_URL hides the password.", metavar="URL", envvar="EVENTSQL_AIRFLOW_URL",
)]  # fmt: skip


def airflow_home(home: Path) -> Path:
    """The directory of the Airflow of `eventsql dev --dags`."""
    return home / "airflow"


def local_airflow(home: Path) -> str | None:
    """The URL of the `eventsql dev --dags` that runs in this home; None if none answers."""
    return lazy.running_airflow(airflow_home(home)) if airflow_home(home).exists() else None
