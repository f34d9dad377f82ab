"""The code of the documents does what they say."""

import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration.dagster import CheckAlert

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@dg.op
def fail() -> None:
    raise ValueError("no such zone")


@dg.job
def failing() -> None:
    fail()


@pytest.fixture
def pages() -> list[str]:
    return []


@pytest.fixture
def alerts(pages: list[str]) -> dict[str, Any]:
    """The example of alerts, whose pager is a list."""
    (example,) = re.findall(r"^```python\n(.*?)^```", OPERATIONS.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"page": pages.append}
    exec(compile(example, str(OPERATIONS), "exec"), names)
    return names


def test_the_example_of_failed_runs_pages_the_run_its_job_and_why(
    alerts: dict[str, Any], pages: list[str], instance: dg.DagsterInstance
) -> None:
    result = failing.execute_in_process(instance=instance, raise_on_error=False)
    sensor = alerts["failed_runs"]
    assert isinstance(sensor, dg.SensorDefinition)
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    (failure,) = [event for event in result.all_events if event.event_type is dg.DagsterEventType.RUN_FAILURE]
    sensor(
        dg.build_run_status_sensor_context(
            sensor_name=sensor.name, dagster_event=failure, dagster_instance=instance, dagster_run=result.dagster_run
        ).for_run_failure()
    )
    (page,) = pages
    assert page.startswith(f"run {result.run_id} of failing failed: ")
    assert "fail" in page


def test_the_example_of_alerts_pages_what_a_check_says(alerts: dict[str, Any], pages: list[str]) -> None:
    red = dg.AssetCheckSeverity.ERROR
    alert = CheckAlert(dg.AssetKey("ledger"), "lag", False, red, "40 events behind", {}, 0.0)
    alerts["notify"](alert)
    assert pages == ["check lag of ledger is red (ERROR): 40 events behind"]
