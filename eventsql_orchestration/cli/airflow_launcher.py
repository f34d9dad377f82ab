"""Where `eventsql backfill` launches runs in Airflow. It needs no Airflow on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from eventsql_orchestration.airflow.api import running_url
from eventsql_orchestration.airflow.backfills import AirflowRuns
from eventsql_orchestration.orchestration.backfills.launcher import Launcher


def airflow_launcher(home: Path, url: str | None, dag: str | None) -> Launcher[Any]:
    """The Airflow at a URL, else that of the `eventsql dev --dags` of `home`. Raises `click.UsageError` without one."""
    url = url or running_url(home / "airflow")
    if url is None:
        raise click.UsageError("no `eventsql dev --dags` runs here: name a running Airflow with --airflow-url")
    return AirflowRuns(url, dag)
