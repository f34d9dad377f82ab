"""Housekeeping over shards: a shard that is down does not stop the others, and is reported."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Retention, Topic
from eventsql_orchestration.dagster import (
    EventSQLResource,
    HistoryRetention,
    RunLimits,
    build_backfill,
    build_housekeeping_schedule,
    consumer_asset,
)
from eventsql_orchestration.dagster.housekeeping.prune import delete_windows
from eventsql_orchestration.dagster.shards import ShardsLeftOutError, on_each
from eventsql_orchestration.errors import DatabaseError, ShardUnavailableError
from eventsql_orchestration.orchestration.backfills.registry import Backfills
from eventsql_orchestration.storage import segments
from tests.dagster.conftest import NOWHERE, ONE, OTHER, Workbench
from tests.dagster.location import record
from tests.dagster.test_shards import tick

ORDERS = Topic("orders", 2, retention=Retention(events=2))
BY_SHARD = {"drop_old_segments", "drop_old_views", "delete_old_claims", "delete_old_publications", "delete_old_windows"}

ledger = consumer_asset(
    topic=ORDERS, consumer="ledger", partitioned=True, name="ledger", limits=RunLimits(max_wait=0.0)
)(record)
replayed = build_backfill(ledger)


@pytest.fixture
def eventsql(shards: dict[str, Workbench], monkeypatch: pytest.MonkeyPatch) -> EventSQLResource:
    """Both shards, with segments of a few events."""
    monkeypatch.setattr(segments, "SEGMENT_EVENTS", 4)
    resource = shards[ONE].eventsql
    ledger.register(resource.platform)
    return resource


def keep_house(instance: dg.DagsterInstance, eventsql: EventSQLResource) -> dg.ExecuteInProcessResult:
    location = dg.Definitions(
        assets=[ledger.asset, replayed.asset],
        jobs=[ledger.job, *replayed.jobs],
        schedules=[build_housekeeping_schedule(HistoryRetention(claim_hours=0.0))],
        resources={"eventsql": eventsql},
    )
    return location.resolve_job_def("housekeeping").execute_in_process(instance=instance, raise_on_error=False)


def steps(result: dg.ExecuteInProcessResult, kind: dg.DagsterEventType) -> set[str | None]:
    return {event.step_key for event in result.all_events if event.event_type == kind}


@pytest.mark.nightly
def test_housekeeping_clears_the_other_shards_while_one_is_down(
    eventsql: EventSQLResource, with_one_down: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    instance = shards[ONE].instance
    for _ in range(3):
        for bench in shards.values():
            bench.publish("orders", 5, partition=0)
        for request in tick(shards[ONE], ledger.sensors[0]):
            assert shards[ONE].run(ledger, request).success

    def left() -> dict[str, tuple[int, bool]]:
        """The claims of each shard, and whether it has all of its events."""
        return {
            shard: (len(bench.claims()), bench.platform.reader.count("orders") == 15) for shard, bench in shards.items()
        }

    assert left() == {ONE: (3, True), OTHER: (3, True)}
    down = keep_house(instance, with_one_down)
    assert left() == {ONE: (0, False), OTHER: (3, True)}
    (failure,) = [event for event in down.all_events if event.is_step_failure and event.step_key == "delete_old_claims"]
    message = str(failure.step_failure_data.error_display_string)
    assert "shard-2 cannot be reached" in message

    assert keep_house(instance, eventsql).success
    assert left() == {ONE: (0, False), OTHER: (0, False)}


def test_each_op_over_shards_fails_while_one_shard_is_down(
    with_one_down: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    down = keep_house(shards[ONE].instance, with_one_down)
    assert steps(down, dg.DagsterEventType.STEP_FAILURE) == BY_SHARD
    assert steps(down, dg.DagsterEventType.STEP_SUCCESS) == {"delete_old_history"}


def test_windows_stay_while_their_backfill_may_be_registered_on_a_shard_that_is_down(
    eventsql: EventSQLResource, with_one_down: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    instance, name = shards[ONE].instance, str(replayed.partitions.name)
    here, everywhere = "aaaaaa:0-9:0@shard-1", ["bbbbbb:0-9:0@shard-1", "bbbbbb:0-9:0@shard-2"]
    instance.add_dynamic_partitions(name, [here, *everywhere])

    def delete(resource: EventSQLResource) -> dict[str, int]:
        return delete_windows(
            on_each(resource.shards, lambda shard: Backfills([shard]).registered()), instance, replayed.asset.specs,
            now=datetime.now(UTC),
        )  # fmt: skip

    assert delete(with_one_down) == {name: 1}
    assert list(instance.get_dynamic_partitions(name)) == everywhere
    assert delete(eventsql) == {name: 2}


def test_a_failing_shard_is_reported_after_the_others_and_a_single_database_at_once(
    eventsql: EventSQLResource, platform: Any
) -> None:
    visited: list[str | None] = []

    def fail(shard: Any) -> None:
        visited.append(shard.name)
        if shard.name != OTHER:
            raise DatabaseError("its disk is full")

    found = on_each(eventsql.shards, fail)
    assert visited == [ONE, OTHER]
    assert list(found.of) == [OTHER]
    with pytest.raises(ShardsLeftOutError, match=r"failed on shard-1 \(its disk is full\); every other shard is done"):
        found.require_all(dg.get_dagster_logger())
    with pytest.raises(DatabaseError, match="disk is full"):
        on_each(platform.shards, fail)


def test_all_ops_over_shards_fail_if_no_shard_can_be_reached(shards: dict[str, Workbench]) -> None:
    result = keep_house(shards[ONE].instance, EventSQLResource(dsn=f"{NOWHERE} {NOWHERE}2"))
    assert steps(result, dg.DagsterEventType.STEP_FAILURE) == BY_SHARD
    errors: Sequence[str] = [
        str(event.step_failure_data.error_display_string) for event in result.all_events if event.is_step_failure
    ]
    assert all(ShardUnavailableError.__name__ in error for error in errors)
