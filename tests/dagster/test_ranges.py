"""Range assets: a function over a whole claim, which commits it itself."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import dagster as dg
import psycopg
import pytest

from eventsql_orchestration import Event, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLIOManager,
    EventSQLResource,
    RangeLimits,
    build_register_job,
    range_asset,
    topic_key,
)
from eventsql_orchestration.errors import DatabaseUnavailableError
from eventsql_orchestration.model import Retention
from tests.dagster.conftest import Metadata, Workbench, registering

TOPIC = Topic("rides", 2)
SUMS = Topic("sums")


def define(
    function: Callable[..., Any], *, max_attempts: int | None = None, options: AssetOptions | None = None, **limits: Any
) -> ConsumerDefinition:
    return range_asset(
        topic=TOPIC, consumer="c", name="c", publishes=SUMS, max_attempts=max_attempts,
        options=options or AssetOptions(), limits=RangeLimits(**{"max_wait": 0.0, "drain_seconds": 0.0, **limits}),
    )(function)  # fmt: skip


def total(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
    """Publishes how many events the range has, together with its commit."""
    platform = eventsql.platform
    events = platform.reader.read(claim.range.topic, after=claim.remaining.after, upto=claim.remaining.upto)
    with platform.database.transaction() as connection:
        platform.claims.check(connection, claim)
        platform.publisher.publish(Publication("sums", b"%d" % len(events)), connection=connection)
        platform.claims.commit(connection, claim)
    return {"published topic": "sums", "published events": 1, "largest": events[-1].id}


def forget(claim: Claim) -> None:
    """Does not commit."""


def stumble(claim: Claim) -> None:
    raise RuntimeError("out of memory")


pytestmark = pytest.mark.prepared.with_args(registering(SUMS, define(total)))


def sums(bench: Workbench) -> list[bytes]:
    bench.platform.transfer.run_once()
    return [event.value for event in bench.platform.reader.read("sums")]


def test_a_range_is_consumed_and_published_once(bench: Workbench, metadata: Metadata) -> None:
    definition = define(total)
    ids = bench.publish("rides", 40)
    requested = bench.request(definition)
    result = bench.run(definition, requested)

    assert result.success
    assert sums(bench) == [b"40"]
    assert bench.offset(definition) == ids[-1]
    found = metadata(result, definition.key)
    assert (found["events"], found["claims"], found["largest"]) == (40, 1, ids[-1])
    assert "published events" not in found, "it is the topic's, and would be counted twice"
    assert metadata(result, topic_key("sums")) == {
        "published topic": "sums",
        "published events": 1,
        "dagster/row_count": 1,
    }

    assert bench.run(definition, requested).success
    assert sums(bench) == [b"40"]


def test_a_run_that_has_no_claim_materializes_no_topic(bench: Workbench) -> None:
    """Otherwise an input with the topic's last materialization would find no publication there."""
    definition = define(total)
    bench.publish("rides", 3)
    requested = bench.request(definition)
    first, again = bench.run(definition, requested), bench.run(definition, requested)
    assert [event.asset_key for event in first.get_asset_materialization_events()] == [
        definition.key, topic_key("sums"),
    ]  # fmt: skip
    assert [event.asset_key for event in again.get_asset_materialization_events()] == [definition.key]


def test_assets_behind_a_topic_are_computed_in_a_run_that_has_no_claim_for_its_consumer(
    bench: Workbench, metadata: Metadata
) -> None:
    definition = define(total)
    loaded: list[list[Event]] = []

    @dg.asset(deps=[topic_key("sums")])
    def behind() -> None: ...

    @dg.asset(ins={"events": dg.AssetIn(topic_key("sums"), input_manager_key="events")})
    def reading(events: list[Event]) -> None:
        loaded.append(events)

    result = dg.materialize(
        [definition.asset, behind, reading], instance=bench.instance,
        resources={"eventsql": bench.eventsql, "events": EventSQLIOManager(eventsql=bench.eventsql)},
    )  # fmt: skip
    keys = {event.asset_key for event in result.get_asset_materialization_events()}
    assert keys == {definition.key, topic_key("sums"), behind.key, reading.key}
    assert metadata(result, topic_key("sums")) == {
        "published topic": "sums", "published events": 0, "dagster/row_count": 0,
    }  # fmt: skip
    assert loaded == [[]]


def test_a_function_that_does_not_commit_fails_its_run_and_the_range_stays(bench: Workbench) -> None:
    definition = define(forget)
    ids = bench.publish("rides", 3)
    result = bench.run(definition, bench.request(definition))

    assert not result.success
    assert "was not committed: publish with publish_dataframe" in str(result.failure_data_for_node("c"))
    assert bench.offset(definition) == 0
    bench.prolong_pause(definition)
    assert "is retried in" in bench.tick(definition.sensors[0])
    bench.end_pause(definition)
    assert bench.request(definition).tags[".dagster/eventsql_after"] == "0"
    assert bench.claims() == [(0, ids[-1], "released"), (0, ids[-1], "claimed")]


def test_a_function_that_raises_has_its_range_claimed_again(bench: Workbench) -> None:
    bench.publish("rides", 3)
    broken, mended = define(stumble), define(total)
    assert not bench.run(broken, bench.request(broken)).success
    bench.end_pause(broken)
    assert bench.run(mended, bench.request(mended)).success
    assert sums(bench) == [b"3"]


class TookTooLongError(DatabaseUnavailableError):
    """The server has ended the function's transaction for its time."""

    def __init__(self) -> None:
        super().__init__("ended a transaction that took too long")
        self.__cause__ = psycopg.errors.IdleInTransactionSessionTimeout()


@pytest.mark.parametrize("error", [RuntimeError, CancelledError, SystemExit, TookTooLongError])
def test_a_function_that_keeps_raising_fails_its_run_and_stops_its_partition(
    bench: Workbench, error: type[BaseException]
) -> None:
    def ends(claim: Claim) -> None:
        raise error

    broken = define(ends, max_attempts=1)
    bench.platform.registry.register_consumer(broken.consumer, max_attempts=1)
    ids = bench.publish("rides", 3)
    assert not bench.run(broken, bench.request(broken)).success
    assert f"event {ids[0]} blocks the partition" in bench.tick(broken.sensors[0])


def test_a_function_that_raises_after_its_commit_fails_its_run_with_its_own_error(bench: Workbench) -> None:
    def late(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> None:
        total(context, claim, eventsql)
        raise RuntimeError("out of memory")

    definition = define(late)
    ids = bench.publish("rides", 3)
    result = bench.run(definition, bench.request(definition))
    assert not result.success
    assert "RuntimeError: out of memory" in str(result.failure_data_for_node("c"))
    assert sums(bench) == [b"3"]
    assert bench.offset(definition) == ids[-1]


def test_a_committed_range_is_reported_whatever_its_function_returns(bench: Workbench, metadata: Metadata) -> None:
    def counting(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> int:
        total(context, claim, eventsql)
        return 3

    definition = define(counting)
    bench.publish("rides", 3)
    result = bench.run(definition, bench.request(definition))
    assert result.success
    assert metadata(result, definition.key)["events"] == 3


class Mean(float):
    """A float of another class, as NumPy's."""


def test_metadata_that_dagster_cannot_store_fails_no_committed_range(bench: Workbench, metadata: Metadata) -> None:
    def measuring(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[Any, Any]:
        told: dict[Any, Any] = {
            "share": Decimal("0.5"),
            "mean": Mean(0.5),
            "places": {"first": dg.MetadataValue.int(1)},
            7: "seven",
        }
        return total(context, claim, eventsql) | told

    definition = define(measuring)
    ids = bench.publish("rides", 3)
    result = bench.run(definition, bench.request(definition))
    assert result.success
    found = metadata(result, definition.key)
    assert (found["events"], found["largest"], found["7"]) == (3, ids[-1], "seven")
    assert not found.keys() & {"share", "mean", "places"}
    warnings = [each for each in bench.instance.all_logs(result.run_id) if each.level == logging.WARNING]
    assert len(warnings) == 3


def test_a_database_that_is_away_is_no_failure_of_the_range(bench: Workbench) -> None:
    def cut_off(claim: Claim) -> None:
        raise DatabaseUnavailableError

    broken, mended = define(cut_off), define(total)
    bench.publish("rides", 3)
    assert not bench.run(broken, bench.request(broken)).success
    assert bench.run(mended, bench.request(mended)).success


def test_a_published_topic_is_registered_as_a_consumers_topic_is(bench: Workbench) -> None:
    """It is created and shown, its retention is applied, and other partitions are refused."""

    def register(topic: Topic) -> dg.ExecuteInProcessResult:
        ranges = range_asset(topic=TOPIC, consumer="c", name="c", publishes=topic)(total)
        job = build_register_job([ranges])
        resources = {"eventsql": EventSQLResource(dsn=bench.platform.database.dsn)}
        return job.execute_in_process(resources=resources, instance=bench.instance, raise_on_error=False)

    def shown(result: dg.ExecuteInProcessResult) -> Any:
        (event,) = [each for each in result.all_events if each.is_successful_output]
        return {name: value.value for name, value in event.step_output_data.metadata.items()}

    assert "topic 'totals'" in shown(register(Topic("totals")))["created"]
    again = shown(register(Topic("totals", retention=Retention(events=10))))
    assert (again["created"], list(again["changed"])) == ([], ["topic 'totals'"])
    bench.publish("totals", 1)

    refused = register(Topic("totals", 2))
    assert "RedefinitionError" in str(refused.failure_data_for_node("register_topics_and_consumers"))
    kept = bench.platform.registry.topic("totals")
    assert (kept.partitions, kept.retention) == (-1, Retention(events=10))
