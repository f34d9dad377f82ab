"""The code of the documents does what they say."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.dagster import CheckAlert, topic_key

DOCUMENTS = Path(__file__).parents[2] / "docs"
OPERATIONS = DOCUMENTS / "dagster_operations.md"
DAGSTER = DOCUMENTS / "dagster.md"
LINEAGE = DOCUMENTS / "lineage.md"


def examples(document: Path) -> list[str]:
    """The blocks of Python of a document."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


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
    (example,) = examples(OPERATIONS)
    names: dict[str, Any] = {"page": pages.append}
    exec(compile(example, str(OPERATIONS), "exec"), names)
    return names


def test_the_example_of_failed_runs_pages_the_run_its_job_and_the_reason(
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


def test_the_example_of_assets_that_return_events_is_a_whole_location_that_publishes(
    platform: EventSQL, dsn: str, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    names: dict[str, Any] = {}
    exec(compile(examples(LINEAGE)[0], str(LINEAGE), "exec"), names)
    location: dg.Definitions = names["defs"]
    assert location.resolve_job_def("register").execute_in_process(instance=instance).success
    platform.publisher.publish_all(
        Publication("rides", json.dumps({"order_id": key, "price_cents": 1_000}).encode(), key=key) for key in "ab"
    )
    platform.transfer.run_once()
    materializing = location.resolve_implicit_global_asset_job_def()
    assert materializing.execute_in_process(instance=instance).success
    platform.transfer.run_once()
    fares = sorted((event.key or "", json.loads(event.value)) for event in platform.reader.read("fares"))
    assert fares == [(key, {"order_id": key, "fare_cents": 800}) for key in "ab"]


def test_the_first_consumer_of_the_documentation_consumes(platform: EventSQL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", platform.database.dsn)
    example, *_ = examples(DAGSTER)
    names: dict[str, Any] = {}
    exec(compile(example, str(DAGSTER), "exec"), names)
    defs = names["defs"]
    assert defs.resolve_job_def("register").execute_in_process().success
    platform.publisher.publish(Publication("order_placed", b"tea"))
    platform.transfer.run_once()
    assert defs.resolve_job_def("consume_ledger").execute_in_process().success
    with platform.database.connection() as connection:
        assert connection.execute("SELECT value FROM ledger").fetchall() == [(b"tea",)]


def test_the_consumer_of_the_documentation_that_publishes_answers_each_order_once(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", platform.database.dsn)
    (example,) = (each for each in examples(DAGSTER) if "receipts" in each)
    names: dict[str, Any] = {}
    exec(compile(example, str(DAGSTER), "exec"), names)
    defs: dg.Definitions = names["defs"]
    assert defs.resolve_job_def("register").execute_in_process(instance=instance).success
    platform.publisher.publish(Publication("order_placed", b"tea", key="7"))
    platform.transfer.run_once()
    run = defs.resolve_job_def("consume_cashier").execute_in_process(instance=instance)
    assert run.success
    platform.transfer.run_once()
    (receipt,) = platform.reader.read("receipts")
    assert (receipt.key, receipt.value, receipt.metadata["dagster_run_id"]) == ("7", b"tea", run.run_id)
    with platform.database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM paid").fetchone() == (1,)
    assert defs.resolve_asset_graph().get(topic_key("receipts")).parent_keys == {dg.AssetKey("cashier")}


def test_the_location_among_the_examples_consumes_each_order(
    platform: EventSQL, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", platform.database.dsn)
    defs: dg.Definitions = runpy.run_path(str(DOCUMENTS / "examples" / "ledger.py"))["defs"]
    assert defs.resolve_job_def("register").execute_in_process(instance=instance).success
    platform.publisher.publish(Publication("orders", b"tea"))
    platform.transfer.run_once()
    assert defs.resolve_job_def("consume_ledger").execute_in_process(instance=instance).success
    with platform.database.connection() as connection:
        assert connection.execute("SELECT value FROM ledger").fetchall() == [(b"tea",)]
