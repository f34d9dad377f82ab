"""The event store, its subscriptions and views stand in Dagster, with their lag as observations."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster import (
    EventSQLResource,
    build_projection_check,
    build_subscription_sensor,
    build_view_check,
    projection_asset,
    store_asset,
    subscription_asset,
    topic_asset,
    topic_key,
    view_asset,
)
from eventsql_orchestration.dagster.monitoring.checks import IDLE_INTERVAL
from eventsql_orchestration.dagster.monitoring.subscriptions import observe_subscriptions
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.store import Change, Projection, Projections, RecordedChange
from eventsql_orchestration.views import Rollup
from tests.dagster.conftest import executed_check
from tests.fixtures import Sessions
from tests.views.test_rebuilding import Counts, World, prepare

MAILER = subscription_asset("mailer")
MOVES = Rollup("moves", timedelta(minutes=1), ("place",))


class Statuses(Projection):
    name = "statuses"
    tables = ("status",)

    def create(self, connection: Connection) -> None:
        connection.execute("CREATE TABLE status (id text PRIMARY KEY)")

    def apply(self, change: RecordedChange, connection: Connection) -> None:
        connection.execute("INSERT INTO status VALUES (%s) ON CONFLICT DO NOTHING", [change.aggregate_id])


def observed(platform: EventSQL, *, cursor: str | None = None, now: float = 1e9) -> dg.SensorResult:
    return observe_subscriptions(platform, {MAILER.key: "mailer"}, cursor=cursor, now=now)


def numbers(result: dg.SensorResult) -> list[dict[str, Any]]:
    return [{name: value.value for name, value in event.metadata.items()} for event in result.asset_events]


def handle(_change: RecordedChange, _connection: Connection) -> None:
    """Nothing to do."""


def test_a_subscription_is_observed_while_it_is_behind_and_rarely_afterwards(
    platform: EventSQL, sessions: Sessions
) -> None:
    mailer = platform.store.subscribe("mailer", handle, background=False)
    platform.store.append("order", "1", [Change("placed", {})], expected_version=0)
    first = observed(platform)
    (found,) = numbers(first)
    assert found.pop("Lag seconds") >= 0
    assert found == {"Lag changes": 1, "Held back": 0, "Dead letters": 0, "cause": "waiting"}
    assert "mailer is 1 change behind" in str(first.skip_reason)

    mailer.run_once()
    second = observed(platform, cursor=first.cursor)
    assert numbers(second) == [{"Lag changes": 0, "Lag seconds": 0, "Held back": 0, "Dead letters": 0, "cause": "none"}]
    assert observed(platform, cursor=second.cursor, now=1e9 + IDLE_INTERVAL - 1).asset_events == []
    assert len(observed(platform, cursor=second.cursor, now=1e9 + IDLE_INTERVAL).asset_events) == 1

    held = sessions()
    held.execute("SELECT pg_current_xact_id()")
    platform.store.append("order", "1", [Change("paid", {})], expected_version=1)
    (found,) = numbers(observed(platform, cursor=second.cursor))
    assert (found["Lag changes"], found["Held back"]) == (1, 1)
    assert f"process {held.info.backend_pid} " in found["cause"]


def test_a_subscription_that_does_not_exist_yet_is_named(platform: EventSQL) -> None:
    result = observed(platform)
    assert result.asset_events == []
    assert "'mailer' does not exist yet" in str(result.skip_reason)


def test_a_projection_is_observed_by_its_subscription_in_a_tick(platform: EventSQL, dsn: str) -> None:
    projections = Projections(platform.store, [Statuses()])
    projections.install()
    projections.subscribe("statuses", background=False)
    platform.store.append("order", "1", [Change("placed", {})], expected_version=0)
    spec = projection_asset(Statuses)
    assert spec.metadata["tables"] == "public.status"
    sensor = build_subscription_sensor([MAILER, spec])
    with dg.build_sensor_context(resources={"eventsql": EventSQLResource(dsn=dsn)}) as context:
        data = sensor.evaluate_tick(context)
    (event,) = data.asset_events
    assert event.asset_key == spec.key


def test_a_projection_is_checked_against_a_replay(platform: EventSQL, dsn: str) -> None:
    projections = Projections(platform.store, [Statuses()])
    projections.install()
    platform.store.append("order", "1", [Change("placed", {})], expected_version=0)
    check = build_projection_check(Statuses(), {"status": "id"})
    checked = partial(executed_check, check, projection_asset(Statuses), EventSQLResource(dsn=dsn))
    missing = checked()
    assert not missing.passed
    assert missing.metadata["status"].value == "1"
    projections.rebuild("statuses")
    assert checked().passed


@pytest.mark.prepared.with_args(prepare)
def test_a_view_is_checked_against_a_recomputation(platform: EventSQL, dsn: str) -> None:
    world = World(platform)
    world.publish(1, 2, 3)
    world.consume()
    check = build_view_check(Counts())
    checked = partial(executed_check, check, view_asset(Counts.view, deps=[]), EventSQLResource(dsn=dsn))
    assert checked().passed
    world.spoil()
    spoilt = checked()
    assert not spoilt.passed
    assert spoilt.metadata["Missing"].value == spoilt.metadata["Surplus"].value == 3
    world.views.rebuild(Counts())
    assert checked().passed


def test_assets_stand_downstream_of_the_store_and_of_their_topics() -> None:
    moved = topic_asset(Topic("moved"))
    view = view_asset(MOVES, deps=[topic_key("moved")])
    specs = [store_asset(), MAILER, projection_asset(Statuses), moved, view]
    graph = dg.Definitions(assets=specs, sensors=[build_subscription_sensor([MAILER])]).resolve_asset_graph()
    assert graph.get(MAILER.key).parent_keys == graph.get(specs[2].key).parent_keys == {store_asset().key}
    assert graph.get(view.key).parent_keys == {moved.key}
    assert (view.metadata["period"], view.metadata["form"].value["grain"]) == ("30 d", "1 min")


def test_an_asset_without_a_subscription_is_refused() -> None:
    with pytest.raises(ValidationError, match="event_store"):
        build_subscription_sensor([store_asset()])
