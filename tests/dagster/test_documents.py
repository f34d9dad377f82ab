"""The code of the documents does what they say."""

import json
from collections.abc import Callable
from datetime import timedelta

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.dagster import AssetOptions, CheckAlert, consumer_asset, topic_key
from eventsql_orchestration.queue import Queue, QueueDepth
from eventsql_orchestration.views import Rollup
from tests.dagster.conftest import sql
from tests.documents import DAGSTER, DOCS, examples, play


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
def alerts(pages: list[str]) -> dict[str, object]:
    """The example of alerts, whose pager is a list."""

    @consumer_asset(topic=Topic("orders"), consumer="ledger")
    def ledger(events: object, connection: object) -> None: ...

    (example,) = examples(DOCS / "dagster_operations.md")
    return play(example, {"page": pages.append, "ledger": ledger})


@pytest.fixture
def registered(
    dsn: str, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> Callable[[str], dg.Definitions]:
    """Plays an example that is a whole location, and executes its job `register`."""
    monkeypatch.setenv("EVENTSQL_DSN", dsn)

    def played(example: str) -> dg.Definitions:
        location: dg.Definitions = play(example)["defs"]
        assert location.resolve_job_def("register").execute_in_process(instance=instance).success
        return location

    return played


def test_the_example_of_failed_runs_pages_the_run_its_job_and_the_reason(
    alerts: dict[str, object], pages: list[str], instance: dg.DagsterInstance
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


def test_the_example_of_alerts_pages_what_a_check_says(alerts: dict[str, object], pages: list[str]) -> None:
    red = dg.AssetCheckSeverity.ERROR
    notify = alerts["notify"]
    assert callable(notify)
    notify(CheckAlert(dg.AssetKey("ledger"), "lag", False, red, "40 events behind", {}, 0.0))
    assert pages == ["check lag of ledger is red (ERROR): 40 events behind"]

    location = alerts["defs"]
    assert isinstance(location, dg.Definitions)
    assert {"alerts", "failed_runs"} <= {sensor.name for sensor in location.sensors or ()}


def test_the_example_of_assets_that_return_events_is_a_whole_location_that_publishes(
    platform: EventSQL, registered: Callable[[str], dg.Definitions], instance: dg.DagsterInstance
) -> None:
    location = registered(examples(DOCS / "lineage.md")[0])
    platform.publisher.publish_all(
        Publication("rides", json.dumps({"order_id": key, "price_cents": 1_000}).encode(), key=key) for key in "ab"
    )
    platform.transfer.run_once()
    materializing = location.resolve_implicit_global_asset_job_def()
    assert materializing.execute_in_process(instance=instance).success
    platform.transfer.run_once()
    fares = sorted((event.key or "", json.loads(event.value)) for event in platform.reader.read("fares"))
    assert fares == [(key, {"order_id": key, "fare_cents": 800}) for key in "ab"]


def test_the_first_consumer_of_the_documentation_consumes(
    platform: EventSQL, registered: Callable[[str], dg.Definitions], instance: dg.DagsterInstance
) -> None:
    location = registered(examples(DAGSTER)[0])
    platform.publisher.publish(Publication("order_placed", b"tea"))
    platform.transfer.run_once()
    assert location.resolve_job_def("consume_ledger").execute_in_process(instance=instance).success
    assert sql(platform, "SELECT value FROM ledger") == [(b"tea",)]


def test_the_consumer_of_the_documentation_that_publishes_answers_each_order_once(
    platform: EventSQL, registered: Callable[[str], dg.Definitions], instance: dg.DagsterInstance
) -> None:
    (example,) = examples(DAGSTER, "receipts")
    location = registered(example)
    platform.publisher.publish(Publication("order_placed", b"tea", key="7"))
    platform.transfer.run_once()
    run = location.resolve_job_def("consume_cashier").execute_in_process(instance=instance)
    assert run.success
    platform.transfer.run_once()
    (receipt,) = platform.reader.read("receipts")
    assert (receipt.key, receipt.value, receipt.metadata["dagster_run_id"]) == ("7", b"tea", run.run_id)
    assert sql(platform, "SELECT count(*) FROM paid") == [(1,)]
    assert location.resolve_asset_graph().get(topic_key("receipts")).parent_keys == {dg.AssetKey("cashier")}


def test_the_worker_of_the_documentation_handles_each_message_once(
    platform: EventSQL, registered: Callable[[str], dg.Definitions], instance: dg.DagsterInstance
) -> None:
    (example,) = examples(DAGSTER, "make_thumbnails")
    location = registered(example)
    Queue(platform, "thumbnails").send_all([b"cat.png", b"dog.png"])
    assert location.resolve_job_def("work_make_thumbnails").execute_in_process(instance=instance).success
    assert sql(platform, "SELECT image FROM thumbnail ORDER BY 1") == [("cat.png",), ("dog.png",)]
    assert Queue(platform, "thumbnails").depth() == QueueDepth(visible=0, invisible=0)


def test_the_translator_of_the_documentation_gives_consumers_a_prefix() -> None:
    (example,) = examples(DAGSTER, "EventSQLTranslator")
    translator = play(example)["Shop"]()

    @consumer_asset(topic=Topic("orders"), consumer="ledger", options=AssetOptions(translator=translator))
    def ledger(events: object, connection: object) -> None: ...

    assert ledger.key == dg.AssetKey(["shop", "ledger"])


def test_the_location_of_the_documentation_with_the_store_and_a_view_shows_each_as_an_asset() -> None:
    (example,) = examples(DAGSTER, "store_asset")
    (projection,) = examples(DOCS / "event_store.md", "class Payments(Projection)")
    rollup = next(line for line in examples(DOCS / "views.md")[0].splitlines() if line.startswith("MOVES ="))
    names = play(projection.partition("\n\n\nwith ")[0])
    names |= play(rollup, {"Rollup": Rollup, "timedelta": timedelta})
    location = play(example, names)["defs"]
    dg.Definitions.validate_loadable(location)
    graph = location.resolve_asset_graph()
    assert graph.get(dg.AssetKey(["view", "moves"])).parent_keys == {topic_key("parcel_moved")}
    for kind, name in (("subscription", "mailer"), ("projection", "payments")):
        assert graph.get(dg.AssetKey(["event_store", kind, name])).parent_keys == {dg.AssetKey("event_store")}
