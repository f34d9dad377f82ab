"""Lineage: events name their run, materializations name events, and topics are assets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import dagster as dg
import psycopg
import pytest

from eventsql_orchestration import Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLIOManager,
    EventSQLResource,
    RangeLimits,
    consumer_asset,
    publish_events,
    range_asset,
    topic_asset,
    topic_key,
    topic_observations,
)
from eventsql_orchestration.dagster.lineage.origin import Origin, input_metadata
from eventsql_orchestration.dagster.local.instance import STORAGE_SCHEMA
from eventsql_orchestration.dagster.trace.runs import StoredRuns
from eventsql_orchestration.errors import ClaimLostError, DatabaseError
from eventsql_orchestration.orchestration.errors import LocalDagsterError
from eventsql_orchestration.orchestration.trace.runs import RunInput
from eventsql_orchestration.orchestration.trace.tracer import COPIES, Tracer
from eventsql_orchestration.publishing.transfer import Transfer
from tests.dagster.conftest import Metadata, Workbench, registering
from tests.dagster.location import AT_ONCE

RIDES = Topic("rides")

pytestmark = pytest.mark.prepared.with_args(registering(RIDES, Topic("sums")))


def size(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
    """Publishes the size of a range."""
    return publish_events(context, [{"value": str(claim.events)}], eventsql=eventsql, topic="sums", claim=claim)


def sizes(**limits: Any) -> ConsumerDefinition:
    return range_asset(
        topic=RIDES, consumer="sizes", publishes="sums", name="sizes", options=AssetOptions(kinds=()),
        limits=RangeLimits(**{"max_wait": 0.0, "drain_seconds": 0.0, **limits}),
    )(size)  # fmt: skip


# Events and their runs


def test_an_event_leads_to_the_one_range_that_it_was_made_from(bench: Workbench, metadata: Metadata) -> None:
    definition = sizes(max_events=10, drain_seconds=60.0, drain_idle=0.0)
    definition.register(bench.platform)
    ids = bench.publish("rides", 25)
    result = bench.run(definition)

    tracer = Tracer(bench.platform, {"Dagster": StoredRuns(bench.instance)})
    published = bench.platform.reader.read("sums")
    assert [event.value for event in published] == [b"10", b"10", b"5"]
    assert metadata(result, topic_key("sums"))["published events"] == 3
    ranges = []
    for event in published:
        origin = tracer.trace("sums", event.id)
        assert (origin.run_id, origin.asset) == (result.run_id, "sizes")
        (read,) = origin.inputs
        ranges.append((read.range.after, read.range.upto))
    assert ranges == [(0, ids[9]), (ids[9], ids[19]), (ids[19], ids[24])]


def test_a_run_says_which_events_it_published_and_which_it_read(bench: Workbench, metadata: Metadata) -> None:
    definition = sizes()
    definition.register(bench.platform)
    ids = bench.publish("rides", 3)
    result = bench.run(definition)
    (event,) = bench.platform.reader.read("sums")
    assert metadata(result, topic_key("sums")) == {
        "published topic": "sums",
        "published events": 1,
        "dagster/row_count": 1,
        "published first offset": event.id,
        "published last offset": event.id,
        "published by run": result.run_id,
        "published by asset": "sizes",
        "published to": topic_key("sums"),
        "trace published": f"eventsql trace sums {event.id}",
    }
    of_consumer = metadata(result, definition.key)
    assert (of_consumer["topic"], of_consumer["consumer"]) == ("rides", "sizes")
    assert [(each["after"], each["upto"]) for each in of_consumer["ranges"]] == [(0, ids[-1])]
    assert of_consumer["input"] == topic_key("rides")
    assert of_consumer["trace"] == f"eventsql trace rides {ids[-1]}"


def test_an_event_published_beside_effects_leads_to_the_claim(bench: Workbench) -> None:
    bench.platform.registry.register_topic(Topic("echoes"))

    def echo(events: Any, connection: Any, context: dg.AssetExecutionContext, eventsql: EventSQLResource) -> None:
        origin = Origin.of(context).metadata()
        echoes = [Publication("echoes", event.value, metadata=origin) for event in events]
        eventsql.platform.publisher.publish_all(echoes, connection=connection)

    definition = consumer_asset(topic=RIDES, consumer="echo", limits=AT_ONCE)(echo)
    definition.register(bench.platform)
    ids = bench.publish("rides", 3)
    assert bench.run(definition).success
    bench.platform.transfer.run_once()
    (read,) = Tracer(bench.platform).trace("echoes", 1).inputs
    assert (read.range.topic, read.range.consumer, read.range.upto) == ("rides", "echo", ids[-1])


def test_a_publication_succeeds_without_its_offsets_if_its_events_cannot_be_transferred(
    bench: Workbench, metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset
    def fares(context, eventsql: EventSQLResource) -> dg.MaterializeResult[Any]:  # type: ignore[no-untyped-def]  # as below
        return dg.MaterializeResult(metadata=publish_events(context, [{"value": "v"}], eventsql=eventsql, topic="sums"))

    def stuck(*_: object, **__: object) -> None:
        raise DatabaseError("an event of somebody else cannot be moved")

    with monkeypatch.context() as patched:
        patched.setattr(Transfer, "run_once", stuck)
        result = dg.materialize([fares], instance=bench.instance, resources={"eventsql": bench.eventsql})
    assert metadata(result, dg.AssetKey("fares"))["published events"] == 1
    bench.platform.transfer.run_once()
    assert bench.platform.reader.count("sums") == 1


def test_a_range_of_partitions_is_named_by_its_ends(bench: Workbench) -> None:
    days = dg.StaticPartitionsDefinition(["a", "b", "c"])

    @dg.asset(partitions_def=days)
    def daily(context, eventsql: EventSQLResource) -> None:  # type: ignore[no-untyped-def]  # Dagster's own default
        publish_events(context, [{"value": "v"}], eventsql=eventsql, topic="sums")

    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "c"}
    result = dg.materialize([daily], instance=bench.instance, resources={"eventsql": bench.eventsql}, tags=tags)
    assert dict(bench.platform.reader.read("sums")[0].metadata) == {
        "dagster_run_id": result.run_id,
        "dagster_asset_key": "daily",
        "dagster_partition": "a...c",
    }


def test_a_range_over_two_dimensions_is_published_and_named_by_its_ends(bench: Workbench) -> None:
    days = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
    shops = dg.StaticPartitionsDefinition(["a", "b"])

    @dg.asset(
        partitions_def=dg.MultiPartitionsDefinition({"day": days, "shop": shops}),
        metadata={"topic": "sums"},
        io_manager_key="topics",
    )
    def sums():  # type: ignore[no-untyped-def]  # Dagster's own default
        return [{"value": "v"}]

    # As `dagster asset materialize --partition-range` does.
    first, last = "2026-01-01|a", "2026-01-02|b"
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    resources = {"topics": EventSQLIOManager(eventsql=bench.eventsql)}
    assert dg.materialize([sums], instance=bench.instance, resources=resources, tags=tags).success
    (event,) = bench.platform.reader.read("sums")
    assert event.metadata["dagster_partition"] == f"{first}...{last}"


def test_an_asset_that_is_a_topic_itself_is_named(bench: Workbench) -> None:
    @dg.asset(key=topic_key("sums"))
    def sums(context, eventsql: EventSQLResource) -> None:  # type: ignore[no-untyped-def]  # Dagster's own default
        publish_events(context, [{"value": "v"}], eventsql=eventsql, topic="sums")

    dg.materialize([sums], instance=bench.instance, resources={"eventsql": bench.eventsql})
    assert bench.platform.reader.read("sums")[0].metadata["dagster_asset_key"] == "topic/sums"


def test_each_op_of_a_run_publishes_separately_also_for_each_mapping_key(bench: Workbench) -> None:
    def publishing(name: str) -> dg.OpDefinition:
        @dg.op(name=name)
        def op(context, key: str) -> str:  # type: ignore[no-untyped-def]  # Dagster's own default
            publish_events(context, [{"value": f"{name} {key}"}], eventsql=bench.eventsql, topic="sums")
            return key

        return op

    @dg.op(out=dg.DynamicOut(str))
    def keys():  # type: ignore[no-untyped-def]  # Dagster would check it
        for key in ("a", "b"):
            yield dg.DynamicOutput(key, mapping_key=key)

    first, second = publishing("first"), publishing("second")

    @dg.job
    def job() -> None:
        keys().map(lambda key: second(first(key)))

    assert job.execute_in_process(instance=bench.instance).success
    bench.platform.transfer.run_once()
    values = sorted(event.value for event in bench.platform.reader.read("sums"))
    assert values == [b"first a", b"first b", b"second a", b"second b"]


def test_each_op_of_a_graph_asset_publishes_separately(bench: Workbench) -> None:
    @dg.op
    def first(context) -> int:  # type: ignore[no-untyped-def]  # Dagster's own default
        publish_events(context, [{"value": "first"}], eventsql=bench.eventsql, topic="sums")
        return 1

    @dg.op
    def second(context, before: int) -> int:  # type: ignore[no-untyped-def]  # Dagster's own default
        publish_events(context, [{"value": "second"}], eventsql=bench.eventsql, topic="sums")
        return before

    @dg.graph_asset
    def both():  # type: ignore[no-untyped-def]  # Dagster would check it
        return second(first())

    assert dg.materialize([both], instance=bench.instance).success
    assert [event.value for event in bench.platform.reader.read("sums")] == [b"first", b"second"]


@pytest.mark.parametrize("offset", ["1", "9" * 5_000])
def test_an_event_that_claims_to_be_its_own_copy_is_followed_once(bench: Workbench, offset: str) -> None:
    metadata = {"dlt_topic": "sums", "dlt_offset": offset}
    bench.platform.publisher.publish(Publication("sums", b"", metadata=metadata))
    bench.platform.transfer.run_once()
    origin = Tracer(bench.platform).trace("sums", 1)
    notes = ("says that it is a copy of event 1 of topic sums, which is shown above",) if offset == "1" else ()
    assert (origin.original, origin.notes) == (None, notes)


def test_chains_of_copies_end(bench: Workbench) -> None:
    bench.platform.publisher.publish_all(
        Publication("sums", b"", metadata={"dlt_topic": "sums", "dlt_offset": str(number - 1)})
        for number in range(1, 1_001)
    )
    bench.platform.transfer.run_once()
    origin, copies = Tracer(bench.platform).trace("sums", 1_000), 0
    while origin.original is not None:
        origin, copies = origin.original, copies + 1
    assert copies == COPIES
    assert origin.notes[0].endswith("which is not followed any further")


@pytest.mark.parametrize(
    "said", [{"partition": "x"}, {"partition": [1]}, {"partition": None}, {"after": True}, {"upto": "5"}]
)
def test_ranges_in_metadata_of_others_are_ignored(bench: Workbench, said: dict[str, Any]) -> None:
    @dg.asset
    def other() -> Any:
        ranges = [{"after": 0, "upto": 5, **said}, {"after": 5, "upto": 6, "claim": {}}]
        return dg.MaterializeResult(metadata={"topic": "sums", "ranges": dg.MetadataValue.json(ranges)})

    run_id = dg.materialize([other], instance=bench.instance).run_id
    facts = StoredRuns(bench.instance).run(run_id)
    assert facts is not None
    assert facts.inputs == (RunInput("sums", -1, 5, 6),)


def test_an_error_of_dagsters_storage_is_one_line_without_postgresqls_pointer(
    stored: dg.DagsterInstance, dsn: str
) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(f"ALTER TABLE {STORAGE_SCHEMA}.runs RENAME run_body TO lost")
    with pytest.raises(LocalDagsterError) as failed:
        StoredRuns(stored).run("1")
    assert "LINE" in failed.value.message
    assert not {"\n", "^"} & set(failed.value.message)


def test_publishers_are_told_apart_by_asset_output_partition_topic_and_first_run() -> None:
    origin = Origin("again", "first", "a", "monday")
    writers = {
        origin.writer("t"),
        Origin("other", "first", "a", "monday").writer("t"),
        origin.writer("u"),
        origin.writer("t", output="o"),
        origin.writer("t", claim=7),
        Origin("again", "first", "b", "monday").writer("t"),
        Origin("again", "first", "a", "tuesday").writer("t"),
        Origin("again", "again", "a", "monday").writer("t"),
    }
    assert len(writers) == 7, "a run and the run that repeats it are the same"


def test_a_claim_that_was_lost_publishes_nothing(bench: Workbench) -> None:
    definition = sizes()
    definition.register(bench.platform)
    bench.publish("rides", 3)
    claim = bench.platform.claims.claim("rides", "sizes", owner="first")
    assert isinstance(claim, Claim)
    bench.platform.claims.release(claim)

    @dg.op
    def late(context, eventsql: EventSQLResource) -> None:  # type: ignore[no-untyped-def]  # Dagster's own default
        publish_events(context, [{"value": "v"}], eventsql=eventsql, topic="sums", claim=claim)

    @dg.job(resource_defs={"eventsql": bench.eventsql})
    def job() -> None:
        late()

    with pytest.raises(ClaimLostError):
        job.execute_in_process(instance=bench.instance)
    bench.platform.transfer.run_once()
    assert bench.platform.reader.count("sums") == 0


def test_the_last_event_that_was_read_is_the_one_to_trace() -> None:
    def read(shard: str, partition: int, after: int, upto: int) -> dict[str, Any]:
        return {"shard": shard, "partition": partition, "after": after, "upto": upto}

    empty, first, last = read("a", 0, 9, 9), read("a", 1, 4, 5), read("b", 2, 3, 8)
    of_several = input_metadata("rides", [last, first, empty])
    assert of_several["trace"].value == "eventsql --shard b trace rides 8"
    assert "shard" not in of_several
    of_one = input_metadata("rides", [first, empty])
    assert (of_one["trace"].value, of_one["shard"].value) == ("eventsql --shard a trace rides 5", "a")
    assert set(input_metadata("rides", [{"partition": -1, "after": 4, "upto": 4}])) == {"topic", "input", "ranges"}


# Topics as assets


def test_a_topic_asset_has_owners_columns_and_freshness() -> None:
    spec = topic_asset(
        RIDES,
        owners=["team:rides", "a@b.com"],
        kinds=["json"],
        columns={"order_id": "string", "price_cents": "bigint"},
        freshness=timedelta(hours=1),
        deps=["web"],
    )
    assert (spec.key, spec.group_name) == (dg.AssetKey(["topic", "rides"]), "topics")
    assert spec.metadata["partitions"] == "not partitioned"
    assert topic_asset(Topic("halves", 2)).metadata["partitions"] == 2
    assert spec.owners == ["team:rides", "a@b.com"]
    assert spec.kinds == {"topic", "postgresql", "json"}
    schema = spec.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    assert [(column.name, column.type) for column in schema.columns] == [
        ("order_id", "string"),
        ("price_cents", "bigint"),
    ]
    assert spec.freshness_policy == dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=1))
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("web")]


def test_columns_and_freshness_may_be_given_in_dagsters_own_types() -> None:
    columns = dg.TableSchema([dg.TableColumn("a", "int", description="An A.")])
    policy = dg.FreshnessPolicy.cron(deadline_cron="0 9 * * *", lower_bound_delta=timedelta(hours=1))
    assert topic_asset(RIDES, columns=columns, freshness=policy).freshness_policy == policy
    assert topic_asset(RIDES, columns=columns).metadata["dagster/column_schema"] == columns
    assert topic_asset(RIDES, columns=columns.columns).metadata["dagster/column_schema"] == columns
    plain = topic_asset(RIDES)
    assert plain.freshness_policy is None
    assert "dagster/column_schema" not in plain.metadata


# Events of external topics


def test_new_events_of_a_topic_are_reported_once_with_their_offsets(bench: Workbench) -> None:
    first = topic_observations(bench.platform, [RIDES, "sums"], seen={})
    assert (first.materializations, first.seen) == ((), {"rides": 0, "sums": 0})

    ids = bench.publish("rides", 3)
    news = topic_observations(bench.platform, [RIDES, "sums"], seen=first.seen)
    (told,) = news.materializations
    assert told.asset_key == topic_key("rides")
    assert {name: value.value for name, value in told.metadata.items()} == {
        "published topic": "rides",
        "published events": 3,
        "published first offset": ids[0],
        "published last offset": ids[-1],
        "trace published": f"eventsql trace rides {ids[-1]}",
    }
    assert topic_observations(bench.platform, [RIDES, "sums"], seen=news.seen).materializations == ()


def test_a_missing_topic_does_not_hide_the_others_and_is_reported_once_it_has_events(bench: Workbench) -> None:
    ids = bench.publish("rides", 1)
    news = topic_observations(bench.platform, ["nowhere", "rides"], seen={"rides": 0, "nowhere": 5})
    assert news.seen == {"rides": ids[-1], "nowhere": 0}
    assert len(news.materializations) == len(news.missing) == 1
    assert "nowhere" in news.missing[0]

    bench.platform.registry.register_topic(Topic("nowhere"))
    bench.publish("nowhere", 2)
    (arrival,) = topic_observations(bench.platform, ["nowhere"], seen=news.seen).materializations
    assert arrival.metadata["published events"].value == 2


def test_a_topic_that_was_deleted_and_created_again_is_reported_from_its_beginning(bench: Workbench) -> None:
    ids = bench.publish("rides", 2)
    news = topic_observations(bench.platform, [RIDES], seen={"rides": 1_000})
    assert (news.seen, len(news.materializations)) == ({"rides": ids[-1]}, 1)


def test_reported_arrivals_make_a_topic_fresh(bench: Workbench) -> None:
    bench.publish("rides", 1)
    for told in topic_observations(bench.platform, [RIDES], seen={"rides": 0}).materializations:
        bench.instance.report_runless_asset_event(told)
    found = bench.instance.get_latest_materialization_event(topic_key("rides"))
    assert found is not None, "the one thing that a freshness policy looks at"
