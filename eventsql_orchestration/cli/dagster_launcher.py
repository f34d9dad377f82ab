"""Finds the Dagster in which `eventsql backfill` launches runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from eventsql_orchestration.cli.location import NO_LOCATION, location_here, location_of
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.dagster.backfills.local_launcher import LocalRuns
from eventsql_orchestration.dagster.backfills.remote_launcher import RemoteDagster
from eventsql_orchestration.dagster.local.code_location import CodeLocation
from eventsql_orchestration.dagster.local.dagster_process import running_url
from eventsql_orchestration.dagster.local.instance import instance_directory
from eventsql_orchestration.orchestration.backfills.launcher import Launcher


def dagster_launcher(
    home: Path, platform: EventSQL, topic: str, consumer: str,
    *, url: str | None, file: Path | None, module: str | None,
) -> Launcher:  # fmt: skip
    """The Dagster at a URL, else the definitions of a file or a module, else the `eventsql dev` of `home`.

    Without all of these, the code location of this directory. Raises `click.UsageError` for more than one of them, and
    if there is none.
    """
    named = [option for option in (url, file, module) if option is not None]
    if len(named) > 1:
        raise click.UsageError("give one of --dagster-url, -f and -m")
    url = url if named else running_url(instance_directory(home))
    if url is not None:
        return RemoteDagster(url, topic, consumer)

    location = location_of(file, module) if named else location_here()
    if location is None:
        raise click.UsageError(
            f"{NO_LOCATION}, and no `eventsql dev` runs here: name a running Dagster with --dagster-url, or "
            "definitions with -f or -m"
        )
    environment = {
        "EVENTSQL_DSN": " ".join(shard.database.dsn for shard in platform.shards),
        "EVENTSQL_SCHEMA": platform.shards[0].database.schema,
        "PYSPARK_PYTHON": sys.executable,
    }
    return LocalRuns(CodeLocation(**location), topic, consumer, environment=environment)
