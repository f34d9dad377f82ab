"""The provider as Airflow sees it: its info, connection, sensor and assets."""

from __future__ import annotations

import importlib
import json
from importlib import resources
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # Airflow brings it without types
import pytest
from airflow.sdk import Asset, Connection
from airflow.sdk.exceptions import AirflowException, TaskDeferred
from airflow.sdk.observability import stats
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

from eventsql_orchestration import Consumer, EventSQL, Publication, Shard, Topic
from eventsql_orchestration.airflow import EventSQLHook, EventSQLLagOperator, EventSQLSensor, claims_asset, topic_asset
from eventsql_orchestration.airflow.assets import topic_of
from eventsql_orchestration.airflow.conditions import Condition
from eventsql_orchestration.airflow.hook import urls_of
from eventsql_orchestration.airflow.provider import get_provider_info
from eventsql_orchestration.database.urls import connect_arguments, parse_dsn
from eventsql_orchestration.errors import (
    ConfigurationError,
    ConsumerNotFoundError,
    ShardUnavailableError,
    ValidationError,
)
from eventsql_orchestration.model import Retention
from tests.airflow.conftest import context_of


def test_the_info_follows_airflows_schema_and_names_what_exists() -> None:
    info = get_provider_info()
    schema = json.loads((resources.files("airflow") / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    for kind in ("hooks", "operators", "sensors", "triggers"):
        for module in info[kind][0]["python-modules"]:
            importlib.import_module(module)
    for name in (
        info["connection-types"][0]["hook-class-name"],
        info["task-decorators"][0]["class-name"],
        info["asset-uris"][0]["handler"],
        *info["queues"],
        *info["extra-links"],
    ):
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_airflow_finds_the_provider_and_its_connection_type() -> None:
    hook = ProvidersManagerTaskRuntime().hooks["eventsql"]  # type: ignore[no-untyped-call]  # Airflow annotates it in part
    assert hook is not None
    assert hook.hook_class_name == "eventsql_orchestration.airflow.hook.EventSQLHook"


def test_a_connection_gives_the_urls_of_all_shards() -> None:
    connection = Connection(
        conn_id="c", conn_type="eventsql", host="db", port=5433, login="me", password="a/b@c", schema="app",
        extra=json.dumps({"parameters": "sslmode=require", "shards": "postgresql://two/app postgresql://three/app"}),
    )  # fmt: skip
    assert urls_of(connection) == (
        "postgresql://me:a%2Fb%40c@db:5433/app?sslmode=require", "postgresql://two/app", "postgresql://three/app",
    )  # fmt: skip


def test_the_port_of_a_connection_is_that_of_each_host() -> None:
    connection = Connection(
        conn_id="c", conn_type="eventsql", host="one,two", port=5433, login="me", password="p&w", schema="app",
        extra=json.dumps({"parameters": "target_session_attrs=primary"}),
    )  # fmt: skip
    (url,) = urls_of(connection)
    arguments = connect_arguments(parse_dsn(url))
    assert (arguments["host"], arguments["port"], arguments["dbname"]) == ("one,two", "5433", "app")
    assert (arguments["user"], arguments["password"]) == ("me", "p&w")
    assert arguments["target_session_attrs"] == "primary"


def test_a_connection_without_a_host_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="names no host"):
        urls_of(Connection(conn_id="c", conn_type="eventsql"))


@pytest.mark.parametrize(
    "extra", [{"parameters": "sslmode"}, {"parameters": {"sslmode": "require"}}, {"shards": ["postgresql://two/app"]}]
)
def test_a_field_of_a_connection_that_cannot_be_used_is_refused_and_not_left_out(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    connection = {"conn_type": "eventsql", "host": "127.0.0.1", "port": 1, "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", json.dumps(connection))
    with pytest.raises(ConfigurationError):
        EventSQLHook().get_conn()


def test_the_test_button_says_what_is_there_or_what_is_wrong(
    connected: EventSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected.registry.register_topic(Topic("rides"))
    assert EventSQLHook().test_connection() == (True, "The platform in schema eventsql has 1 topic.")
    monkeypatch.setenv("AIRFLOW_CONN_EVENTSQL_DEFAULT", "eventsql://someone:secret@127.0.0.1:1/nowhere")
    reached, why = EventSQLHook().test_connection()
    assert not reached
    assert "secret" not in why


def test_the_uri_of_an_asset_names_a_connection_and_a_topic() -> None:
    assert Asset(uri="eventsql://eventsql_default/rides/").uri == "eventsql://eventsql_default/rides"
    with pytest.raises(ValueError, match="eventsql://<connection>/<topic>"):
        Asset(uri="eventsql://eventsql_default/a/b/c")


def test_an_asset_of_a_topic_has_no_watchers_because_airflow_drops_them() -> None:
    with pytest.raises(ValidationError, match="claims_asset\\('rides'"):
        topic_asset("rides", watchers=claims_asset("rides", "billing").watchers)


def test_claims_of_a_consumer_have_an_asset_of_their_own() -> None:
    claims = claims_asset("rides", "billing é", max_wait=2.0)
    assert (claims.name, claims.uri) == ("rides/billing%20%C3%A9", "eventsql://eventsql_default/rides/billing%20%C3%A9")
    (watcher,) = claims.watchers
    assert watcher.trigger.serialize()[1]["max_wait"] == 2.0
    assert topic_of(claims) is None
    assert topic_of(topic_asset("rides")) == "rides"


@pytest.fixture
def rides(connected: EventSQL) -> EventSQL:
    connected.registry.register_topic(Topic("rides"))
    connected.registry.register_consumer(Consumer("rides", "billing"))
    connected.publisher.publish_all(Publication("rides", b"%d" % n) for n in range(3))
    connected.transfer.run_once()
    return connected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({"consumer": "billing", "events": 3}, True),
        ({"consumer": "billing", "events": 4}, False),
        ({"consumer": "billing", "max_lag": 3}, True),
        ({"consumer": "billing", "max_lag": 2}, False),
        ({"offset": 3}, True),
        ({"offset": 4}, False),
        ({"consumer": "billing", "offset": 1}, False),
    ],
)
def test_a_sensor_waits_for_events_a_lag_or_an_offset(rides: EventSQL, condition: dict[str, Any], holds: bool) -> None:
    sensor = EventSQLSensor(task_id="wait", topic="rides", **condition)
    assert bool(sensor.poke(context_of())) is holds
    deferred = EventSQLSensor(task_id="wait", topic="rides", deferrable=True, **condition)
    if holds:
        assert deferred.execute(context_of()) == 3
    else:
        with pytest.raises(TaskDeferred):
            deferred.execute(context_of())


def test_an_offset_is_reached_when_the_consumer_has_nothing_left_up_to_there(rides: EventSQL) -> None:
    shard = rides.shards[0]
    condition = Condition("rides", "billing", "offset", 2)
    assert not condition.look([shard]).holds
    with rides.database.transaction() as connection:
        connection.execute("UPDATE eventsql.consumer SET eql_last_event_id = 2")
    assert condition.look([shard]).holds


def test_an_offset_on_a_shard_that_is_down_is_no_wrong_name(dsn: str) -> None:
    """The name of a shard that was never reached is not known. A sensor looks again after this error."""
    condition = Condition("rides", None, "offset", 2, shard="east")
    with Shard(dsn) as one, Shard(dsn) as two, pytest.raises(ShardUnavailableError):
        condition.look([one, two])


def test_an_offset_is_reached_though_retention_has_emptied_the_log(rides: EventSQL) -> None:
    rides.registry.set_retention("rides", Retention(seconds=1e-6))
    rides.retention.run_once(force=True)
    assert rides.reader.end("rides") == 0
    assert Condition("rides", None, "offset", 3).look(rides.shards).holds
    assert Condition("rides", "billing", "offset", 3).look(rides.shards).holds


def test_an_unknown_consumer_does_not_count_as_caught_up(rides: EventSQL) -> None:
    with pytest.raises(ConsumerNotFoundError):
        Condition("rides", "unknown", "max_lag", 0).look(rides.shards)


@pytest.mark.parametrize("wrong", [{}, {"events": 1, "offset": 1}])
def test_a_sensor_waits_for_exactly_one_thing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        EventSQLSensor(task_id="wait", topic="rides", **wrong)


# Lag


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The gauges that a task gives to Airflow's metrics, by their names."""
    found: dict[str, float] = {}
    monkeypatch.setattr(stats, "gauge", lambda name, value, tags=None: found.update({f"{name}{tags or ''}": value}))
    return found


def test_a_lag_within_its_bounds_passes_and_becomes_metrics(rides: EventSQL, gauges: dict[str, float]) -> None:
    (found,) = EventSQLLagOperator(task_id="lag", max_events=3).execute(context_of())
    assert (found["topic"], found["consumer"], found["events"]) == ("rides", "billing", 3)
    assert gauges["eventsql.lag.events{'topic': 'rides', 'consumer': 'billing'}"] == 3
    assert gauges["eventsql.lag.events.rides.billing"] == 3
    assert gauges["eventsql.lag.seconds.rides.billing"] > 0


def test_a_lag_beyond_its_bounds_fails_with_its_cause(rides: EventSQL, gauges: dict[str, float]) -> None:
    check = EventSQLLagOperator(task_id="lag", topic="rides", consumer="billing", max_events=2)
    with pytest.raises(AirflowException, match=r"too far behind: rides/billing has 3 events"):
        check.execute(context_of())
    assert gauges["eventsql.lag.events.rides.billing"] == 3


def test_a_paused_consumer_fails_before_its_bounds(rides: EventSQL, gauges: dict[str, float]) -> None:
    rides.registry.pause("rides", "billing")
    with pytest.raises(AirflowException, match="paused, resume it with"):
        EventSQLLagOperator(task_id="lag").execute(context_of())


def test_the_lag_of_an_unknown_consumer_is_an_error(rides: EventSQL) -> None:
    with pytest.raises(ConsumerNotFoundError, match="'nobody' of any topic"):
        EventSQLLagOperator(task_id="lag", consumer="nobody").execute(context_of())
