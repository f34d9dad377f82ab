"""Consumers that share their runs: one sensor, one run at a time, and the same claims underneath."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    build_backfill,
    build_definitions,
    consumer_asset,
    publish_events,
    range_asset,
    share_runs,
)
from eventsql_orchestration.dagster.tags import CLAIM_TAG, SHARED_TAG
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.owners import owner_of_run
from eventsql_orchestration.orchestration.trace.tracer import Tracer
from tests.dagster.conftest import Workbench, registering, request_of
from tests.dagster.location import cut_off, record

RIDES, TRIPS = Topic("rides"), Topic("trips", 2)


def recording(events: Sequence[Event], connection: Connection) -> None:
    record(events, connection)


def failing(events: Sequence[Event], connection: Connection) -> None:
    raise ValueError("out of order")


def define(
    first: Callable[..., Any] = recording, second: Callable[..., Any] = recording
) -> tuple[ConsumerDefinition, ...]:
    limits = RunLimits(max_wait=0.0, drain_seconds=3600.0, drain_idle=3600.0)
    options = AssetOptions(tags={"team": "rides"}, retry_policy=dg.RetryPolicy())
    return share_runs(
        "consume_together",
        [
            consumer_asset(topic=RIDES, consumer="first", name="first", limits=limits, options=options)(first),
            consumer_asset(topic=TRIPS, consumer="second", name="second", partitioned=True, limits=limits)(second),
        ],
    )


pytestmark = pytest.mark.prepared.with_args(registering(*define()))


def execute(
    bench: Workbench, definitions: Sequence[ConsumerDefinition], request: dg.RunRequest
) -> dg.ExecuteInProcessResult:
    return bench.execute(bench.job(*definitions), request)


def tick(bench: Workbench, definitions: Sequence[ConsumerDefinition]) -> Any:
    return bench.tick(definitions[0].sensors[0])


def request(bench: Workbench, definitions: Sequence[ConsumerDefinition]) -> dg.RunRequest:
    return request_of(tick(bench, definitions))


def materialized(result: dg.ExecuteInProcessResult) -> dict[str, int]:
    """The events of each asset that a run materialized."""
    return {
        event.asset_key.to_user_string(): event.materialization.metadata["events"].value  # type: ignore[union-attr,misc]
        for event in result.get_asset_materialization_events()
    }


def test_consumers_that_share_runs_have_one_job_and_one_sensor() -> None:
    definitions = define()
    assert {definition.job.name for definition in definitions} == {"consume_together"}
    assert [sensor.name for sensor in build_definitions(definitions).sensors or ()] == ["consume_together", "lag"]
    assert (definitions[0].job.tags or {})["team"] == "rides"


def test_one_run_consumes_the_waiting_events_of_all_consumers(bench: Workbench) -> None:
    definitions = define()
    assert tick(bench, definitions) == "no events wait for rides/first, trips/second"
    ids = bench.publish("trips", 4, partition=0) + bench.publish("trips", 5, partition=1)
    requested = request(bench, definitions)
    ids += bench.publish("rides", 3)
    result = execute(bench, definitions, requested)
    assert result.success
    assert materialized(result) == {"first": 3, "second": 9}
    assert sorted(bench.effects()) == sorted(ids)
    assert tick(bench, definitions) == "no events wait for rides/first, trips/second"


def test_a_consumer_without_waiting_events_materializes_nothing(bench: Workbench) -> None:
    definitions = define()
    bench.publish("trips", 4, partition=1)
    result = execute(bench, definitions, request(bench, definitions))
    assert materialized(result) == {"second": 4}


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.NOT_STARTED, dg.DagsterRunStatus.STARTED])
def test_nothing_is_claimed_while_a_run_is_under_way(bench: Workbench, status: dg.DagsterRunStatus) -> None:
    definitions = define()
    bench.publish("rides", 3)
    requested = request(bench, definitions)
    run = bench.instance.create_run_for_job(
        bench.job(*definitions), run_config=requested.run_config, tags=dict(requested.tags), status=status
    )
    bench.publish("trips", 2)
    assert tick(bench, definitions).startswith(f"run {run.run_id} is under way")
    assert len(bench.claims()) == 1


def test_the_run_after_a_dead_run_consumes_its_range_and_the_waiting_events(bench: Workbench) -> None:
    definitions = define()
    ids = bench.publish("rides", 3)
    dead = request(bench, definitions)
    bench.instance.create_run_for_job(bench.job(*definitions), tags=dict(dead.tags), status=dg.DagsterRunStatus.FAILURE)
    ids += bench.publish("trips", 2, partition=0)
    again = request(bench, definitions)
    assert again.run_key != dead.run_key
    assert execute(bench, definitions, again).success
    assert sorted(bench.effects()) == sorted(ids)
    bench.publish("rides", 1)
    assert not execute(bench, definitions, dead).success
    assert len(bench.effects()) == len(ids), "its claim is another run's: it leaves the event to the next run"


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE])
def test_a_dead_run_of_a_paused_consumer_keeps_no_other_from_its_turn(
    bench: Workbench, status: dg.DagsterRunStatus
) -> None:
    definitions = define()
    bench.publish("rides", 3)
    dead = request(bench, definitions)
    run = bench.instance.create_run_for_job(bench.job(*definitions), tags=dict(dead.tags), status=status)
    bench.platform.claims.adopt(int(dead.tags[CLAIM_TAG]), owner=owner_of_run(run.run_id))
    bench.platform.registry.pause("rides", "first")
    if status is dg.DagsterRunStatus.STARTED:
        bench.end_lease(definitions[0])

    bench.publish("trips", 2, partition=0)
    assert request(bench, definitions).tags["eventsql/consumer"] == "second"


def test_a_claim_whose_lease_has_ended_goes_before_waiting_events(bench: Workbench) -> None:
    definitions = define()
    bench.publish("rides", 3)
    assert request(bench, definitions).tags["eventsql/consumer"] == "first"
    bench.end_lease(definitions[0])
    bench.publish("trips", 2, partition=0)
    assert request(bench, definitions).tags["eventsql/consumer"] == "first"
    assert request(bench, definitions).tags["eventsql/consumer"] == "second"


def test_the_range_of_a_run_is_kept_while_another_consumer_has_its_turn(bench: Workbench) -> None:
    owners: list[str] = []

    def watching(events: Sequence[Event], connection: Connection) -> None:
        live = bench.platform.claims.live("trips", "second", 0)
        owners.append("none" if live is None else live.owner)
        record(events, connection)

    definitions = define(first=watching)
    bench.publish("trips", 2, partition=0)
    requested = request(bench, definitions)
    assert requested.tags["eventsql/consumer"] == "second"
    bench.publish("rides", 3)
    result = execute(bench, definitions, requested)
    assert materialized(result) == {"first": 3, "second": 2}
    assert owners == [f"run {result.run_id}"], "steps are in the order of their names"


def test_a_consumer_that_fails_keeps_no_other_from_its_turn(bench: Workbench) -> None:
    definitions = define(first=failing)
    bench.publish("rides", 3)
    ids = bench.publish("trips", 2, partition=0)
    result = execute(bench, definitions, request(bench, definitions))
    assert not result.success
    assert materialized(result) == {"second": 2}
    assert bench.effects() == ids
    bench.prolong_pause(definitions[0])
    assert "is retried in" in tick(bench, definitions)


def test_a_consumer_of_a_shared_run_goes_on_with_the_claim_of_its_first_attempt(bench: Workbench) -> None:
    """The run was requested for a claim of the other consumer."""
    definitions = define(first=cut_off(1))
    bench.publish("trips", 2, partition=0)
    requested = request(bench, definitions)
    bench.publish("rides", 3)
    result = execute(bench, definitions, requested)
    assert result.success
    assert materialized(result) == {"first": 3, "second": 2}


def shared_job() -> dg.JobDefinition:
    """A job that another process could load."""
    definitions = define()
    return dg.Definitions(
        assets=[definition.asset for definition in definitions],
        jobs=[definitions[0].job],
        resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
    ).resolve_job_def("consume_together")


def test_a_run_that_is_executed_again_replays_its_own_range_and_consumes_no_waiting_events(
    bench: Workbench, shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", dsn)
    bench.instance, definitions = shared_instance, define()
    ids = bench.publish("rides", 3)
    requested = request(bench, definitions)
    job = dg.reconstructable(shared_job)
    with dg.execute_job(
        job, instance=shared_instance, run_config=requested.run_config, tags=dict(requested.tags)
    ) as parent:
        assert parent.success
    bench.publish("trips", 2, partition=0)
    again = dg.ReexecutionOptions(parent_run_id=parent.run_id)
    with dg.execute_job(job, instance=shared_instance, reexecution_options=again) as child:
        assert child.success
    assert bench.effects() == [*ids, *ids]
    assert request(bench, definitions).tags["eventsql/consumer"] == "second"


def test_backfills_of_consumers_that_share_runs_have_their_own_runs() -> None:
    first, _ = define()
    tags = build_backfill(first).job.tags or {}
    assert tags["team"] == "rides"
    assert SHARED_TAG not in tags


def test_an_event_of_a_shared_run_is_followed_to_the_range_of_its_own_asset(bench: Workbench) -> None:
    def publishing(topic: str) -> Callable[..., Any]:
        def publish(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
            events = [{"value": b"%d" % claim.events}]
            return publish_events(context, events, eventsql=eventsql, topic=topic, claim=claim)

        publish.__annotations__ = {"context": dg.AssetExecutionContext, "claim": Claim, "eventsql": EventSQLResource}
        return publish

    definitions = share_runs(
        "consume_together",
        [
            range_asset(
                topic=topic,
                consumer=f"c_{name}",
                publishes=name,
                name=name,
                limits=RangeLimits(max_wait=0.0),
                options=AssetOptions(kinds=()),
            )(publishing(name))
            for topic, name in ((RIDES, "fares"), (TRIPS, "tolls"))
        ],
    )
    for definition, name in zip(definitions, ("fares", "tolls"), strict=True):
        bench.platform.registry.register_topic(Topic(name))
        definition.register(bench.platform)
    bench.publish("trips", 2)
    requested = request(bench, definitions)
    bench.publish("rides", 3)
    result = execute(bench, definitions, requested)
    assert result.success
    for name, topic in (("fares", "rides"), ("tolls", "trips")):
        origin = Tracer(bench.platform).trace(name, 1)
        assert [(read.range.topic, read.range.consumer) for read in origin.inputs] == [(topic, f"c_{name}")]


def sums(claim: Claim) -> None:
    """Publishes sums."""


def test_consumers_that_feed_one_another_cannot_share_runs() -> None:
    source = range_asset(topic=RIDES, consumer="sums", publishes=TRIPS, name="sums")(sums)
    reader = consumer_asset(topic=TRIPS, consumer="c", name="reader")(recording)
    with pytest.raises(ValidationError, match=r"'c' reads topic/trips, which 'sums' materializes"):
        share_runs("both", [source, reader])
    with pytest.raises(ValidationError, match="two consumers"):
        share_runs("alone", [source])
    with pytest.raises(ValidationError, match="named twice"):
        share_runs("twice", [source, source])
