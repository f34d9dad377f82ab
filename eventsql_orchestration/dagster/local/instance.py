"""A Dagster instance for the platform: storage beside the events, threads, bounded history and concurrency."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import dagster as dg
import yaml  # type: ignore[import-untyped]  # it comes with dagster, without types

from eventsql_orchestration.dagster.tags import BACKFILL_OF_TAG
from eventsql_orchestration.database import Database
from eventsql_orchestration.database.urls import parse_dsn

STORAGE_SCHEMA: Final = "dagster_dev"
"""The schema of Dagster's tables for `eventsql dev`. A deployment uses `dagster`: two daemons on one storage would end
each other's runs."""

STORAGE_VARIABLE: Final = "DAGSTER_PG_URL"
"""The environment variable with the URL of the storage. Dagster repeats dagster.yaml in the command lines of its
processes, which every user of the machine can read, so the file must not hold a password."""

CONFIG_FILE: Final = "dagster.yaml"


def instance_directory(home: Path) -> Path:
    """The directory of a home's instance, for DAGSTER_HOME."""
    return (home / "dagster").resolve()


def write_instance(home: Path, dsn: str, *, max_concurrent_runs: int | None = None) -> Path:
    """Write `<home>/dagster/dagster.yaml`, and create its storage in schema `dagster_dev` of a database.

    Gives the directory, for DAGSTER_HOME. The file reads the storage's URL from the environment variable
    DAGSTER_PG_URL, which this function sets for this process and its children. Each call writes the file anew.
    `max_concurrent_runs` is by default three for each core.

    Raises `DatabaseUnavailableError`, and `ConfigurationError` for a `dsn` that is not a PostgreSQL URL.
    """
    directory = instance_directory(home)
    directory.mkdir(parents=True, exist_ok=True)
    os.environ[STORAGE_VARIABLE] = storage_url(dsn)
    config = yaml.safe_dump(
        instance_config(max_concurrent_runs=max_concurrent_runs or 3 * (os.cpu_count() or 2)), sort_keys=False
    )
    draft = directory / "dagster.tmp"
    draft.write_text("# Written by eventsql: changes are lost.\n" + config, encoding="utf-8")
    draft.replace(directory / CONFIG_FILE)
    with Database(dsn) as database, database.errors(), database.engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {STORAGE_SCHEMA}")
    # Create Dagster's tables here: several processes that create them at once collide.
    with dg.DagsterInstance.from_config(str(directory)) as instance:
        instance.get_runs_count()
    return directory


def instance_config(*, max_concurrent_runs: int = 6) -> dict[str, Any]:
    """The content of `dagster.yaml`; deploy/dagster.yaml is the same."""
    return {
        # Dagster's own storage connects anew for each access.
        "storage": {
            "custom": {
                "module": "eventsql_orchestration.dagster.pooled_storage",
                "class": "PooledPostgresStorage",
                "config": {"postgres_url": {"env": STORAGE_VARIABLE}},
            }
        },
        "run_coordinator": {
            "module": "dagster.core.run_coordinator",
            "class": "QueuedRunCoordinator",
            "config": {
                # Dagster's default of 5 s is half of the time that a cold partition may wait for its run.
                "dequeue_interval_seconds": 1,
                "dequeue_use_threads": True,
                "dequeue_num_workers": 4,
                # On a busy machine, a code server does not always answer in time.
                "max_user_code_failure_retries": 5,
                "user_code_failure_retry_delay": 5,
            },
        },
        **_runs(max_concurrent_runs),
        "run_monitoring": {
            "enabled": True,
            "start_timeout_seconds": 180,
            "cancel_timeout_seconds": 60,
            "poll_interval_seconds": 10,
            # The next tick claims anew, and run_retries retries: a resumed run would compete with both.
            "max_resume_run_attempts": 0,
            # With `granularity: op`, a process that was killed keeps its place in a pool, and nobody else gets it.
            "free_slots_after_run_end_seconds": 60,
        },
        # Only runs with the tag dagster/max_retries are retried.
        "run_retries": {"enabled": True},
        "sensors": {"use_threads": True, "num_workers": 8, "num_submit_workers": 4},
        "schedules": {"use_threads": True, "num_workers": 2},
        "retention": {
            "sensor": {"purge_after_days": {"skipped": 1, "started": 1, "success": 7, "failure": 30}},
            "schedule": {"purge_after_days": {"skipped": 1, "started": 1, "success": 7, "failure": 30}},
        },
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
    }


def _runs(most: int) -> dict[str, Any]:
    """How runs are launched, and how many at once."""
    return {
        # Fork runs from a process that has imported the location: importing takes most of a short run's time.
        "run_launcher": {
            "module": "eventsql_orchestration.dagster",
            "class": "PreforkRunLauncher",
            # Here the code servers are on one machine; deploy/ replaces daemon and code server at once.
            "config": {"same_code": True},
        },
        "concurrency": {
            "runs": {
                "max_concurrent_runs": most,
                # Runs of backfills take long: live runs must not wait for them.
                "tag_concurrency_limits": [{"key": BACKFILL_OF_TAG, "limit": max(most // 2, 1)}],
            },
            # One Spark session uses all cores of its machine, and its run may go on to further steps. The limit holds
            # for every pool that has none of its own (`dagster instance concurrency set`).
            "pools": {"granularity": "run", "default_limit": 1},
        },
    }


def storage_url(dsn: str) -> str:
    """The database URL in the form that dagster-postgres needs.

    Its SQL is for psycopg 2. With a bare `postgresql://`, SQLAlchemy takes psycopg 3 and no run can be launched.
    """
    url = parse_dsn(dsn).set(drivername="postgresql+psycopg2")
    named = url.query.get("options", "")
    given = named if isinstance(named, str) else " ".join(named)
    options = f"{given} -csearch_path={STORAGE_SCHEMA}".strip()
    return url.update_query_dict({"options": options}).render_as_string(hide_password=False)
