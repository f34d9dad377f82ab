"""`eventsql bench dagster`: a real daemon is measured, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import psutil
import pytest
from click.testing import Result

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import bench_dagster
from eventsql_orchestration.dagster import measuring

Run = Callable[..., Result]


@pytest.mark.timeout(300)
def test_a_daemon_is_measured_and_leaves_nothing(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SENSOR_LOOP", 0.0)
    reported: list[tuple[str, int, int]] = []

    def report(*progress: object) -> None:
        reported.append(progress)  # type: ignore[arg-type]  # a name and two numbers

    with measuring.daemon(platform, "tiny", partitions=2, sensor="consumer", drain=2.0) as running:
        drained = bench_dagster._delays("draining", measuring.drained(running, 2, 0.1, report))
        cold = bench_dagster._delays("cold", measuring.cold_starts(running, 1, report))
        looks = measuring.ticks_per_minute(running, 1.0)
        # The run that drains would take one of these.
        running.await_quiet()
        assert measuring.runs_per_second(running, 2) > 0
    assert 0 < drained.value < cold.value
    assert (drained.unit, cold.details["measured"]) == ("ms", 1)
    assert looks >= 0
    assert reported == [("draining", 1, 2), ("draining", 2, 2), ("cold starts", 1, 1)]
    with platform.database.connection() as connection:
        assert not connection.execute("SELECT FROM pg_namespace WHERE nspname = 'tiny_dagster'").fetchall()
    assert not [each for each in psutil.Process().children(recursive=True) if "dagster-daemon" in " ".join(_of(each))]


def _of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize("arguments", ["--cold 0", "--drained nothing", "--runs -1", "--seconds 0"])
def test_bad_options_are_refused_before_anything_starts(run: Run, arguments: str) -> None:
    assert run("bench", "dagster", *arguments.split()).exit_code == 2


def test_every_number_of_sensors_is_measured(run: Run, platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures and their order; what each is worth only a daemon says."""
    for name, figure in (("cold_starts", [1.0, 3.0]), ("drained", [0.02]), ("ticks_per_minute", 60.0)):
        monkeypatch.setattr(measuring, name, lambda *_, figure=figure: figure)
    monkeypatch.setattr(measuring, "runs_per_second", lambda *_: 0.5)
    monkeypatch.setattr(measuring, "daemon", lambda *_, **__: contextlib.nullcontext())
    result = run("bench", "dagster", "--quick", "--json")
    assert result.exit_code == 0, result.stderr
    *figures, _ = json.loads(result.stdout)
    assert {figure["name"]: figure["value"] for figure in figures} == {
        "dagster_cold_start": 1_000.0, "dagster_draining": 20.0, "dagster_ticks_3_sensors": 20.0,
        "dagster_ticks_1_sensor_3_partitions": 60.0, "dagster_runs": 0.5,
    }  # fmt: skip
    assert platform.registry.topics() == []
