"""Finds the Dagster in which `eventsql backfill` launches runs, and in which `eventsql trace` looks them up."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import dagster as dg

from eventsql_orchestration.cli.location import NO_LOCATION, location_here, location_of
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.dagster.backfills.local_launcher import LocalRuns
from eventsql_orchestration.dagster.backfills.remote_launcher import RemoteDagster
from eventsql_orchestration.dagster.local.dagster_process import running_url
from eventsql_orchestration.dagster.local.instance import CONFIG_FILE, STORAGE_VARIABLE, instance_directory, storage_url
from eventsql_orchestration.dagster.trace.runs import ServedRuns, StoredRuns
from eventsql_orchestration.orchestration.backfills.launcher import Launcher
from eventsql_orchestration.orchestration.trace.runs import Runs


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
        "EVENTSQL_DSN": " ".join(shard.database.given_dsn for shard in platform.shards),
        "EVENTSQL_SCHEMA": platform.shards[0].database.schema,
        "PYSPARK_PYTHON": sys.executable,
    }
    return LocalRuns(location, topic, consumer, environment=environment)


def local_dagster(home: Path) -> str | None:
    """The URL of the `eventsql dev` that runs in this home; None if none answers, or DAGSTER_HOME names an instance."""
    return None if os.environ.get("DAGSTER_HOME") else running_url(instance_directory(home))


@contextlib.contextmanager
def dagster_runs(home: Path, dsn: str, url: str | None) -> Iterator[Runs | Exception | None]:
    """The runs of the Dagster at a URL, else of the instance of DAGSTER_HOME, else of `eventsql dev` in `home`.

    None without any of them, and the error of an instance that cannot be opened. Raises `ValidationError` if a URL is
    not an HTTP URL.
    """
    if url is not None:
        yield ServedRuns(url)
        return
    directory = os.environ.get("DAGSTER_HOME")
    if not directory and (instance_directory(home) / CONFIG_FILE).exists():
        directory = str(instance_directory(home))
        os.environ.setdefault(STORAGE_VARIABLE, storage_url(dsn))
    if not directory:
        yield None
        return
    with contextlib.ExitStack() as opened:
        found: Runs | Exception
        try:
            found = StoredRuns(opened.enter_context(dg.DagsterInstance.from_config(directory)))
        except Exception as error:  # noqa: BLE001 - an instance may have any storage, with its own errors
            found = error
        yield found
