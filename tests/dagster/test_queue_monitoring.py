"""Queues stand in Dagster with their depth and age, and with checks that alert."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster import (
    EventSQLResource,
    QueueLimits,
    build_alert_sensor,
    build_queue_checks,
    build_queue_sensor,
    queue_asset,
    store_asset,
)
from eventsql_orchestration.dagster.monitoring.checks import IDLE_INTERVAL
from eventsql_orchestration.dagster.monitoring.queues import QueueCheck, observe_queues
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, ValidationError
from eventsql_orchestration.queue import NewMessage, Queue
from eventsql_orchestration.queue.lag import QueueLag, QueueLagReader
from tests.dagster.conftest import ONE, OTHER, Workbench

PICTURES = queue_asset("pictures")
NOW = 1e9


def observed(
    platform: EventSQL, *, cursor: str | None = None, now: float = NOW, checks: list[QueueCheck] | None = None
) -> dg.SensorResult:
    return observe_queues(platform, {PICTURES.key: "pictures"}, checks=checks or [], cursor=cursor, now=now)


def numbers(result: dg.SensorResult) -> list[dict[str, Any]]:
    return [
        {name: value.value for name, value in event.metadata.items()}
        for event in result.asset_events
        if isinstance(event, dg.AssetObservation)
    ]


def verdicts(result: dg.SensorResult) -> dict[str, tuple[bool, str]]:
    return {
        event.check_name: (event.passed, event.description or "")
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation)
    }


def test_a_queue_is_observed_while_messages_wait_and_rarely_afterwards(platform: EventSQL) -> None:
    assert "queue 'pictures' is not registered" in str(observed(platform).skip_reason)
    queue = Queue(platform, "pictures")
    queue.send_all([NewMessage(b"1"), NewMessage(b"2"), NewMessage(b"3", delay=60.0)])
    (held,) = queue.receive(visibility_timeout=600)
    first = observed(platform)
    (found,) = numbers(first)
    assert found.pop("Age seconds") >= 0
    assert found == {"Depth": 3, "Visible": 1, "In flight": 1, "Delayed": 1, "Blocked": 0, "Dead letters": 0}
    assert "pictures has 3 messages" in str(first.skip_reason)

    queue.acknowledge(held)
    queue.purge()
    second = observed(platform, cursor=first.cursor)
    assert [each["Depth"] for each in numbers(second)] == [0]
    assert not observed(platform, cursor=second.cursor, now=NOW + IDLE_INTERVAL - 1).asset_events
    assert len(observed(platform, cursor=second.cursor, now=NOW + IDLE_INTERVAL).asset_events) == 1


def test_the_checks_are_red_beyond_their_limits_and_for_dead_letters(platform: EventSQL) -> None:
    queue = Queue(platform, "pictures", max_receives=1)
    checks = build_queue_checks(PICTURES, QueueLimits(max_messages=1, grace=60.0))
    assert [each.description for each in checks] == [
        "Queue pictures is behind by at most 1 message and 300 s, or by more for at most 60 s.",
        "Queue pictures has no dead letter.",
    ]
    queue.send(b"1")
    first = observed(platform, checks=checks)
    assert {name: passed for name, (passed, _) in verdicts(first).items()} == {"lag": True, "delivered": True}
    assert not verdicts(observed(platform, checks=checks, cursor=first.cursor, now=NOW + 15)), "nothing has changed"

    queue.send_all([b"2", b"3"])
    second = observed(platform, checks=checks, cursor=first.cursor, now=NOW + 30)
    assert verdicts(second)["lag"][0], "within the grace"
    third = observed(platform, checks=checks, cursor=second.cursor, now=NOW + 91)
    passed, description = verdicts(third)["lag"]
    assert not passed
    assert description.endswith("beyond 1 message")

    queue.release(queue.receive()[0])
    queue.receive(max_messages=10)
    fourth = observed(platform, checks=checks, cursor=third.cursor, now=NOW + 92)
    passed, description = verdicts(fourth)["delivered"]
    assert not passed
    assert "`eventsql queue peek pictures_dead`" in description
    assert "`eventsql queue redrive --execute pictures`" in description
    queue.redrive()
    queue.purge()
    healed = verdicts(observed(platform, checks=checks, cursor=fourth.cursor, now=NOW + 93))
    assert {name: passed for name, (passed, _) in healed.items()} == {"lag": True, "delivered": True}


def test_the_checks_of_a_queue_that_is_not_registered_are_red_after_the_time_to_register(platform: EventSQL) -> None:
    checks = build_queue_checks(PICTURES)
    first = observed(platform, checks=checks)
    assert [passed for passed, _ in verdicts(first).values()] == [True, True]
    second = observed(platform, checks=checks, cursor=first.cursor, now=NOW + 60)
    assert [passed for passed, _ in verdicts(second).values()] == [False, False]
    assert "is not registered" in verdicts(second)["lag"][1]


def test_a_shard_that_takes_too_long_stops_no_observation_of_the_others(
    shards: dict[str, Workbench], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bench in shards.values():
        Queue(bench.platform, "pictures").send(b"1")
    read = QueueLagReader.read

    def read_or_wait(reader: QueueLagReader, connection: Connection) -> list[QueueLag]:
        if connection.info.dbname == shards[OTHER].platform.database.url.database:
            raise DatabaseBusyError("canceling statement due to statement timeout")
        return read(reader, connection)

    monkeypatch.setattr(QueueLagReader, "read", read_or_wait)
    result = observed(shards[ONE].eventsql.platform, checks=build_queue_checks(PICTURES))
    (found,) = numbers(result)
    assert (found["Depth"], found["unreachable"]) == (1, OTHER)
    assert verdicts(result)["lag"] == (False, "no answer from shard-2")


def test_a_check_that_a_person_executes_alerts_as_a_check_of_the_sensor_does(platform: EventSQL, dsn: str) -> None:
    Queue(platform, "pictures").send_all([b"1", b"2"])
    checks = build_queue_checks(PICTURES, QueueLimits(max_messages=1, max_seconds=None, grace=0.0))
    sent: list[str] = []
    alerts = build_alert_sensor(checks, lambda alert: sent.append(str(alert)))
    sensor = build_queue_sensor([PICTURES], checks=checks)
    resources = {"eventsql": EventSQLResource(dsn=dsn)}
    location = dg.Definitions(
        assets=[PICTURES], asset_checks=[each.definition for each in checks], sensors=[sensor, alerts],
        jobs=[dg.define_asset_job("look", selection=dg.AssetSelection.checks(*(each.key for each in checks)))],
        resources=resources,
    )  # fmt: skip
    with dg.DagsterInstance.ephemeral() as instance:
        assert location.resolve_job_def("look").execute_in_process(instance=instance).success
        with dg.build_sensor_context(instance=instance) as context:
            alerts.evaluate_tick(context)
        with dg.build_sensor_context(instance=instance, resources=resources) as context:
            assert len(sensor.evaluate_tick(context).asset_events) == 3
    assert ["check lag of queue/pictures is red" in each for each in sent] == [True]


def test_other_assets_and_checks_of_other_queues_are_refused() -> None:
    with pytest.raises(ValidationError):
        build_queue_sensor([store_asset()])
    with pytest.raises(ValidationError):
        build_queue_sensor([PICTURES], checks=build_queue_checks(queue_asset("others")))
    with pytest.raises(ValidationError):
        QueueLimits(max_messages=-1)
    with pytest.raises(ValidationError, match="no more messages are counted"):
        QueueLimits(max_messages=10_000)
