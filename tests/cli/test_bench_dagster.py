"""`eventsql bench dagster`: a real daemon is measured, and nothing of it is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest
from click.testing import Result

from eventsql_orchestration import EventSQL

Run = Callable[..., Result]


@pytest.mark.timeout(300)
def test_a_tiny_run_measures_a_daemon_and_leaves_nothing(run: Run, platform: EventSQL) -> None:
    result = run("bench", "dagster", "--quick", "--drained", 2, "--seconds", 1, "--runs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    *figures, environment = json.loads(result.stdout)
    values = {figure["name"]: figure["value"] for figure in figures}
    assert list(values) == [
        "dagster_cold_start", "dagster_draining", "dagster_ticks_3_sensors", "dagster_ticks_1_sensor_3_partitions",
        "dagster_runs",
    ]  # fmt: skip
    assert all(value >= 0 for value in values.values())
    assert values["dagster_draining"] < values["dagster_cold_start"]
    assert environment
    with platform.database.connection() as connection:
        left = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE '%dagster'").fetchall()
    assert left == []
    assert platform.registry.topics() == []
    daemons = [each for each in psutil.Process().children(recursive=True) if "dagster-daemon" in each.cmdline()]
    assert daemons == []


@pytest.mark.parametrize("arguments", ["--cold 0", "--drained nothing", "--runs -1", "--seconds 0"])
def test_bad_options_are_refused_before_anything_starts(run: Run, arguments: str) -> None:
    assert run("bench", "dagster", *arguments.split()).exit_code == 2
