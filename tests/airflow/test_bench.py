"""`eventsql bench airflow`: a real Airflow is measured, and nothing of it is left behind."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from eventsql_orchestration import EventSQL
from eventsql_orchestration.cli import main


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_airflow_is_measured_and_leaves_nothing(platform: EventSQL, dsn: str) -> None:
    result = CliRunner().invoke(main, ["--dsn", dsn, "bench", "airflow", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    ours, least, ratio, _ = json.loads(result.stdout)
    assert (ours["name"], least["name"]) == ("airflow_cold_start", "airflow_least")
    assert ours["details"]["measured"] == least["details"]["measured"] == 1
    assert ratio["value"] == pytest.approx(ours["value"] / least["value"])
    assert platform.registry.topics() == []
    with platform.database.connection() as connection:
        assert not connection.execute("SELECT FROM pg_database WHERE datname LIKE 'eventsql_bench%'").fetchall()
