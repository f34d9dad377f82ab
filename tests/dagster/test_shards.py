"""Consumers over shards: ticks that look at each, runs that consume on one, and a shard that is down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLResource,
    TickOptions,
    consumer_asset,
    range_asset,
    share_runs,
)
from eventsql_orchestration.dagster.consumers.tick import evaluate
from eventsql_orchestration.dagster.lineage.origin import Origin
from eventsql_orchestration.dagster.trace.runs import StoredRuns
from eventsql_orchestration.errors import (
    ClosedError,
    ConfigurationError,
    DatabaseError,
    DatabaseUnavailableError,
    ShardSetError,
)
from eventsql_orchestration.metrics import PlatformCollector
from eventsql_orchestration.orchestration.provenance import SHARD, Writer
from eventsql_orchestration.orchestration.shards import shards_of as databases_of
from tests.conftest import Prepared
from tests.dagster.conftest import NOWHERE, ONE, OTHER, Metadata, Workbench, registering, use
from tests.dagster.location import AT_ONCE, record

ORDERS = Topic("orders", 2)

ledger = consumer_asset(topic=ORDERS, consumer="ledger", partitioned=True, name="ledger", limits=AT_ONCE)(record)
wide = consumer_asset(topic=ORDERS, consumer="wide", partitioned=True, sensor="consumer", name="wide", limits=AT_ONCE)(
    record
)


register = registering(ledger, wide)


@pytest.fixture
def shard_templates(prepared: Prepared) -> tuple[str, ...]:
    return prepared(register, databases=2)


@pytest.fixture
def eventsql(shards: dict[str, Workbench]) -> EventSQLResource:
    return shards[ONE].eventsql


def tick(bench: Workbench, sensor: dg.SensorDefinition, **options: Any) -> list[dg.RunRequest]:
    answer = bench.tick(sensor, **options)
    assert isinstance(answer, list), answer
    return answer


def shards_of(requests: Sequence[dg.RunRequest]) -> list[tuple[str, int]]:
    return [(request.tags["eventsql/shard"], int(request.tags["eventsql/partition"])) for request in requests]


# The resource


def test_a_resource_gives_one_shard_by_its_name_and_the_platform_over_all_shards(eventsql: EventSQLResource) -> None:
    assert [shard.name for shard in eventsql.shards] == [ONE, OTHER]
    assert eventsql.shard(OTHER) is eventsql.platform.shards[1]
    with pytest.raises(ShardSetError, match="no shard 'shard-9': the shards are shard-1, shard-2"):
        eventsql.shard("shard-9")
    with pytest.raises(ShardSetError):
        eventsql.shard(None)


def test_a_shard_that_cannot_be_identified_while_others_are_down_is_not_taken_for_another(
    with_one_down: EventSQLResource,
) -> None:
    assert with_one_down.shard(OTHER).name == OTHER, "the only one that is missing"
    with pytest.raises(DatabaseUnavailableError):
        with_one_down.shard(OTHER).registry.topics()


def look(platform: EventSQL) -> object:
    return databases_of(platform)


def look_in_a_tick(platform: EventSQL) -> object:
    return evaluate(SimpleNamespace(options=TickOptions()), platform, dg.DagsterInstance.ephemeral(), logging.getLogger)


def scrape(platform: EventSQL) -> object:
    return list(PlatformCollector(platform).collect())


@pytest.mark.parametrize("use", [look, look_in_a_tick, scrape])
def test_a_platform_that_was_closed_is_not_opened_again(
    eventsql: EventSQLResource, use: Callable[[EventSQL], object]
) -> None:
    platform = eventsql.separate()
    platform.close()
    with suppress(ClosedError):
        use(platform)
    with pytest.raises(ClosedError):
        platform.opened()


def test_spark_is_given_the_urls_of_all_shards_or_of_one(eventsql: EventSQLResource) -> None:
    dsns = [shard.database.dsn for shard in eventsql.shards]
    assert eventsql.spark_options() == {"dsn": " ".join(dsns), "schema": "eventsql"}
    assert eventsql.spark_options(OTHER)["dsn"] == dsns[1]
    assert eventsql.source().urls == tuple(dsns)
    assert eventsql.source(ONE).urls == (dsns[0],)


def test_one_database_has_no_name_and_no_other_database(dsn: str) -> None:
    resource = EventSQLResource(dsn=dsn)
    assert resource.shards == resource.platform.shards
    assert resource.shard(None) is resource.platform.shards[0]
    with pytest.raises(ShardSetError, match="names one database"):
        resource.shard(ONE)
    resource.platform.close()


def test_each_url_is_checked_when_the_location_is_loaded_and_no_password_is_told() -> None:
    with pytest.raises(ConfigurationError, match="dsn of EventSQLResource, URL 2 of 2") as caught:
        EventSQLResource(dsn="postgresql://user:secret@host/a\nmysql://user:secret@host/b")
    assert "secret" not in str(caught.value)


def test_the_urls_may_come_from_the_environment_and_statements_of_ticks_are_bounded_on_each(
    eventsql: EventSQLResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_TEST_DSN", eventsql.dsn)
    named: list[str | None] = []

    def sleep(eventsql: EventSQLResource) -> None:
        with eventsql.bounded(0.2) as platform:
            for shard in platform.open().shards:
                named.append(shard.name)
                with pytest.raises(DatabaseError), shard.database.errors(), shard.database.connection() as connection:
                    connection.execute("SELECT pg_sleep(20)")

    use(EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN")), sleep)
    assert named == [ONE, OTHER]


def test_a_tick_has_a_short_connect_timeout_for_one_of_several_shards_unless_its_url_sets_one() -> None:
    dsns = ["postgresql://user:secret@a/x", "postgresql://b/x?connect_timeout=7"]
    with EventSQLResource(dsn=" ".join(dsns)).bounded(1.0) as platform:
        assert [shard.database.url.query["connect_timeout"] for shard in platform.shards] == ["3", "7"]
        assert platform.shards[0].database.url.password == "secret"
    with EventSQLResource(dsn=dsns[0]).bounded(1.0) as platform:
        assert "connect_timeout" not in platform.database.url.query


# Ticks and runs


def test_a_tick_claims_on_each_shard_and_each_run_consumes_on_its_own(
    eventsql: EventSQLResource, shards: dict[str, Workbench], metadata: Metadata
) -> None:
    ids = {name: bench.publish("orders", 3 + n, partition=1) for n, (name, bench) in enumerate(shards.items())}
    one, other = tick(shards[ONE], ledger.sensors[1])
    assert shards_of([one, other]) == [(ONE, 1), (OTHER, 1)]
    assert one.tags[".dagster/eventsql_claim"] == other.tags[".dagster/eventsql_claim"], (
        "each shard counts its own claims"
    )
    assert one.run_key != other.run_key
    assert one.run_config["ops"]["ledger"]["config"] == {"claim": 1, "shard": ONE}

    # In whatever order they come.
    result = shards[OTHER].run(ledger, other)
    assert result.success
    assert (shards[ONE].effects(), shards[OTHER].effects()) == ([], ids[OTHER])
    told = metadata(result, ledger.key)
    assert told["shard"] == OTHER
    assert told["ranges"] == [
        {"shard": OTHER, "claim": 1, "partition": 1, "after": 0, "upto": ids[OTHER][-1], "events": 4}
    ]
    assert told["trace"] == f"eventsql --shard {OTHER} trace orders {ids[OTHER][-1]}"
    (read,) = StoredRuns(shards[ONE].instance).run(result.run_id).inputs  # type: ignore[union-attr]
    assert (read.shard, read.upto) == (OTHER, ids[OTHER][-1])

    assert shards[ONE].run(ledger, one).success
    assert shards[ONE].effects() == ids[ONE]
    skipped = shards[ONE].tick(ledger.sensors[1])
    assert (
        skipped
        == f"shard-1: no events wait after offset {ids[ONE][-1]}; shard-2: no events wait after offset "
        + str(ids[OTHER][-1])
    )


def test_one_run_at_a_time_is_requested_for_a_partition_of_a_shard(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    bench = shards[ONE]
    for each in shards.values():
        each.publish("orders", 2, partition=0)
    one, other = tick(bench, ledger.sensors[0])
    bench.requested(ledger, one, dg.DagsterRunStatus.NOT_STARTED)
    bench.requested(ledger, other, dg.DagsterRunStatus.FAILURE)
    for each in shards.values():
        each.end_lease(ledger)

    (again,) = tick(bench, ledger.sensors[0])
    assert shards_of([again]) == [(OTHER, 0)], "the queued run of the one keeps its claim, though their ids are equal"
    assert again.run_key not in {one.run_key, other.run_key}
    assert [state for *_, state in shards[ONE].claims()] == ["claimed"]
    assert [state for *_, state in shards[OTHER].claims()] == ["released", "claimed"]


def test_the_failures_of_a_shard_are_its_own(eventsql: EventSQLResource, shards: dict[str, Workbench]) -> None:
    bench = shards[ONE]
    for each in shards.values():
        each.publish("orders", 2, partition=0)
    for attempt in range(2):
        requests = {request.tags["eventsql/shard"]: request for request in tick(bench, ledger.sensors[0])}
        assert set(requests) == ({ONE, OTHER} if not attempt else {OTHER})
        run_id = bench.requested(ledger, requests[OTHER], dg.DagsterRunStatus.STARTED)
        bench.instance.report_run_failed(bench.stored(run_id))
        if not attempt:
            assert bench.run(ledger, requests[ONE]).success
    assert "2 runs failed from offset 0" in bench.tick(ledger.sensors[0])
    bench.publish("orders", 1, partition=0)
    assert shards_of(tick(bench, ledger.sensors[0])) == [(ONE, 0)]


def test_the_one_sensor_of_a_consumer_looks_at_all_partitions_of_all_shards(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    def publish() -> None:
        for bench in shards.values():
            for partition in (0, 1):
                bench.publish("orders", 1, partition=partition)

    def evaluate(definition: ConsumerDefinition = wide) -> list[tuple[str, int]]:
        requests = tick(shards[ONE], definition.sensors[0], eventsql=EventSQLResource(dsn=eventsql.dsn))
        for request in requests:
            assert shards[ONE].run(wide, request).success
        return shards_of(requests)

    publish()
    everything = [(ONE, 0), (ONE, 1), (OTHER, 0), (OTHER, 1)]
    assert evaluate() == everything

    few = consumer_asset(
        topic=ORDERS, consumer="wide", partitioned=True, sensor="consumer", name="wide", limits=AT_ONCE,
        ticks=TickOptions(max_requests=3),
    )(record)  # fmt: skip
    publish()
    assert len(served := evaluate(few)) == 3
    assert sorted([*served, *evaluate(few)]) == everything


def test_a_run_that_succeeded_and_is_executed_again_replays_on_its_shard(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    ids = {name: bench.publish("orders", 3, partition=0) for name, bench in shards.items()}
    requests = tick(shards[ONE], ledger.sensors[0])
    for request in requests:
        assert shards[ONE].run(ledger, request).success
    _, other = requests
    config = {"ops": {"ledger": {"config": {**other.run_config["ops"]["ledger"]["config"], "replay": True}}}}
    # A person launches a run with only the config of the earlier run.
    assert shards[ONE].run(ledger, dg.RunRequest(run_config=config)).success
    assert shards[OTHER].effects() == [*ids[OTHER], *ids[OTHER]]
    assert shards[ONE].effects() == ids[ONE]
    assert shards[OTHER].offset(ledger, 0) == ids[OTHER][-1]


def test_a_claim_without_the_name_of_its_shard_is_looked_for_on_no_shard(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    shards[ONE].publish("orders", 1, partition=0)
    tick(shards[ONE], ledger.sensors[0])
    config = {"ops": {"ledger": {"config": {"claim": 1}}}}
    assert not shards[ONE].run(ledger, dg.RunRequest(run_config=config)).success
    assert shards[ONE].effects() == []


@pytest.mark.parametrize(
    "named",
    [
        dg.RunRequest(run_config={"ops": {"ledger": {"config": {"shard": OTHER}}}}),
        dg.RunRequest(tags={"eventsql/shard": OTHER}),
    ],
    ids=["by its config", "by its tag"],
)
def test_a_run_launched_by_hand_consumes_the_waiting_events_of_every_shard_or_of_the_named_shard(
    eventsql: EventSQLResource, shards: dict[str, Workbench], metadata: Metadata, named: dg.RunRequest
) -> None:
    ids = {name: bench.publish("orders", 2) for name, bench in shards.items()}
    assert shards[ONE].run(ledger, named).success
    assert (shards[ONE].effects(), sorted(shards[OTHER].effects())) == ([], ids[OTHER])
    ids[OTHER] += shards[OTHER].publish("orders", 1)
    result = shards[ONE].run(ledger)
    assert result.success
    for name, bench in shards.items():
        assert sorted(bench.effects()) == ids[name]
    assert {each["shard"] for each in metadata(result, ledger.key)["ranges"]} == {ONE, OTHER}


def test_a_run_launched_by_hand_ends_with_the_first_shard_on_which_an_event_fails(shards: dict[str, Workbench]) -> None:
    def fail(events: Any, connection: Any) -> None:
        raise ValueError("no")

    definition = consumer_asset(topic=ORDERS, consumer="ledger", partitioned=True, name="ledger", limits=AT_ONCE)(fail)
    for bench in shards.values():
        bench.publish("orders", 1, partition=0)
    assert not shards[ONE].run(definition).success
    states = [state for bench in shards.values() for state in bench.platform.registry.consumer("orders", "ledger")]
    assert sum(state.attempts for state in states) == 1


def test_a_run_goes_on_with_the_claims_of_its_first_attempt_on_every_shard(shards: dict[str, Workbench]) -> None:
    cut = iter([True, True])

    def unlucky(events: Any, connection: Any) -> None:
        record(events, connection)
        if next(cut, False):
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    definition = consumer_asset(
        topic=ORDERS, consumer="ledger", partitioned=True, name="ledger", limits=AT_ONCE,
        options=AssetOptions(retry_policy=dg.RetryPolicy()),
    )(unlucky)  # fmt: skip
    ids = {name: bench.publish("orders", 2, partition=0) for name, bench in shards.items()}
    assert shards[ONE].run(definition).success
    for name, bench in shards.items():
        assert bench.effects() == ids[name]


def test_consumers_that_share_runs_have_one_at_a_time_on_each_shard(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    bench = shards[ONE]
    both = share_runs(
        "consume_together",
        [
            consumer_asset(topic=ORDERS, consumer=name, name=name, partitioned=True, limits=AT_ONCE)(record)
            for name in ("first", "second")
        ],
    )
    for definition in both:
        definition.register(eventsql.platform)
    job = bench.job(*both)
    ids = {name: each.publish("orders", 2, partition=1) for name, each in shards.items()}
    one, other = tick(bench, both[0].sensors[0])
    assert shards_of([one, other]) == [(ONE, 1), (OTHER, 1)]

    # A run consumes the events that wait for all consumers on its shard, and no events of the other shard. A person
    # may launch the config without the tags.
    assert bench.execute(job, dg.RunRequest(run_config=other.run_config)).success
    assert shards[OTHER].effects() == [*ids[OTHER], *ids[OTHER]]
    assert shards[ONE].effects() == []

    # While a run is under way on a shard, the other shard has its own run.
    run = bench.instance.create_run_for_job(
        job, run_config=one.run_config, tags=dict(one.tags), status=dg.DagsterRunStatus.STARTED
    )
    shards[ONE].platform.claims.adopt(int(one.tags[".dagster/eventsql_claim"]), owner=f"run {run.run_id}")
    for each in shards.values():
        each.publish("orders", 1, partition=0)
    assert shards_of(tick(bench, both[0].sensors[0])) == [(OTHER, 0)]


def test_a_range_asset_is_given_a_claim_that_names_its_shard_and_commits_it_there(
    eventsql: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    named: list[tuple[str | None, str, str | None]] = []

    def commit(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> None:
        origin = replace(Origin.of(context), shard=claim.shard)
        named.append((claim.shard, origin.writer("sums", claim=claim.id), origin.metadata().get(SHARD)))
        shard = eventsql.shard(claim.shard)
        with shard.database.transaction() as connection:
            shard.claims.check(connection, claim)
            record(shard.reader.read("orders", after=claim.position, upto=claim.range.upto), connection)
            shard.claims.commit(connection, claim)

    whole = range_asset(topic=ORDERS, consumer="whole", name="whole", limits=AT_ONCE, options=AssetOptions(kinds=()))(
        commit
    )
    whole.register(eventsql.platform)
    ids = {name: bench.publish("orders", 2) for name, bench in shards.items()}
    for request in tick(shards[ONE], whole.sensors[0]):
        assert shards[ONE].run(whole, request).success
    for name, bench in shards.items():
        assert bench.effects() == ids[name]
        assert bench.offset(whole) == ids[name][-1]
    # A run that goes from one shard to the other also names the shard.
    for bench in shards.values():
        bench.publish("orders", 1)
    assert shards[ONE].run(whole).success
    assert [shard for shard, *_ in named] == [ONE, OTHER, ONE, OTHER]
    writers = [writer for _, writer, _ in named]
    assert len(set(writers)) == 4, "ids of claims come again on each shard"
    read = [Writer.read(writer) for writer in writers]
    assert [(each.claim, each.shard) for each in read] == [(1, ONE), (1, OTHER), (2, ONE), (2, OTHER)]
    assert [told for *_, told in named] == [ONE, OTHER, ONE, OTHER]


# A shard that is down


def test_a_shard_that_is_down_keeps_no_other_from_being_consumed(
    with_one_down: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    bench = shards[ONE]
    sensor = ledger.sensors[0]
    skipped = bench.tick(sensor, eventsql=with_one_down)
    assert skipped.startswith("shard-1: ")
    assert "; shard-2: it is down: " in skipped
    ids = bench.publish("orders", 3, partition=0)
    (request,) = tick(bench, sensor, eventsql=with_one_down)
    job = bench.job(ledger, eventsql=with_one_down)
    assert bench.execute(job, request).success
    # A run that a person launches skips the shard, too.
    ids += bench.publish("orders", 1, partition=0)
    result = bench.execute(job)
    (told,) = result.asset_materializations_for_node("ledger")
    assert "shard-2" in str(told.metadata["note"].value)
    assert bench.effects() == ids
    named = dg.RunRequest(run_config={"ops": {"ledger": {"config": {"shard": OTHER}}}})
    assert not bench.execute(job, named).success


def test_a_run_launched_by_hand_tells_every_reason_why_it_leaves_events(
    with_one_down: EventSQLResource, shards: dict[str, Workbench]
) -> None:
    bench = shards[ONE]
    for partition in (0, 1):
        bench.publish("orders", 1, partition=partition)
        bench.platform.claims.claim("orders", "ledger", partition, owner=f"owner-{partition}")
    result = bench.execute(bench.job(ledger, eventsql=with_one_down))
    (told,) = result.asset_materializations_for_node("ledger")
    note = str(told.metadata["note"].value)
    assert [reason in note for reason in ("owner-0 leases", "owner-1 leases", "left on shard-2")] == [True] * 3


def test_a_tick_fails_if_no_shard_can_be_reached(eventsql: EventSQLResource, shards: dict[str, Workbench]) -> None:
    nothing = EventSQLResource(dsn=f"{NOWHERE} {NOWHERE}2")
    with pytest.raises(DatabaseUnavailableError):
        shards[ONE].tick(ledger.sensors[0], eventsql=nothing)


def test_a_tick_fails_if_the_databases_are_not_the_shards_of_one_set(
    eventsql: EventSQLResource, shards: dict[str, Workbench], dsn: str
) -> None:
    stranger = EventSQLResource(dsn=f"{shards[ONE].platform.database.dsn} {dsn}")
    with pytest.raises(ShardSetError):
        shards[ONE].tick(ledger.sensors[0], eventsql=stranger)
