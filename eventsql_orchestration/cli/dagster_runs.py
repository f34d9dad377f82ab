"""Finds the Dagster in which `eventsql trace` looks up runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

from eventsql_orchestration.dagster.local.dagster_process import running_url
from eventsql_orchestration.dagster.local.instance import CONFIG_FILE, STORAGE_VARIABLE, instance_directory, storage_url
from eventsql_orchestration.dagster.trace.runs import ServedRuns, StoredRuns
from eventsql_orchestration.orchestration.trace.runs import Runs


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
