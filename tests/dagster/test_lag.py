"""Lag as observations and checks."""

from __future__ import annotations

import json
import time
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Publication, Topic
from eventsql_orchestration.dagster import build_lag_check, build_lag_sensor, consumer_asset
from eventsql_orchestration.dagster.lag import IDLE_INTERVAL, observe_lag
from tests.dagster.conftest import Workbench
from tests.dagster.location import ledger, record

eager = consumer_asset(topic=Topic("rides"), consumer="eager", name="eager", max_wait=0.0, drain_seconds=0.0)(record)


@pytest.fixture(autouse=True)
def registered(bench: Workbench) -> None:
    ledger.register(bench.platform)
    eager.register(bench.platform)


def observed(result: dg.SensorResult) -> dict[str, dict[str, Any]]:
    return {
        event.asset_key.to_user_string(): {name: value.value for name, value in event.metadata.items()}
        for event in result.asset_events
        if isinstance(event, dg.AssetObservation)
    }


def observe(bench: Workbench, cursor: str | None = None, now: float | None = None) -> dg.SensorResult:
    return observe_lag(bench.platform, [ledger, eager], cursor=cursor, now=time.time() if now is None else now)


def test_lag_is_observed_as_numbers_for_the_consumer_and_each_partition(bench: Workbench) -> None:
    bench.publish("orders", 3, partition=0)
    bench.publish("orders", 4, partition=1)
    bench.platform.publisher.publish(Publication("orders", b"", partition=1))
    found = observed(observe(bench))["ledger"]

    assert found["lag events"] == 8
    assert found["lag events [0]"] == 3
    assert found["lag events [1]"] == 5
    assert isinstance(found["lag seconds"], float)
    assert 0 < found["lag seconds"] < 120
    assert "[0] waiting: not consumed yet" in found["cause"]


def test_the_sensor_reports_observations_to_dagster(bench: Workbench) -> None:
    bench.publish("rides", 2)
    sensor = build_lag_sensor([eager])
    with dg.build_sensor_context(instance=bench.instance, resources={"eventsql": bench.eventsql}) as context:
        tick = sensor.evaluate_tick(context)
    (observation,) = tick.asset_events
    assert observation.asset_key == eager.key
    assert observation.metadata["lag events"].value == 2
    assert sensor.minimum_interval_seconds == 15


def test_a_consumer_that_is_not_behind_is_observed_seldom(bench: Workbench) -> None:
    first = observe(bench, now=1_000.0)
    assert set(observed(first)) == {"ledger", "eager"}, "a plot begins somewhere"
    second = observe(bench, cursor=first.cursor, now=1_015.0)
    assert observed(second) == {}
    assert second.skip_reason is not None
    assert second.skip_reason.skip_message == "no consumer is behind"
    third = observe(bench, cursor=second.cursor, now=1_000.0 + IDLE_INTERVAL)
    assert set(observed(third)) == {"ledger", "eager"}


def test_the_end_of_a_lag_is_observed_at_once(bench: Workbench) -> None:
    bench.publish("rides", 2)
    behind = observe(bench, now=1_000.0)
    bench.platform.consumers.consume_once("rides", "eager", record)
    after = observe(bench, cursor=behind.cursor, now=1_015.0)
    assert observed(after)["eager"]["lag events"] == 0


def test_the_cursor_is_never_what_dagster_takes_for_none(bench: Workbench) -> None:
    nothing = observe_lag(bench.platform, [], cursor=None, now=0.0)
    assert nothing.cursor
    assert json.loads(nothing.cursor) == {}


def test_a_consumer_that_is_not_registered_keeps_no_other_from_being_observed(bench: Workbench) -> None:
    stranger = consumer_asset(topic=Topic("nowhere"), consumer="c", name="stranger")(record)
    unregistered = consumer_asset(topic=Topic("rides"), consumer="d", name="unregistered")(record)
    bench.publish("rides", 1)
    found = observe_lag(bench.platform, [stranger, unregistered, eager], cursor=None, now=0.0)
    assert set(observed(found)) == {"eager"}


def check(bench: Workbench, **thresholds: Any) -> dg.AssetCheckEvaluation:
    checks = build_lag_check(eager, **thresholds)
    result = dg.Definitions(assets=[eager.asset], asset_checks=[checks], resources={"eventsql": bench.eventsql})
    job = result.resolve_implicit_global_asset_job_def().get_subset(asset_check_selection=set(checks.check_keys))
    executed = job.execute_in_process(instance=bench.instance)
    (evaluation,) = executed.get_asset_check_evaluations()
    return evaluation


@pytest.mark.parametrize(
    ("thresholds", "passed"),
    [
        ({"max_events": 5}, True),
        ({"max_events": 4}, False),
        ({"max_seconds": 3600.0}, True),
        ({"max_seconds": 0.0}, False),
        ({"max_events": 5, "max_seconds": 0.0}, False),
    ],
)
def test_a_check_turns_red_beyond_its_thresholds(bench: Workbench, thresholds: dict[str, Any], passed: bool) -> None:
    bench.publish("rides", 5)
    evaluation = check(bench, **thresholds)
    assert evaluation.passed is passed
    assert evaluation.severity == dg.AssetCheckSeverity.WARN
    assert evaluation.metadata["lag events"].value == 5


def test_a_check_of_a_consumer_that_is_not_registered_is_red(bench: Workbench) -> None:
    bench.platform.registry.unregister_consumer("rides", "eager")
    evaluation = check(bench, max_events=5)
    assert not evaluation.passed
    assert evaluation.description == "consumer 'eager' is not registered"
