"""What the builders define, and what they refuse."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import dagster as dg
import pytest

from eventsql_orchestration import Consumer, Event, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    SPARK_POOL,
    AssetOptions,
    ConsumerDefinition,
    EventSQLResource,
    EventSQLTranslator,
    RunLimits,
    TickOptions,
    WorkerDefinition,
    build_alert_sensor,
    build_backfill,
    build_definitions,
    build_housekeeping_schedule,
    build_lag_check,
    build_lag_sensor,
    build_queue_sensor,
    build_register_job,
    build_transfer_schedule,
    consumer_asset,
    queue_asset,
    range_asset,
    share_runs,
    store_asset,
    subscription_asset,
    table_asset,
    topic_asset,
    topic_key,
    worker_asset,
)
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import InvalidNameError, ValidationError
from eventsql_orchestration.orchestration import limits
from tests.dagster.conftest import NOWHERE

TOPIC = Topic("rides", 3)


def consume(events: Sequence[Event], connection: Connection) -> None:
    """Consume rides."""


def work(messages: object, connection: object) -> None:
    """Handle messages."""


def consume_range(context: dg.AssetExecutionContext, claim: Claim) -> None:
    """Consume a range of rides."""


def test_two_assets_that_publish_to_one_topic_are_refused() -> None:
    def publishing(name: str) -> ConsumerDefinition:
        return range_asset(topic=TOPIC, consumer=name, name=name, publishes=Topic("fares"))(consume_range)

    def working(name: str) -> WorkerDefinition:
        return worker_asset(queue=f"{name}_queue", name=name, publishes=Topic("fares"))(work)

    for consumers, workers in (
        ([publishing("one"), publishing("other")], []),
        ([publishing("one")], [working("other")]),
        ([], [working("one"), working("other")]),
    ):
        with pytest.raises(ValidationError):
            build_definitions(consumers, workers=workers)

    one = consumer_asset(topic=TOPIC, consumer="one", name="one")(consume)
    fares = topic_asset(Topic("fares"), deps=[one.key, "other"])
    build_definitions([one], topics=[Topic("fares")], assets=[fares]).resolve_asset_graph()


def test_nothing_connects_when_a_location_is_defined_or_loaded() -> None:
    definition = consumer_asset(topic=TOPIC, consumer="c", partitioned=True)(consume)
    location = dg.Definitions(
        assets=[topic_asset(TOPIC), definition.asset],
        asset_checks=[build_lag_check(definition, max_events=10).definition],
        jobs=[definition.job],
        sensors=[*definition.sensors, build_lag_sensor([definition])],
        schedules=[build_transfer_schedule(), build_housekeeping_schedule()],
        resources={"eventsql": EventSQLResource(dsn=NOWHERE)},
    )
    repository = location.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == {
        "consume_consume_0",
        "consume_consume_1",
        "consume_consume_2",
        "lag",
    }
    assert {schedule.name for schedule in repository.schedule_defs} == {"transfer", "housekeeping"}
    assert {"consume_consume", "transfer", "housekeeping"} <= set(repository.job_names)


def test_importing_the_package_neither_loads_nor_starts_spark() -> None:
    code = "import sys, eventsql_orchestration.dagster; print('pyspark' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_consumer_is_defined_with_its_asset_job_and_a_sensor_for_each_partition() -> None:
    definition = consumer_asset(
        topic=TOPIC, consumer="billing", partitioned=True, options=AssetOptions(owners=["team:rides"])
    )(consume)
    assert definition.consumer == Consumer("rides", "billing", partitioned=True)
    assert definition.key == dg.AssetKey(["consume"])
    assert definition.job.name == "consume_consume"
    assert definition.partitions == (0, 1, 2)
    spec = definition.asset.get_asset_spec(definition.key)
    assert [dependency.asset_key for dependency in spec.deps] == [topic_key("rides")]
    assert spec.description == "Consume rides."
    assert list(spec.owners) == ["team:rides"]
    assert all(sensor.default_status == dg.DefaultSensorStatus.RUNNING for sensor in definition.sensors)


def test_a_consumer_that_is_not_partitioned_has_one_sensor() -> None:
    definition = consumer_asset(topic=TOPIC, consumer="billing", name="billing")(consume)
    assert [sensor.name for sensor in definition.sensors] == ["consume_billing"]
    assert definition.partitions == (-1,)


def test_a_consuming_job_does_not_run_the_checks_of_its_asset() -> None:
    definition = consumer_asset(topic=TOPIC, consumer="billing", name="billing")(consume)
    location = dg.Definitions(
        assets=[definition.asset],
        asset_checks=[build_lag_check(definition, max_events=1).definition],
        jobs=[definition.job],
        resources={"eventsql": EventSQLResource(dsn="postgresql://nowhere")},
    )
    assert len(list(location.resolve_job_def("consume_billing").nodes)) == 1


def test_the_topics_that_a_range_asset_publishes_to_are_assets_of_its_run() -> None:
    definition = range_asset(topic=TOPIC, consumer="sums", publishes=[Topic("sums", 2), "more"], name="summing")(
        consume_range
    )
    assert set(definition.asset.keys) == {definition.key, topic_key("sums"), topic_key("more")}
    spec = definition.asset.get_asset_spec(topic_key("sums"))
    assert [dependency.asset_key for dependency in spec.deps] == [definition.key]
    assert spec.metadata["partitions"] == 2


def test_tags_go_to_the_runs_of_a_consumer() -> None:
    tags = consumer("tagged", options=AssetOptions(tags={"team": "rides"})).job.tags or {}
    assert tags["team"] == "rides"
    assert (tags["eventsql/topic"], tags["eventsql/consumer"]) == ("rides", "c")


def test_spark_assets_and_their_backfills_are_in_the_spark_pool_and_other_assets_in_the_pool_that_they_name() -> None:
    def ranges(**options: Any) -> ConsumerDefinition:
        return range_asset(topic=TOPIC, consumer="c", name="spark", options=AssetOptions(**options))(consume_range)

    spark, replayed = ranges().asset.op, build_backfill(ranges()).asset.op
    assert spark.pool == replayed.pool == SPARK_POOL
    assert spark.tags["eventsql/pool"] == replayed.tags["eventsql/pool"] == SPARK_POOL
    assert ranges(pool="own").asset.op.pool == "own"
    assert ranges(kinds=()).asset.op.pool is None
    batches = consumer("batches").asset.op
    assert (batches.pool, "eventsql/pool" in batches.tags) == (None, False)
    assert consumer("sums", options=AssetOptions(pool=SPARK_POOL)).asset.op.pool == SPARK_POOL


def consumer(name: str, of: str = "c", **options: Any) -> ConsumerDefinition:
    return consumer_asset(topic=TOPIC, consumer=of, name=name, **options)(consume)


@pytest.mark.parametrize("build", [build_definitions, build_lag_sensor, build_register_job])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (consumer("a"), consumer("a", "d"), "two consumers are called 'a'"),
        (consumer("a"), consumer("b"), "'a' and 'b' are both consumer 'c' of topic 'rides'"),
        (consumer("a", partitioned=True), consumer("a_1", "d"), "'a' and 'a_1' both have a sensor 'consume_a_1'"),
    ],
)
def test_consumers_that_would_take_one_anothers_place_are_refused(
    build: Callable[..., object], first: ConsumerDefinition, second: ConsumerDefinition, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        build([first, second])


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_definitions(consumer("a")),  # type: ignore[arg-type]
        lambda: build_definitions([consume]),  # type: ignore[list-item]
        lambda: build_lag_sensor([consume]),  # type: ignore[list-item]
        lambda: build_definitions([], workers=[consumer("a")]),  # type: ignore[list-item]
        lambda: consumer("a", limits={"max_events": 10}),
        lambda: consumer("a", options={"group_name": "shop"}),
        lambda: consumer("a", ticks=None),
        lambda: consumer("a", max_attempts=2**31),
        lambda: consumer("a", batch=0),
        lambda: consumer("a", sensor="topic"),
        lambda: consumer_asset(topic="rides", consumer="c"),  # type: ignore[arg-type]
        lambda: range_asset(topic="rides", consumer="c"),  # type: ignore[arg-type]
        # A generator gives its items only once, and they are needed several times.
        lambda: build_definitions(each for each in [consumer("a")]),  # type: ignore[arg-type]
        lambda: build_definitions([], topics=(each for each in [TOPIC])),  # type: ignore[arg-type]
        lambda: build_definitions([], assets=(each for each in [dg.AssetSpec("a")])),  # type: ignore[arg-type]
        lambda: build_definitions([], workers=(each for each in [])),  # type: ignore[arg-type,var-annotated]
        lambda: build_register_job(each for each in [consumer("a")]),  # type: ignore[arg-type]
        lambda: build_register_job([], workers=(each for each in [])),  # type: ignore[arg-type,var-annotated]
        lambda: build_register_job([], workers=[consumer("a")]),  # type: ignore[list-item]
        lambda: build_lag_sensor(each for each in [consumer("a")]),  # type: ignore[arg-type]
        lambda: build_lag_sensor([], topics=(each for each in [TOPIC])),  # type: ignore[arg-type]
        lambda: build_queue_sensor([], checks=(each for each in [])),  # type: ignore[arg-type,var-annotated]
        lambda: range_asset(topic=TOPIC, consumer="c", options={}),  # type: ignore[arg-type]
        lambda: worker_asset(queue="mails", options={}),  # type: ignore[arg-type]
        lambda: topic_asset("rides"),  # type: ignore[arg-type]
        lambda: build_definitions([], eventsql="postgresql://host/app"),  # type: ignore[arg-type]
        lambda: build_definitions([], prepare=lambda: None),  # type: ignore[arg-type,misc]
        lambda: build_definitions([consumer("a")], lag=60),  # type: ignore[arg-type]
        lambda: build_definitions([], queue_lag=60),  # type: ignore[arg-type]
        lambda: build_definitions([], sample=None),  # type: ignore[arg-type]
        lambda: build_definitions([], history=timedelta(days=1)),  # type: ignore[arg-type]
        lambda: build_definitions([], topics=["rides"]),  # type: ignore[list-item]
        lambda: build_definitions([], assets=[consume]),  # type: ignore[list-item]
        lambda: build_alert_sensor(build_lag_check(consumer("a"), max_events=1), print),  # type: ignore[arg-type]
        lambda: build_alert_sensor([build_lag_check(consumer("a"), max_events=1)], "page"),  # type: ignore[arg-type]
        lambda: build_alert_sensor([build_lag_check(consumer("a"), max_events=1)], lambda: None),  # type: ignore[arg-type,misc]
        lambda: share_runs("shared", consumer("a")),  # type: ignore[arg-type]
        lambda: share_runs("shared", [consumer("a"), worker_asset(queue="mails")(work)]),  # type: ignore[list-item]
        lambda: range_asset(topic=TOPIC, consumer="c", publishes=3),  # type: ignore[arg-type]
        lambda: range_asset(topic=TOPIC, consumer="c", publishes=[b"totals"]),  # type: ignore[list-item]
        lambda: worker_asset(queue="mails", publishes=3),  # type: ignore[arg-type]
        # Each text is true.
        lambda: build_definitions([], backfills="no"),  # type: ignore[arg-type]
        lambda: topic_asset(TOPIC, translator=EventSQLTranslator),  # type: ignore[arg-type]
        # Each letter of a text would be an asset, or a kind.
        lambda: topic_asset(TOPIC, deps="orders"),
        lambda: topic_asset(TOPIC, kinds="kafka"),
        lambda: queue_asset("mails", deps="orders"),
        lambda: store_asset(deps="orders"),
        lambda: subscription_asset("mails", deps="orders"),
        lambda: AssetOptions(deps="orders"),
        lambda: AssetOptions(kinds="python"),
        lambda: TickOptions(linger=-1.0),
        lambda: TickOptions(statement_timeout=0.0),
    ],
)
def test_an_impossible_part_of_a_location_is_refused_when_it_is_defined(build: Callable[[], object]) -> None:
    with pytest.raises(ValidationError):
        build()


@pytest.mark.parametrize("asset", [consumer_asset, range_asset])
def test_a_partitioned_consumer_needs_a_partitioned_topic(asset: Callable[..., object]) -> None:
    with pytest.raises(ValidationError, match="leave out partitioned=True"):
        asset(topic=Topic("rides"), consumer="c", partitioned=True)


def test_a_refusal_tells_two_classes_of_one_name_apart() -> None:
    with pytest.raises(ValidationError) as refused:
        consumer("a", limits=limits.RunLimits())
    assert f"not {limits.__name__}.RunLimits" in str(refused.value)


@pytest.mark.parametrize("build", [build_definitions, build_register_job])
def test_a_topic_with_two_numbers_of_partitions_is_refused(build: Callable[..., object]) -> None:
    """`register` would give the topic one of the numbers, and fail when it runs again."""
    sums = range_asset(topic=TOPIC, consumer="sums", publishes=Topic("totals"), name="sums")(consume_range)
    reader = consumer_asset(topic=Topic("totals", 2), consumer="c", name="reader")(consume)
    with pytest.raises(ValidationError, match="'totals' is declared with partitions=-1 and with partitions=2"):
        build([sums, reader])
    with pytest.raises(ValidationError, match="'rides' is declared with partitions=4 and with partitions=3"):
        build([sums], topics=[Topic("rides", 4)])


def test_a_preparation_that_would_never_run_is_refused() -> None:
    async def create_table(_: object) -> None:
        """Nobody awaits it."""

    with pytest.raises(ValidationError, match="would never run"):
        build_definitions([], prepare=create_table)


def without_events(rows: Any, connection: Connection) -> None: ...


def with_a_stranger(events: Any, connection: Connection, stranger: int) -> None: ...


def without_annotation(events: Any, connection: Connection, stranger) -> None: ...  # type: ignore[no-untyped-def]  # it is what this test is about


async def asynchronous(events: Any, connection: Connection) -> None: ...


def generating(events: Any, connection: Connection) -> Any:
    yield


def with_a_resource_called_config(events: Any, connection: Connection, config: EventSQLResource) -> None: ...


def by_position(events: Any, connection: Connection, /) -> None: ...


def of_many(*events: Any, connection: Connection) -> None: ...


def with_anything(events: Any, connection: Connection, **others: Any) -> None: ...


class Handler:
    def __call__(self, events: Any, connection: Connection) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_events, "needs a parameter called events"),
        (with_a_stranger, "parameter stranger that is neither"),
        (without_annotation, "parameter stranger that is neither"),
        (by_position, "parameter events cannot be given by name"),
        (of_many, "parameter events cannot be given by name"),
        (with_anything, "parameter others cannot be given by name"),
        (asynchronous, "is asynchronous"),
        (generating, "is a generator function"),
        (partial(with_a_stranger, stranger=1), "is not a function"),
        (Handler(), "is not a function"),
        (with_a_resource_called_config, "give the resource another name"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_when_it_is_defined(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=message):
        consumer_asset(topic=TOPIC, consumer="c")(function)


def test_an_annotation_that_cannot_be_resolved_is_refused_with_a_remedy() -> None:
    def unresolvable(events: Any, connection: Connection, spark: SomeType) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - it is what this test is about

    with pytest.raises(dg.DagsterInvalidDefinitionError, match="outside of TYPE_CHECKING"):
        consumer_asset(topic=TOPIC, consumer="c")(unresolvable)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before 3.14, Python evaluates annotations at the definition")
def test_an_annotation_that_fails_when_python_evaluates_it_later_is_refused_with_a_remedy() -> None:
    names: dict[str, Any] = {}
    source = "def unresolvable(events, connection, spark: SomeType): ..."
    exec(compile(source, __file__, "exec", dont_inherit=True), names)
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="outside of TYPE_CHECKING"):
        consumer_asset(topic=TOPIC, consumer="c")(names["unresolvable"])


@pytest.mark.parametrize(
    "limits",
    [
        {"min_events": 0},
        {"min_events": 11, "max_events": 10},
        {"lease": 0.0},
        {"max_wait": -1.0},
        {"drain_seconds": -1.0},
        {"drain_idle": -0.1},
        {"lease": timedelta(seconds=60)},
        {"max_wait": "5"},
        {"max_wait": math.inf},
    ],
)
def test_limits_that_exclude_one_another_are_refused_when_they_are_defined(limits: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RunLimits(**limits)


@pytest.mark.parametrize(
    ("policy", "fits"),
    [
        (dg.RetryPolicy(max_retries=3), True),
        (dg.RetryPolicy(max_retries=3, delay=59), True),
        (dg.RetryPolicy(max_retries=3, delay=60), False),
        (dg.RetryPolicy(max_retries=3, delay=10, backoff=dg.Backoff.LINEAR), True),
        (dg.RetryPolicy(max_retries=3, delay=10, backoff=dg.Backoff.EXPONENTIAL), False),
        (dg.RetryPolicy(max_retries=10_000, delay=1, backoff=dg.Backoff.EXPONENTIAL), False),
        (dg.RetryPolicy(max_retries=1, delay=40, jitter=dg.Jitter.FULL), True),
        (dg.RetryPolicy(max_retries=1, delay=40, jitter=dg.Jitter.PLUS_MINUS), False),
    ],
)
def test_a_retry_policy_that_outlasts_the_lease_is_refused(policy: dg.RetryPolicy, fits: bool) -> None:
    """The run would lose its claim while it waits, and a worker's run would count as dead."""
    options = AssetOptions(retry_policy=policy)
    with nullcontext() if fits else pytest.raises(ValidationError):
        consumer("a", options=options)
    with nullcontext() if fits else pytest.raises(ValidationError):
        worker_asset(queue="mails", options=options)


def test_a_captured_table_is_an_external_asset_upstream_of_its_topic() -> None:
    table = table_asset("public.ride", columns={"id": "bigint"})
    topic = topic_asset(TOPIC, deps=[table])
    assert table.key == dg.AssetKey(["table", "public", "ride"])
    assert table.metadata["table"] == "public.ride"
    graph = dg.Definitions(assets=[table, topic]).resolve_asset_graph()
    assert graph.get(topic.key).parent_keys == {table.key}
    assert not graph.get(table.key).is_executable
    with pytest.raises(InvalidNameError):
        table_asset("ride")


def test_a_topic_key_is_a_topic_name() -> None:
    with pytest.raises(InvalidNameError):
        topic_key("No Topic")


def test_a_consumer_name_may_be_one_that_dagster_accepts_neither_for_tags_nor_for_assets() -> None:
    name = "Abrechnung für Fahrten, " + "x" * 170
    definition = consumer_asset(topic=TOPIC, consumer=name, name="billing")(consume)
    assert definition.consumer.name == name
