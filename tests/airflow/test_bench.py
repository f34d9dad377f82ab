"""`eventsql bench airflow`: a real Airflow is measured, and nothing of it is left behind."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_airflow_is_measured_and_leaves_nothing(platform: EventSQL, dsn: str) -> None:
    result = CliRunner().invoke(main, ["--dsn", dsn, "bench", "airflow", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    figures = {figure["name"]: figure for figure in json.loads(result.stdout) if "name" in figure}
    ours, others = figures["airflow_cold_start"], ["least", "redis"] if shutil.which("redis-server") else ["least"]
    assert set(figures) == {
        ours["name"],
        *(f"airflow_{each}" for each in others),
        *(f"{ours['name']}_to_{each}" for each in others),
    }
    for each in others:
        other = figures[f"airflow_{each}"]
        assert ours["details"]["measured"] == other["details"]["measured"] == 1
        assert figures[f"{ours['name']}_to_{each}"]["value"] == pytest.approx(ours["value"] / other["value"])
    steps = [ours["details"][f"to_{step}"] for step in ("stored", "made", "queued", "started", "first")]
    assert steps == sorted(steps)
    assert steps[-1] == ours["value"]
    assert platform.registry.topics() == []
    with platform.database.connection() as connection:
        assert not connection.execute("SELECT FROM pg_database WHERE datname LIKE 'eventsql_bench%'").fetchall()
