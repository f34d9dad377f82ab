"""Lag as observations and checks."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, Event, Publication, Retention, Topic
from eventsql_orchestration.consuming.lag import ConsumerLag, LagCause
from eventsql_orchestration.dagster import (
    EventSQLResource,
    TopicSample,
    build_lag_check,
    build_lag_sensor,
    build_queue_sensor,
    build_subscription_sensor,
    build_transfer_schedule,
    consumer_asset,
    queue_asset,
    subscription_asset,
    topic_key,
)
from eventsql_orchestration.dagster.consumers.asset_lag import SHOWN_PARTITIONS, TRANSFER_STALLED, AssetLag
from eventsql_orchestration.dagster.instigators import states_of
from eventsql_orchestration.dagster.monitoring.checks import IDLE_INTERVAL
from eventsql_orchestration.dagster.monitoring.lag_sensor import (
    TOPIC_INTERVAL,
    observe_lag,
    stopped_sensors,
    stopped_transfer,
)
from eventsql_orchestration.dagster.tags import HOUSEKEEPING_TAG
from eventsql_orchestration.errors import DatabaseBusyError, ValidationError
from eventsql_orchestration.storage.reading import LogReader
from eventsql_orchestration.topics.reader import Reader
from tests.dagster.conftest import Workbench, registering, sql
from tests.dagster.location import eager, ledger, record

pytestmark = pytest.mark.prepared.with_args(registering(ledger, eager))


@pytest.mark.parametrize(
    ("default", "switched", "off"),
    [
        (dg.DefaultSensorStatus.RUNNING, None, False),
        (dg.DefaultSensorStatus.RUNNING, "STOPPED", True),
        (dg.DefaultSensorStatus.RUNNING, "DECLARED_IN_CODE", False),
        (dg.DefaultSensorStatus.STOPPED, None, True),
        (dg.DefaultSensorStatus.STOPPED, "RUNNING", False),
        (dg.DefaultSensorStatus.STOPPED, "DECLARED_IN_CODE", True),
    ],
)
def test_a_sensor_is_off_by_a_switch_or_by_default(
    default: dg.DefaultSensorStatus, switched: str | None, off: bool
) -> None:
    resting = consumer_asset(topic=Topic("rides"), consumer="resting", name="resting", default_status=default)(record)
    value = SimpleNamespace
    state = value(
        instigator_type=value(value="SENSOR"), instigator_name="consume_resting", status=value(value=switched)
    )
    assert stopped_sensors([] if switched is None else [state], [resting]) == ({"consume_resting"} if off else set())


def test_sensors_of_another_location_with_the_same_names_are_another_locations() -> None:
    def state(location: str, repository: str) -> SimpleNamespace:
        origin = SimpleNamespace(
            code_location_origin=SimpleNamespace(location_name=location), repository_name=repository
        )
        return SimpleNamespace(origin=SimpleNamespace(repository_origin=origin))

    own, *others = [state("ours", "rides"), state("theirs", "rides"), state("ours", "__repository__")]
    instance: Any = SimpleNamespace(schedule_storage=object(), all_instigator_state=lambda: [*others, own])
    assert states_of(instance, SimpleNamespace(location_name="ours"), "rides") == [own]
    assert not states_of(instance, None, "rides"), "evaluated outside of a location"


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

    assert found["Lag events"] == 8
    assert found["Lag events [0]"] == 3
    assert found["Lag events [1]"] == 5
    assert isinstance(found["Lag seconds"], float)
    assert 0 < found["Lag seconds"] < 120
    assert "[0] waiting: not consumed yet" in found["cause"]


def test_the_sensor_reports_observations_to_dagster(bench: Workbench) -> None:
    bench.publish("rides", 2)
    sensor = build_lag_sensor([eager])
    with dg.build_sensor_context(instance=bench.instance, resources={"eventsql": bench.eventsql}) as context:
        tick = sensor.evaluate_tick(context)
    (observation,) = tick.asset_events
    assert isinstance(observation, dg.AssetObservation)
    assert observation.asset_key == eager.key
    assert observation.metadata["Lag events"].value == 2
    assert observation.tags == {HOUSEKEEPING_TAG: "internal"}
    assert sensor.minimum_interval_seconds == 15


def test_a_consumer_that_is_not_behind_is_observed_seldom(bench: Workbench) -> None:
    first = observe(bench, now=1_000.0)
    assert set(observed(first)) == {"ledger", "eager"}, "a plot needs a first point"
    second = observe(bench, cursor=first.cursor, now=1_015.0)
    assert observed(second) == {}
    assert second.skip_reason is not None
    assert second.skip_reason.skip_message == "no consumer is behind"
    third = observe(bench, cursor=second.cursor, now=1_000.0 + IDLE_INTERVAL)
    assert set(observed(third)) == {"ledger", "eager"}


def test_the_skip_reason_and_the_check_of_a_lag_of_one_event_say_one_event(bench: Workbench) -> None:
    bench.publish("rides", 1)
    check = build_lag_check(eager, max_events=1_000)
    result = observe_lag(bench.platform, [eager], checks=[check], cursor=None, now=0.0)
    assert result.skip_reason is not None
    assert (result.skip_reason.skip_message or "").startswith("eager is 1 event behind")
    (found,) = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
    assert (found.description or "").startswith("1 event and ")
    assert (found.description or "").endswith("within 1,000 events")


def test_the_end_of_a_lag_is_observed_at_once(bench: Workbench) -> None:
    bench.publish("rides", 2)
    behind = observe(bench, now=1_000.0)
    bench.platform.consumers.consume_once("rides", "eager", record)
    after = observe(bench, cursor=behind.cursor, now=1_015.0)
    assert observed(after)["eager"]["Lag events"] == 0


def test_the_cursor_is_never_empty(bench: Workbench) -> None:
    nothing = observe_lag(bench.platform, [], cursor=None, now=0.0)
    assert nothing.cursor
    assert json.loads(nothing.cursor)["idle"] == {}


@pytest.mark.parametrize(
    "cursor",
    [
        '{"ledger": [0, 1000.0]}',
        '{"idle": 1, "offsets": [], "checks": "", "arrivals": null}',
        '["ledger"]',
        "17",
        "1/2",
    ],
)
def test_the_cursor_of_another_release_or_of_another_sensor_is_ignored(bench: Workbench, cursor: str) -> None:
    checks = [build_lag_check(ledger, max_events=1)]
    found = observe_lag(
        bench.platform, [ledger, eager], checks=checks, topics=[ledger.topic], cursor=cursor, now=1_001.0
    )
    assert set(observed(found)) == {"ledger", "eager"}


@pytest.mark.parametrize(
    "sensor",
    [
        build_lag_sensor([eager]),
        build_queue_sensor([queue_asset("pictures")]),
        build_subscription_sensor([subscription_asset("mailer")]),
    ],
    ids=lambda sensor: sensor.name,
)
def test_a_monitoring_sensor_skips_while_the_schema_is_missing_and_keeps_its_cursor(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, dsn: str
) -> None:
    resources = {"eventsql": EventSQLResource(dsn=dsn, db_schema="nowhere")}
    with dg.build_sensor_context(instance=instance, cursor='{"idle": {}}', resources=resources) as context:
        tick = sensor.evaluate_tick(context)
    assert tick.skip_message
    assert (tick.asset_events, tick.cursor) == ([], '{"idle": {}}')


def test_an_unregistered_consumer_does_not_stop_the_observation_of_others(bench: Workbench) -> None:
    stranger = consumer_asset(topic=Topic("nowhere"), consumer="c", name="stranger")(record)
    unregistered = consumer_asset(topic=Topic("rides"), consumer="d", name="unregistered")(record)
    bench.publish("rides", 1)
    found = observe_lag(bench.platform, [stranger, unregistered, eager], cursor=None, now=0.0)
    assert set(observed(found)) == {"eager"}


def cause(result: dg.SensorResult, asset: str) -> str:
    return str(observed(result)[asset]["cause"])


def test_events_that_are_not_transferred_are_a_cause_of_their_own_and_stalled_after_a_while(bench: Workbench) -> None:
    bench.platform.publisher.publish(Publication("rides", b""))
    assert cause(observe(bench), "eager") == (
        "transfer: 1 event in the buffer, not transferred yet; `eventsql transfer` moves events"
    )
    later = "UPDATE eventsql.event_buffer SET eql_created_at = eql_created_at - make_interval(secs => %s)"
    sql(bench.platform, later, TRANSFER_STALLED + 1)
    assert cause(observe(bench), "eager").startswith("transfer stalled: 1 event in the buffer")


def test_a_blocked_a_paused_and_a_leased_partition_say_so(bench: Workbench) -> None:
    (first,) = bench.publish("rides", 1)
    bench.platform.registry.pause("rides", "eager")
    assert cause(observe(bench), "eager").startswith("stopped: it is paused")
    bench.platform.registry.resume("rides", "eager")

    request = bench.request(eager)
    claim = int(request.tags[".dagster/eventsql_claim"])
    assert cause(observe(bench), "eager") == "leased: by sensor consume_eager"
    bench.platform.claims.adopt(claim, owner="run 0123-abc", lease=60.0)
    leased = observed(observe(bench))["eager"]
    assert leased["cause"] == "leased: by run 0123-abc"
    assert leased["consumed by"] == "0123-abc"

    sql(
        bench.platform,
        "UPDATE eventsql.consumer SET eql_failed_event_id = %s, eql_attempts = 5, eql_failure = 'KeyError: x' "
        "WHERE eql_name = 'eager'",
        first,
    )
    assert cause(observe(bench), "eager") == f"blocked: event {first} failed 5 of 5 times: KeyError: x"


def test_the_cause_of_a_held_back_partition_names_the_other_one(bench: Workbench) -> None:
    bench.publish("orders", 1, partition=1)
    changed = bench.platform.repartitioner.repartition("orders", bench.platform.registry.topic("orders").partitions + 1)
    assert changed is not None
    bench.publish("orders", 1, partition=0)
    assert cause(observe(bench), "ledger") == (
        f"[0] held back: until partition 1 has come to offset {changed.after}, where layout 1 of the topic ends; "
        "[1] waiting: not consumed yet"
    )


def test_a_consumer_that_moves_and_stays_behind_is_slow(bench: Workbench) -> None:
    bench.publish("rides", 3)
    first = observe(bench)
    assert cause(first, "eager") == "waiting: not consumed yet"
    assert bench.platform.consumers.consume_once("rides", "eager", record, max_events=1)
    second = observe(bench, cursor=first.cursor)
    assert cause(second, "eager").startswith("slow: ")
    assert cause(observe(bench, cursor=second.cursor), "eager") == "waiting: not consumed yet"
    assert cause(observe(bench), "eager") == "waiting: not consumed yet", "nothing is known of an earlier look"


def test_a_sensor_that_is_switched_off_is_named(bench: Workbench) -> None:
    bench.publish("orders", 1, partition=1)
    found = observe_lag(bench.platform, [ledger], cursor=None, now=0.0, stopped={"consume_ledger_1"})
    assert cause(found, "ledger") == "[1] stopped: sensor consume_ledger_1 is switched off"


@pytest.mark.parametrize(
    ("kind", "name", "status", "off"),
    [
        ("SCHEDULE", "mover", "STOPPED", True),
        ("SCHEDULE", "mover", "RUNNING", False),
        ("SCHEDULE", "mover", "DECLARED_IN_CODE", False),
        ("SCHEDULE", "reports", "STOPPED", False),
        ("SENSOR", "mover", "STOPPED", False),
    ],
)
def test_the_state_of_the_schedule_says_whether_the_transfer_is_switched_off(
    kind: str, name: str, status: str, off: bool
) -> None:
    value = SimpleNamespace
    state = value(instigator_type=value(value=kind), instigator_name=name, status=value(value=status))
    reports = dg.ScheduleDefinition(name="reports", cron_schedule="@daily", target="*")
    assert stopped_transfer([state], [reports, build_transfer_schedule(name="mover")]) == ("mover" if off else None)


def test_a_transfer_that_is_switched_off_is_named_as_the_cause(bench: Workbench) -> None:
    with bench.platform.database.transaction() as connection:
        bench.platform.publisher.publish(Publication("rides", b"1"), connection=connection)
    resources = {"eventsql": bench.eventsql}
    for status in dg.DefaultScheduleStatus:
        schedule = build_transfer_schedule(name="mover", default_status=status)
        location = dg.Definitions(schedules=[schedule], resources=resources)
        with dg.build_sensor_context(bench.instance, definitions=location, resources=resources) as context:
            (observation,) = build_lag_sensor([eager]).evaluate_tick(context).asset_events
        why = str(observation.metadata["cause"].value)
        assert why.startswith("transfer: ")
        assert ("schedule mover is switched off" in why) is (status is dg.DefaultScheduleStatus.STOPPED)


def arrivals(result: dg.SensorResult) -> list[Any]:
    return [event for event in result.asset_events if isinstance(event, dg.AssetMaterialization)]


def test_arrivals_in_an_external_topic_are_reported_once_a_minute(bench: Workbench) -> None:
    rides = [Topic("rides")]
    bench.publish("rides", 1)
    first = observe_lag(bench.platform, [eager], topics=rides, cursor=None, now=1_000.0)
    assert not arrivals(first), "the events of the first look may be old"
    bench.publish("rides", 2)
    soon = observe_lag(bench.platform, [eager], topics=rides, cursor=first.cursor, now=1_015.0)
    assert not arrivals(soon)
    later = observe_lag(bench.platform, [eager], topics=rides, cursor=soon.cursor, now=1_000.0 + TOPIC_INTERVAL)
    (news,) = arrivals(later)
    assert news.asset_key == topic_key("rides")
    assert news.metadata["published events"].value == 2
    assert news.tags == {HOUSEKEEPING_TAG: "internal"}
    nothing = observe_lag(bench.platform, [eager], topics=rides, cursor=later.cursor, now=1_000.0 + 2 * TOPIC_INTERVAL)
    assert not arrivals(nothing)


@pytest.mark.parametrize(
    ("redact", "retention", "kept"),
    [
        (False, None, "for ever"),
        (True, Retention(seconds=7 * 86_400, events=1_000_000), "7 d, 1,000,000 events"),
    ],
)
def test_a_topics_page_has_its_rate_retention_consumers_and_last_events(
    bench: Workbench, redact: bool, retention: Retention | None, kept: str
) -> None:
    bench.platform.registry.set_retention("rides", retention)
    bench.platform.registry.register_consumer(Consumer("rides", "eager__backfill_may_0_4"))
    news = reported_page(bench, TopicSample(events=2, redact=redact))
    ids = [event.id for event in bench.platform.reader.read("rides")]
    page: dict[str, Any] = {name: value.value for name, value in news.metadata.items()}
    assert page["events per second"] == 0.333
    assert (page["events in log, at most"], page["offsets in log"]) == (ids[-1], f"1 to {ids[-1]}")
    assert page["retention"] == kept
    assert page["consumers"] == "eager"
    assert [event["offset"] for event in page["last events"]] == ids[-2:]
    assert not any("partition" in event for event in page["last events"])
    shown = [{name: event.get(name) for name in ("value", "value bytes")} for event in page["last events"]]
    assert shown == (
        [{"value": None, "value bytes": 2}] * 2
        if redact
        else [{"value": "18", "value bytes": None}, {"value": "19", "value bytes": None}]
    )


def reported_page(bench: Workbench, sample: TopicSample) -> dg.AssetMaterialization:
    """The report of topic `rides` after 20 more events."""
    rides = [Topic("rides")]
    bench.publish("rides", 1)
    first = observe_lag(bench.platform, [eager], topics=rides, sample=sample, cursor=None, now=1_000.0)
    bench.publish("rides", 20)
    later = observe_lag(
        bench.platform, [eager], topics=rides, sample=sample, cursor=first.cursor, now=1_000.0 + TOPIC_INTERVAL
    )
    (news,) = arrivals(later)
    assert isinstance(news, dg.AssetMaterialization)
    return news


def test_a_sample_reads_no_more_events_than_it_shows(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LogReader.read
    found: list[int] = []

    def counted(*arguments: Any, **named: Any) -> list[Event]:
        events = read(*arguments, **named)
        found.append(len(events))
        return events

    monkeypatch.setattr(LogReader, "read", counted)
    reported_page(bench, TopicSample(events=2))
    assert found[-1] == 2, "the publisher did the reads before"


def busy(*_: object, **__: object) -> None:
    raise DatabaseBusyError("canceling statement due to statement timeout")


def test_a_topics_page_that_cannot_be_read_does_not_stop_the_report(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogReader, "nth_before", busy)
    assert reported_page(bench, TopicSample()).metadata["published events"].value == 20
    monkeypatch.setattr(LogReader, "extent", busy)
    assert "published events" not in reported_page(bench, TopicSample()).metadata


def test_arrivals_that_cannot_be_read_stop_no_observation_and_are_reported_by_the_next_tick(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(now: float, cursor: str | None = None) -> dg.SensorResult:
        return observe_lag(bench.platform, [eager], topics=[eager.topic], cursor=cursor, now=now)

    first = look(1_000.0)
    bench.publish("rides", 2)
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "end", busy)
        second = look(1_000.0 + TOPIC_INTERVAL, first.cursor)
    assert (set(observed(second)), arrivals(second)) == ({"eager"}, [])
    (news,) = arrivals(look(1_015.0 + TOPIC_INTERVAL, second.cursor))
    assert news.metadata["published events"].value == 2


@pytest.mark.parametrize("events", [-1, 101])
def test_a_sample_of_an_impossible_size_is_refused(events: int) -> None:
    with pytest.raises(ValidationError):
        TopicSample(events=events)


# Hundreds of partitions

PARTITIONS = 300


def lag_of(partition: int, events: int) -> ConsumerLag:
    leased = events > 0
    return ConsumerLag(
        topic="orders", consumer="ledger", partition=partition, events=events, seconds=events / 10, last_event_id=1,
        end=1 + events, buffered=0, cause=LagCause.LEASED if leased else LagCause.NONE,
        detail=f"by run 0b5e9d5c-6f0e-4c8e-9a3e-{partition:012d}" if leased else "",
    )  # fmt: skip


def wide_lag(partitions: int) -> AssetLag:
    """The lag of each partition is its number."""
    return AssetLag(tuple(lag_of(partition, partition) for partition in range(partitions)))


def test_an_observation_of_hundreds_of_partitions_stays_small() -> None:
    metadata = wide_lag(PARTITIONS).metadata()
    event = dg.AssetObservation(asset_key="ledger", metadata=metadata)
    assert len(dg.serialize_value(event)) < 20_000


def test_totals_are_of_all_partitions_and_only_the_largest_lags_are_shown() -> None:
    metadata = wide_lag(PARTITIONS).metadata()
    assert metadata["Lag events"] == sum(range(PARTITIONS))
    assert metadata["partitions behind"] == PARTITIONS - 1
    shown = {partition for partition in range(PARTITIONS) if f"Lag events [{partition}]" in metadata}
    assert shown == set(range(PARTITIONS - SHOWN_PARTITIONS, PARTITIONS))
    assert f"consumed by [{PARTITIONS - 1}]" in metadata
    assert metadata["cause"].startswith(f"[{PARTITIONS - SHOWN_PARTITIONS}] leased: by run ")
    assert metadata["cause"].endswith(f"; and {PARTITIONS - 1 - SHOWN_PARTITIONS} more partitions")


def test_few_partitions_are_all_shown() -> None:
    metadata = wide_lag(SHOWN_PARTITIONS).metadata()
    assert all(f"Lag events [{partition}]" in metadata for partition in range(SHOWN_PARTITIONS))
    assert "more partitions" not in metadata["cause"]
