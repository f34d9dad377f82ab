"""How consumers and topics look as assets: keys, groups, kinds, columns, conditions, and a translator over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    ConsumerDefinition,
    EventSQLAssetProps,
    EventSQLIOManager,
    EventSQLResource,
    EventSQLTranslator,
    build_backfill,
    build_definitions,
    consumer_asset,
    range_asset,
    share_runs,
    topic_asset,
    topic_key,
)
from eventsql_orchestration.dagster.backfills.job import DagsterJob
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from tests.dagster.conftest import Metadata, Workbench
from tests.dagster.location import AT_ONCE, record

ORDERS = Topic("orders", 2)
RESOURCE = EventSQLResource(dsn="postgresql://nowhere")


class Shop(EventSQLTranslator):
    """Puts consumers below `shop`, in the group of their topic, and gives topics an owner."""

    def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
        spec = super().get_asset_spec(props)
        if props.consumer is None:
            return spec.replace_attributes(owners=["team:platform"])
        return spec.replace_attributes(key=spec.key.with_prefix("shop"), group_name=props.topic)


def ledger(name: str = "ledger", **options: Any) -> ConsumerDefinition:
    decorate = consumer_asset(
        topic=ORDERS, consumer=name, name=name, limits=AT_ONCE, options=AssetOptions(**options), sensor="consumer"
    )

    def consume(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)

    return decorate(consume)


def sums(translator: EventSQLTranslator | None) -> ConsumerDefinition:
    @range_asset(topic=ORDERS, consumer="sums", publishes=Topic("totals"), options=AssetOptions(translator=translator))
    def sum_orders(claim: Claim) -> None: ...

    return sum_orders


def test_a_consumer_under_a_prefix_consumes_and_shows_the_number_of_its_events(
    bench: Workbench, metadata: Metadata
) -> None:
    definition = ledger(key_prefix="finance")
    definition.register(bench.platform)
    ids = bench.publish("orders", 3)
    request = bench.request(definition)
    result = bench.run(definition, request)
    assert bench.effects() == ids
    shown = metadata(result, dg.AssetKey(["finance", "ledger"]))
    assert shown["dagster/row_count"] == 3
    # The plot of the lag, which the UI shows first, has no gap at a materialization.
    assert [name for name in sorted(shown) if isinstance(shown[name], int | float)][:2] == ["Lag events", "Lag seconds"]
    assert shown["Lag events"] == 0


def test_assets_behind_a_consumer_are_out_of_date_after_each_of_its_runs_whatever_its_code_version(
    bench: Workbench,
) -> None:
    definition = ledger(code_version="1")
    definition.register(bench.platform)
    backfill = build_backfill(definition)

    @dg.asset(deps=[definition.key], code_version="1")
    def report() -> None: ...

    location = dg.Definitions(
        assets=[definition.asset, backfill.asset, report],
        jobs=[definition.job, *backfill.jobs],
        resources={"eventsql": bench.eventsql},
    )

    def execute(name: str, **options: Any) -> StaleStatus:
        """Execute a job, and say whether the report is out of date."""
        assert location.resolve_job_def(name).execute_in_process(instance=bench.instance, **options).success
        graph = location.get_repository_def().asset_graph
        resolver = CachingStaleStatusResolver(bench.instance, graph, LoadingContextForTest(bench.instance))
        return resolver.get_status(report.key)

    def make_report() -> StaleStatus:
        dg.materialize([report], instance=bench.instance)
        return execute("plan_ledger_backfill")

    for consume in ("consume_ledger", "consume_ledger", "backfill_ledger", "backfill_ledger"):
        bench.publish("orders", 3)
        assert make_report() == StaleStatus.FRESH
        window = bench.instance.get_dynamic_partitions("ledger_backfill")[-1]
        options = {"partition_key": window} if consume == "backfill_ledger" else {}
        assert execute(consume, **options) == StaleStatus.STALE


def test_a_consumer_may_name_the_version_of_its_data(bench: Workbench) -> None:
    @consumer_asset(topic=ORDERS, consumer="versions", limits=AT_ONCE, sensor="consumer")
    def versions(context: dg.AssetExecutionContext, events: Sequence[Event], connection: Connection) -> None:
        context.set_data_version(context.asset_key, dg.DataVersion(f"up to {events[-1].id}"))

    versions.register(bench.platform)
    (*_, last) = bench.publish("orders", 3)
    assert bench.run(versions).success
    event = bench.instance.get_latest_materialization_event(versions.key)
    assert event is not None
    assert event.asset_materialization is not None
    assert (event.asset_materialization.tags or {})["dagster/data_version"] == f"up to {last}"


def test_consumers_under_a_prefix_share_runs_and_are_backfilled(bench: Workbench) -> None:
    shared = share_runs("both", [ledger("one", key_prefix="finance"), ledger("other", key_prefix="finance")])
    for each in shared:
        each.register(bench.platform)
    ids = bench.publish("orders", 3)
    request = bench.request(shared[0])
    location = build_definitions(shared, eventsql=bench.eventsql, backfills=True)
    assert bench.execute(location.resolve_job_def("both"), request).success
    assert bench.effects() == ids * 2
    assert {"backfill_one", "backfill_other"} <= set(location.get_repository_def().job_names)


def test_backfills_of_one_name_under_two_prefixes_have_assets_and_windows_of_their_own(bench: Workbench) -> None:
    finance, shop = (build_backfill(ledger(key_prefix=prefix)) for prefix in ("finance", "shop"))
    assert shop.asset.key == dg.AssetKey(["shop", "ledger_backfill"])
    finance.consumer.register(bench.platform)
    ids = bench.publish("orders", 3)
    location = dg.Definitions(assets=[finance.asset], jobs=finance.jobs, resources={"eventsql": bench.eventsql})
    location.resolve_job_def("plan_ledger_backfill").execute_in_process(instance=bench.instance)
    # The names of dynamic partitions belong to the whole instance.
    windows, others = (bench.instance.get_dynamic_partitions(str(each.partitions.name)) for each in (finance, shop))
    assert (len(windows), others) == (1, [])

    job = DagsterJob("backfill_ledger", (), str(finance.partitions.name), "orders/ledger", "")
    run = location.resolve_job_def(job.name).execute_in_process
    assert run(instance=bench.instance, partition_key=windows[0], run_config=job.config(max_failures=3)).success
    assert bench.effects() == ids


def test_a_translator_changes_consumers_and_topics_after_all_other_options() -> None:
    definition = sums(Shop())
    graph = build_definitions([definition], eventsql=RESOURCE, translator=Shop()).resolve_asset_graph()
    consumer = graph.get(dg.AssetKey(["shop", "sum_orders"]))
    assert consumer.group_name == "orders"
    assert consumer.parent_keys == {topic_key("orders")}
    assert graph.get(topic_key("totals")).parent_keys == {consumer.key}
    assert {*graph.get(topic_key("totals")).owners, *graph.get(topic_key("orders")).owners} == {"team:platform"}
    assert {key.asset_key for key in graph.asset_check_keys} == {consumer.key}


class Renames(EventSQLTranslator):
    def get_asset_spec(self, props: EventSQLAssetProps) -> dg.AssetSpec:
        return props.spec.replace_attributes(key="another") if props.consumer is None else props.spec


class Forgets(EventSQLTranslator):
    def get_asset_spec(self, props: EventSQLAssetProps) -> Any: ...


def test_a_translator_that_loses_an_asset_or_renames_a_topic_is_refused() -> None:
    for definition in (lambda: topic_asset(ORDERS, translator=Renames()), lambda: sums(Renames())):
        with pytest.raises(ValidationError):
            definition()
    with pytest.raises(ValidationError):
        ledger(translator=Forgets())


# The graph


def test_topics_have_a_kind_and_a_group_of_their_own() -> None:
    graph = build_definitions([sums(None)], eventsql=RESOURCE).resolve_asset_graph()
    topics = [graph.get(topic_key(name)) for name in ("orders", "orders_dlt", "totals")]
    assert {(topic.group_name, frozenset(topic.kinds)) for topic in topics} == {
        ("topics", frozenset({"topic", "postgresql"}))
    }
    assert not {"topic", "postgresql"} & graph.get(dg.AssetKey("sum_orders")).kinds


@pytest.mark.parametrize("name", ["orders", "totals"])
def test_a_consumer_with_the_label_of_a_topic_is_refused(name: str) -> None:
    @range_asset(topic=ORDERS, consumer="sums", publishes=Topic("totals"), name=name)
    def sum_orders(claim: Claim) -> None: ...

    with pytest.raises(ValidationError):
        build_definitions([sum_orders], eventsql=RESOURCE)


def test_backfills_are_a_group_of_the_graph() -> None:
    backfill = build_backfill(ledger())
    assert {spec.group_name for spec in backfill.asset.specs} == {"backfills"}


def test_an_asset_of_the_io_manager_has_an_edge_to_its_topic() -> None:
    @dg.asset(metadata={"topic": "orders"}, io_manager_key="topics")
    def placed_orders() -> list[dict[str, object]]:
        return []

    location = build_definitions(
        [ledger()],
        eventsql=RESOURCE,
        assets=[placed_orders],
        resources={"topics": EventSQLIOManager(eventsql=RESOURCE)},
    )
    graph = location.resolve_asset_graph()
    assert graph.get(topic_key("orders")).parent_keys == {placed_orders.key}
    assert graph.get(dg.AssetKey("ledger")).parent_keys == {topic_key("orders")}


def test_a_subclass_of_the_io_manager_may_find_topics_by_its_own_keys(bench: Workbench) -> None:
    class Topics(EventSQLIOManager):
        def topic_of(self, key: dg.AssetKey) -> str | None:
            return key.path[-1].removesuffix("_published")

    @dg.asset(io_manager_key="topics")
    def orders_published() -> list[dict[str, object]]:
        return [{"value": b"1"}]

    bench.platform.registry.register_topic(ORDERS)
    manager = Topics(eventsql=bench.eventsql)
    assert dg.materialize([orders_published], resources={"topics": manager}, instance=bench.instance).success
    assert [event.value for event in bench.platform.reader.read("orders")] == [b"1"]
