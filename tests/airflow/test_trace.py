"""`eventsql trace` where Airflow runs, and Dagster is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.airflow.api import URL_FILE
from eventsql_orchestration.cli import main
from tests.airflow.served import FakeAirflow, serving

METADATA = {"airflow_dag_id": "billing", "airflow_run_id": "manual__1+00:00", "airflow_task_id": "publish"}


@pytest.fixture
def bills(platform: EventSQL) -> EventSQL:
    """A topic with an event that a task published."""
    platform.registry.register_topic(Topic("bills"))
    platform.publisher.publish(Publication("bills", b"1", metadata=METADATA))
    platform.transfer.run_once()
    return platform


def traced(dsn: str, *options: str) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(main, ["--dsn", dsn, "trace", "bills", "1", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_a_run_is_shown_with_its_state_its_times_and_its_page(bills: EventSQL, dsn: str) -> None:
    airflow = FakeAirflow()
    times = {"start_date": "2026-05-01T12:00:00Z", "end_date": None}
    airflow.runs = [{"dag_run_id": "manual__1+00:00", "state": "success", "partition_key": None, "conf": None, **times}]
    with serving(airflow) as url:
        found, said = traced(dsn, "--airflow-url", url)
    assert said == ""
    assert found["url"] == f"{url}/dags/billing/runs/manual__1%2B00%3A00"
    assert (found["run"]["job"], found["run"]["status"], found["run"]["ended"]) == ("billing", "SUCCESS", None)
    assert found["run"]["started"] == "2026-05-01T12:00:00+00:00"


def test_the_airflow_of_the_home_is_asked(
    bills: EventSQL, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / ".eventsql" / "airflow"
    home.mkdir(parents=True)
    with serving(FakeAirflow()) as url:
        (home / URL_FILE).write_text(url)
        found, said = traced(dsn)
    assert (found["url"], said) == (f"{url}/dags/billing/runs/manual__1%2B00%3A00", "")


def test_a_run_that_was_deleted_says_so(bills: EventSQL, dsn: str) -> None:
    with serving(FakeAirflow()) as url:
        found, _ = traced(dsn, "--airflow-url", url)
    assert "Airflow has no such run any more" in found["notes"]


def test_without_airflow_the_facts_of_the_database_are_shown(bills: EventSQL, dsn: str) -> None:
    found, said = traced(dsn)
    assert (found["run_id"], found["url"]) == ("airflow billing/manual__1+00:00", None)
    assert said.strip() == "eventsql: status and times of runs are not shown: give --airflow-url"
    found, said = traced(dsn, "--airflow-url", "http://127.0.0.1:9")
    assert found["run_id"] == "airflow billing/manual__1+00:00"
    assert "Airflow cannot be reached" in said
