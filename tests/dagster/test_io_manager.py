"""The IO manager publishes the values of assets once, and loads their inputs from topics."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import datetime
from typing import Any

import dagster as dg
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pytest
from dagster_pyspark import LazyPySparkResource
from pydantic import ValidationError as PydanticValidationError
from pyspark.sql import DataFrame, SparkSession

from eventsql_orchestration import Event, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    EventSQLIOManager,
    EventSQLResource,
    RangeLimits,
    consumer_asset,
    publish_events,
    range_asset,
    topic_asset,
    topic_key,
)
from eventsql_orchestration.dagster.lineage.origin import Origin
from eventsql_orchestration.errors import (
    ConfigurationError,
    DataLossError,
    EventSQLError,
    InvalidPublicationError,
    PartitionOutOfRangeError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.model import Retention
from eventsql_orchestration.orchestration import publication
from eventsql_orchestration.orchestration.publication import Published
from eventsql_orchestration.spark import eventsql_error, spark_config, staging
from eventsql_orchestration.spark.java import ensure_java
from tests.dagster.conftest import Metadata, Workbench, registering, sql
from tests.dagster.location import record

DAYS = dg.StaticPartitionsDefinition(["monday", "tuesday"])


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ.pop("EVENTSQL_DSN", None)
    home = tmp_path_factory.mktemp("spark")
    ensure_java(home)
    resource = LazyPySparkResource(spark_config=spark_config(**{"spark.sql.warehouse.dir": str(home / "warehouse")}))
    others = SparkSession.getActiveSession()
    yield resource.spark_session
    if others is None:
        resource.spark_session.stop()


pytestmark = pytest.mark.prepared.with_args(registering(Topic("sums", 2)))


def asset(value: object, **options: Any) -> dg.AssetsDefinition:
    """An asset of topic `sums` that returns a value, or the result of a function of its context."""
    given: dict[str, Any] = {"name": "sums", "metadata": {"topic": "sums"}, "io_manager_key": "topics", **options}

    def compute(context: dg.AssetExecutionContext):  # type: ignore[no-untyped-def]  # Dagster would check it
        made = value(context) if callable(value) else value
        # Dagster takes a returned generator for a generator of its own events.
        return dg.Output(made) if isinstance(made, Generator) else made

    # Dagster takes the annotation itself, not its text.
    compute.__annotations__ = {"context": dg.AssetExecutionContext}
    defined: dg.AssetsDefinition = dg.asset(**given)(compute)
    return defined


@pytest.fixture
def materialize(bench: Workbench) -> Callable[..., dg.ExecuteInProcessResult]:
    def run(*assets: Any, manager: dict[str, Any] | None = None, **options: Any) -> dg.ExecuteInProcessResult:
        resources = {
            "eventsql": bench.eventsql,
            "topics": EventSQLIOManager(eventsql=bench.eventsql, **(manager or {})),
        }
        return dg.materialize(list(assets), instance=bench.instance, resources=resources, **options)

    return run


def events(bench: Workbench) -> list[tuple[str | None, bytes]]:
    bench.platform.transfer.run_once()
    return [(event.key, event.value) for event in bench.platform.reader.read("sums")]


def stored(bench: Workbench) -> int:
    """Events of topic `sums`, transferred or not, and staged events of any topic."""
    bench.platform.transfer.run_once()
    return bench.platform.reader.count("sums") + len(sql(bench.platform, "SELECT FROM eventsql.spark_staged_event"))


Materialize = Callable[..., dg.ExecuteInProcessResult]

ROWS = {"key": ["a", "b"], "value": [b"1", b"2"]}
ENCODED = {"key": pa.array(["a", "b"], pa.large_string()), "value": pa.array(["1", "2"]).dictionary_encode()}


# Publishing


def arrow_reader(_: object) -> pa.RecordBatchReader:
    return pa.table(ROWS).to_reader()


def publications(_: object) -> Iterator[Publication]:
    yield Publication("sums", b"1", key="a")
    yield Publication("sums", b"2", key="b")


def pandas_frame(_: object) -> Any:
    return importlib.import_module("pandas").DataFrame({"key": ["a", "b"], "value": ["1", "2"]})


def spark_frame(_: object) -> DataFrame:
    session = SparkSession.getActiveSession()
    assert session is not None
    return session.createDataFrame([("a", "1"), ("b", "2")], "key string, value string").coalesce(1)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(pa.table(ROWS), id="Arrow table"),
        pytest.param(pa.RecordBatch.from_pydict(ROWS), id="Arrow batch"),
        pytest.param(arrow_reader, id="RecordBatchReader"),
        pytest.param(pa.table(ENCODED), id="dictionary"),
        pytest.param(publications, id="generator of publications"),
        pytest.param([{"key": "a", "value": "1"}, {"key": "b", "value": b"2", "metadata": None}], id="mappings"),
        pytest.param(pandas_frame, id="pandas"),
        pytest.param(spark_frame, id="Spark"),
    ],
)  # fmt: skip
def test_the_value_of_an_asset_is_published(
    bench: Workbench, materialize: Materialize, metadata: Metadata, value: object, spark: object
) -> None:
    result = materialize(asset(value))
    assert events(bench) == [("a", b"1"), ("b", b"2")]
    first, last = bench.platform.reader.read("sums")
    assert dict(first.metadata) == {"dagster_run_id": result.run_id, "dagster_asset_key": "sums"}
    assert metadata(result, dg.AssetKey("sums")) == {
        "published topic": "sums",
        "published events": 2,
        "dagster/row_count": 2,
        "published first offset": first.id,
        "published last offset": last.id,
        "published by run": result.run_id,
        "published by asset": "sums",
        "published to": topic_key("sums"),
        "trace published": f"eventsql trace sums {last.id}",
    }


def test_headers_and_partitions_of_the_rows_are_kept(bench: Workbench, materialize: Materialize) -> None:
    headers = pa.array([[("source", "web")], None], pa.map_(pa.string(), pa.string()))
    materialize(asset(pa.table({**ROWS, "headers": headers, "partition": [1, None], "offset": [7, 8]})))
    bench.platform.transfer.run_once()
    first, second = bench.platform.reader.read("sums")
    assert (first.partition, first.metadata["source"]) == (1, "web")
    assert "source" not in second.metadata


def test_the_columns_of_events_that_were_read_are_no_obstacle(bench: Workbench, materialize: Materialize) -> None:
    read = {"topic": ["sums", "sums"], "offset": [7, 8], "timestamp": [None, None], "shard": ["eu", "us"]}
    materialize(asset(pa.table({**ROWS, **read})))
    assert events(bench) == [("a", b"1"), ("b", b"2")]


def test_many_events_of_an_iterable_keep_their_order(bench: Workbench, materialize: Materialize) -> None:
    materialize(asset(lambda _: (Publication("sums", b"%d" % i, partition=0) for i in range(2_500))))
    assert [value for _, value in events(bench)] == [b"%d" % i for i in range(2_500)]


def test_a_partition_is_named_by_its_events(bench: Workbench, materialize: Materialize) -> None:
    daily = asset([{"value": "v"}], partitions_def=DAYS)
    materialize(daily, partition_key="monday")
    materialize(daily, partition_key="tuesday")
    bench.platform.transfer.run_once()
    assert [event.metadata["dagster_partition"] for event in bench.platform.reader.read("sums")] == [
        "monday",
        "tuesday",
    ]


@pytest.mark.parametrize(
    ("options", "manager"),
    [
        ({"metadata": {"topic": "sums"}, "name": "a"}, {}),
        ({"metadata": {}, "name": "a"}, {"topics": {"a": "sums"}}),
        ({"metadata": {}, "name": None, "key": topic_key("sums")}, {}),
    ],
)
def test_the_topic_is_named_by_metadata_by_the_manager_or_by_the_key(
    bench: Workbench, materialize: Materialize, options: dict[str, Any], manager: dict[str, Any]
) -> None:
    materialize(asset([{"value": "v"}], **options), manager=manager)
    assert events(bench) == [(None, b"v")]


def test_the_value_of_an_op_is_published(bench: Workbench) -> None:
    @dg.op(out=dg.Out(io_manager_key="topics", metadata={"topic": "sums"}))
    def op():  # type: ignore[no-untyped-def]  # Dagster would check it
        return [{"value": "v"}]

    @dg.job(resource_defs={"topics": EventSQLIOManager(eventsql=bench.eventsql), "eventsql": bench.eventsql})
    def job() -> None:
        op()

    result = job.execute_in_process(instance=bench.instance)
    bench.platform.transfer.run_once()
    assert [dict(event.metadata) for event in bench.platform.reader.read("sums")] == [{"dagster_run_id": result.run_id}]


def test_each_dynamic_output_is_published(bench: Workbench) -> None:
    @dg.op(out=dg.DynamicOut(io_manager_key="topics", metadata={"topic": "sums"}))
    def op():  # type: ignore[no-untyped-def]  # Dagster would check it
        for key in ("a", "b"):
            yield dg.DynamicOutput([{"value": key}], mapping_key=key)

    @dg.job(resource_defs={"topics": EventSQLIOManager(eventsql=bench.eventsql)})
    def job() -> None:
        op()

    assert job.execute_in_process(instance=bench.instance).success
    bench.platform.transfer.run_once()
    assert [event.value for event in bench.platform.reader.read("sums")] == [b"a", b"b"]


# Once


def test_a_retried_step_publishes_nothing_again(
    bench: Workbench, materialize: Materialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The step dies between its publication and the report to Dagster.
    publish = EventSQLIOManager.handle_output
    attempts: list[int] = []

    def die_once(self: EventSQLIOManager, context: dg.OutputContext, obj: object) -> None:
        publish(self, context, obj)
        attempts.append(1)
        if len(attempts) == 1:
            raise dg.RetryRequested(max_retries=2)

    monkeypatch.setattr(EventSQLIOManager, "handle_output", die_once)
    result = materialize(asset([{"value": "v"}]))
    assert result.success
    assert len(attempts) == 2
    assert events(bench) == [(None, b"v")]


def test_a_step_reads_once_what_each_attempt_of_the_step_before_it_names(
    bench: Workbench, materialize: Materialize
) -> None:
    """The second attempt publishes nothing again, and names the same events."""
    attempts = itertools.count()
    loaded: list[bytes] = []

    @dg.multi_asset(
        outs={"sums": dg.AssetOut(io_manager_key="topics", metadata={"topic": "sums"}), "report": dg.AssetOut()}
    )
    def both():  # type: ignore[no-untyped-def]  # Dagster would check it
        yield dg.Output([{"value": "a"}, {"value": "b"}], "sums")
        if next(attempts) == 0:
            raise dg.RetryRequested(max_retries=1)
        yield dg.Output(None, "report")

    @dg.asset(ins={"sums": dg.AssetIn(input_manager_key="topics", metadata={"reads": "materialization"})})
    def reading(sums: list[Event]) -> None:
        loaded.extend(event.value for event in sums)

    assert materialize(both, reading).success
    assert next(attempts) == 2
    # Events without a key are in any partition, and a step reads one partition after the other.
    assert sorted(loaded) == [b"a", b"b"]


def job_of(*assets: dg.AssetsDefinition) -> dg.JobDefinition:
    """A job of assets. The environment names its database, because Dagster makes the job anew for a run."""
    eventsql = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_TEST_DSN"))
    return dg.Definitions(
        assets=assets,
        jobs=[dg.define_asset_job("job", assets, executor_def=dg.in_process_executor)],
        resources={"eventsql": eventsql, "topics": EventSQLIOManager(eventsql=eventsql)},
    ).resolve_job_def("job")


def location() -> dg.JobDefinition:
    """A job of an asset that returns one event more each time it is computed."""

    @dg.asset(metadata={"topic": "sums"}, io_manager_key="topics")
    def sums(eventsql: EventSQLResource):  # type: ignore[no-untyped-def]  # Dagster would check it
        return [{"value": b"%d" % number} for number in range(1 + eventsql.platform.reader.count("sums"))]

    return job_of(sums)


def test_a_re_executed_run_publishes_nothing_again_and_names_the_first_run(
    bench: Workbench, shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_TEST_DSN", dsn)

    def execute(parent: str | None = None) -> tuple[str, dict[str, Any]]:
        again = None if parent is None else dg.ReexecutionOptions(parent)
        with dg.execute_job(dg.reconstructable(location), shared_instance, reexecution_options=again) as result:
            assert result.success
            (event,) = result.get_asset_materialization_events()
        found = event.step_materialization_data.materialization.metadata
        return result.run_id, {name: value.value for name, value in found.items()}

    first, of_first = execute()
    second, of_second = execute(first)
    _, of_third = execute(second)
    assert events(bench) == [(None, b"0")]
    assert of_first["published by run"] == first
    assert of_first == of_second == of_third

    other, of_other = execute()
    assert sorted(value for _, value in events(bench)) == [b"0", b"0", b"1"]
    assert (of_other["published by run"], of_other["published events"]) == (other, 2)


def test_two_processes_that_publish_at_once_publish_once(
    bench: Workbench, materialize: Materialize, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process has looked for a publication and has staged its own. Then it comes second.
    stage = staging.stage
    inner: list[Published] = []

    def overtaken(*arguments: Any) -> staging.Attempt:
        attempt = stage(*arguments)
        if not inner:
            inner.append(Published("sums", 0, "none yet"))
            inner[0] = publication.publish(origin, [{"value": "first"}], access=bench.eventsql, topic="sums")
        return attempt

    monkeypatch.setattr(staging, "stage", overtaken)
    origin = Origin("run", "run", "sums")
    outer = publication.publish(origin, [{"value": "second"}], access=bench.eventsql, topic="sums")
    assert events(bench) == [(None, b"first")]
    assert (inner[0].repeated, outer.repeated) == (False, True)
    assert outer.spans == inner[0].spans != ()
    assert stored(bench) == 1, "the staged events of the second process are gone"


@pytest.mark.parametrize("form", ["list", "pandas", "pandas, without types", "arrow"])
def test_an_empty_value_is_a_publication(
    bench: Workbench, materialize: Materialize, metadata: Metadata, form: str
) -> None:
    empty: dict[str, object] = {
        "list": [],
        "pandas": of_pandas({"value": []}),
        "pandas, without types": lambda _: of_pandas({"value": [b"1"], "key": ["a"]})(None).iloc[:0],
        "arrow": pa.table({"value": pa.nulls(0)}),
    }
    result = materialize(asset(empty[form]))
    assert metadata(result, dg.AssetKey("sums"))["published events"] == 0
    assert stored(bench) == 0


# Bad input

MAP = pa.map_(pa.string(), pa.string())


def of_pandas(*given: object, **options: object) -> Callable[[object], Any]:
    return lambda _: importlib.import_module("pandas").DataFrame(*given, **options)


def stumbles(_: object) -> Iterator[Publication]:
    for number in range(1_500):
        yield Publication("sums", b"%d" % number)
    raise ValidationError("no more")


OF_PANDAS = "the frame of pandas cannot be published to topic 'sums'"

REFUSED: list[tuple[object, type[EventSQLError], str]] = [
    (pa.table({"key": ["a"]}), ValidationError, "column 'value' is missing"),
    (pa.table({"value": [b"1", None]}), InvalidPublicationError, "column 'value' is null"),
    (pa.table({"value": [1.5]}), ValidationError, "column 'value' must be binary or string, not double"),
    (pa.table({"value": ["v"], "key": [1]}), ValidationError, "column 'key' must be string, not int64"),
    (pa.table({"value": ["v"], "price": [1]}), ValidationError, "column 'price'"),
    (pa.table({"value": ["v"], "partition": [7]}), PartitionOutOfRangeError, "partition 7 is out of range"),
    (pa.table({"value": ["v"], "topic": ["other"]}), ValidationError, "'other' is not the topic of the asset"),
    (pa.table({"value": ["v"], "headers": pa.array([[("a", None)]], MAP)}), InvalidPublicationError, "'a' is null"),
    (pa.table([["v"], ["w"]], names=["value", "value"]), ValidationError, "'value' occurs twice"),
    ([Publication("other", b"")], ValidationError, "event 1 for topic 'sums' is a publication for topic 'other'"),
    ([{"value": "v"}, {"key": "k"}], ValidationError, "event 2 for topic 'sums' has no value"),
    ([{"value": {"a": 1}}], InvalidPublicationError, "event 1 for topic 'sums': value must be bytes, not dict"),
    ([{"value": "v", "price": 1}], ValidationError, "'price' is not a part of an event"),
    ([{"value": "v", "partition": 2}], PartitionOutOfRangeError, "partition 2 is out of range"),
    ([{"value": "v", "partition": 2**70}], PartitionOutOfRangeError, "is not a partition"),
    ([{"value": "\ud800"}], ValidationError, "event 1 for topic 'sums': its value cannot be written as UTF-8"),
    (of_pandas({"value": ["a", "b"], "headers": [{"a": 1}, {"a": "2"}]}), ValidationError, OF_PANDAS),
    (of_pandas([["v", "w"]], columns=["value", "value"]), ValidationError, OF_PANDAS),
    (of_pandas({"value": ["v"], "partition": [2**70]}), ValidationError, OF_PANDAS),
    (of_pandas({"value": ["\ud800"]}, dtype=object), ValidationError, OF_PANDAS),
    (of_pandas(columns=["value", "price"]), ValidationError, "column 'price'"),
    (pa.table({"value": pa.nulls(1)}), InvalidPublicationError, "column 'value' is null"),
    ([1], ValidationError, "event 1 for topic 'sums' is of type int"),
    (lambda _: 7, ValidationError, "int cannot be published"),
    ("text", ValidationError, "str cannot"),
    ({"value": "v"}, ValidationError, "dict cannot"),
    (lambda _: None, ValidationError, "returned None"),
    (stumbles, ValidationError, "no more"),
]  # fmt: skip


def test_a_value_that_cannot_be_published_is_refused_as_a_whole(bench: Workbench, materialize: Materialize) -> None:
    for value, error, message in REFUSED:
        with pytest.raises(error, match=message):
            materialize(asset(value))
        assert stored(bench) == 0, message
    # A refused value does not count as published: after a correction, it is published.
    assert materialize(asset([{"value": "v"}])).success
    assert stored(bench) == 1


def test_a_spark_frame_is_refused_with_the_same_errors(
    bench: Workbench, materialize: Materialize, spark: SparkSession
) -> None:
    # In one task: another one may still stage its block after the job has failed.
    nulls = spark.createDataFrame([("v",), (None,)], "value string").coalesce(1)
    with pytest.raises(InvalidPublicationError, match="column 'value' is null"):
        materialize(asset(lambda _: nulls))
    with pytest.raises(ValidationError, match="column 'value' is missing"):
        materialize(asset(lambda _: nulls.withColumnRenamed("value", "key")))
    assert stored(bench) == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metadata": {"topic": "nowhere"}}, TopicNotFoundError, "nowhere"),
        ({"metadata": {}}, ConfigurationError, "asset sums has no topic: give it metadata="),
        ({"metadata": {"topic": "No Topic"}}, ValidationError, "No Topic"),
        ({"metadata": {}, "name": None, "key": ["topic", "sums", "daily"]}, ConfigurationError, "has no topic"),
    ],
)
def test_an_asset_without_a_topic_is_refused(
    bench: Workbench, materialize: Materialize, options: dict[str, Any], error: type[EventSQLError], message: str
) -> None:
    with pytest.raises(error, match=message):
        materialize(asset([{"value": "v"}], **options))


def test_topics_of_the_manager_are_checked_when_the_location_is_loaded(bench: Workbench) -> None:
    with pytest.raises(PydanticValidationError, match="topics"):
        EventSQLIOManager(eventsql=bench.eventsql, topics={"a": "No Topic"})
    with pytest.raises(PydanticValidationError, match="reads"):
        EventSQLIOManager(eventsql=bench.eventsql, reads="nothing")  # type: ignore[arg-type]  # that is what is tested


# Loading

RIDES = Topic("sums", 2)


def taker(
    seen: list[Any],
    annotation: Any,
    *,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    deps: Sequence[dg.AssetsDefinition] = (),
    **options: Any,
) -> dg.AssetsDefinition:
    """An asset that takes topic `sums`, in the form of an annotation."""
    given = {"key": topic_key("sums"), "input_manager_key": "topics", **options}

    def taker(taken: Any) -> None:
        seen.append(rows(taken))

    taker.__annotations__ = {"taken": annotation, "return": None}
    return dg.asset(ins={"taken": dg.AssetIn(**given)}, partitions_def=partitions_def, deps=deps)(taker)


def rows(taken: Any) -> list[tuple[int, bytes]]:
    """Offsets and values of what was loaded, in order."""
    if isinstance(taken, DataFrame):
        return sorted((row["offset"], bytes(row["value"])) for row in taken.collect())
    if isinstance(taken, list):
        return [(event.id, event.value) for event in taken]
    if isinstance(taken, pa.RecordBatchReader):
        taken = taken.read_all()
    if not isinstance(taken, pa.Table):
        return list(zip(taken["offset"], taken["value"], strict=True))
    assert taken.column_names == ["key", "value", "topic", "partition", "offset", "timestamp"]
    return list(zip(taken["offset"].to_pylist(), taken["value"].to_pylist(), strict=True))


def values(seen: list[Any]) -> list[list[bytes]]:
    """The values of each input that was loaded."""
    return [[value for _, value in each] for each in seen]


def pandas_type() -> Any:
    return importlib.import_module("pandas").DataFrame


FORMS = [
    pytest.param(lambda: DataFrame, id="Spark"),
    pytest.param(lambda: Any, id="anything"),
    pytest.param(lambda: pa.Table, id="Arrow table"),
    pytest.param(lambda: pa.RecordBatchReader, id="RecordBatchReader"),
    pytest.param(lambda: list[Event], id="events"),
    pytest.param(pandas_type, id="pandas"),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_topic_is_loaded_in_the_form_of_the_annotation(
    bench: Workbench, materialize: Materialize, spark: SparkSession, form: Callable[[], Any]
) -> None:
    ids = bench.publish("sums", 5, partition=0)
    seen: list[Any] = []
    result = materialize(topic_asset(RIDES), taker(seen, form()), selection=["taker"])
    assert seen == [[(id_, b"%d" % i) for i, id_ in enumerate(ids)]]
    (event,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.LOADED_INPUT]
    data: Any = event.event_specific_data
    loaded = {name: value.value for name, value in data.metadata.items()}
    assert loaded == {
        "topic": "sums",
        "input": topic_key("sums"),
        "ranges": [{"partition": -1, "after": 0, "upto": ids[-1]}],
        "trace": f"eventsql trace sums {ids[-1]}",
    }


def test_a_range_of_a_topic_partition_is_loaded(bench: Workbench, materialize: Materialize) -> None:
    bench.publish("sums", 2, partition=0)
    ids = bench.publish("sums", 4, partition=1)
    bench.publish("sums", 2, partition=0)
    seen: list[Any] = []
    named = {"after": ids[0], "upto": ids[2], "topic partition": 1}
    materialize(topic_asset(RIDES), taker(seen, list[Event], metadata=named), selection=["taker"])
    assert seen == [[(ids[1], b"1"), (ids[2], b"2")]]


def test_a_range_of_a_former_partition_is_loaded(bench: Workbench, materialize: Materialize) -> None:
    ids = bench.publish("sums", 2, partition=1)
    bench.platform.repartitioner.repartition("sums", 1)
    seen: list[Any] = []
    materialize(topic_asset(RIDES), taker(seen, list[Event], metadata={"topic partition": 1}), selection=["taker"])
    assert [offset for offset, _ in seen[0]] == ids
    with pytest.raises(PartitionOutOfRangeError):
        # Before a Spark session starts, which would wrap the error in its own.
        materialize(topic_asset(RIDES), taker([], DataFrame, metadata={"topic partition": 9}), selection=["taker"])


@pytest.mark.parametrize("form", [form for form in FORMS if form.id in ("Spark", "Arrow table", "events")])
def test_the_last_materialization_of_an_asset_is_loaded(
    bench: Workbench, materialize: Materialize, spark: SparkSession, form: Callable[[], Any]
) -> None:
    made = iter([["0"], ["1", "2"]])
    seen: list[Any] = []
    of_another_run = {"dagster_asset_key": "topic/sums", "dagster_run_id": "another"}

    def compute(_: object) -> Iterator[Publication]:
        for value in next(made):
            yield Publication("sums", value.encode())
            # An event of another run of the asset lies within the range of offsets.
            bench.platform.publisher.publish(Publication("sums", b"another", metadata=of_another_run))

    source = asset(compute, metadata={}, name=None, key=topic_key("sums"))
    for _ in range(2):
        materialize(source)
    materialize(source, taker(seen, form(), metadata={"reads": "materialization"}), selection=["taker"])
    # The events may be in two partitions.
    assert sorted(value for _, value in seen[0]) == [b"1", b"2"]


def test_runs_at_once_load_the_events_that_they_have_published_themselves(materialize: Materialize) -> None:
    numbers = itertools.count()
    seen: list[Any] = []
    source = asset(lambda _: [{"value": str(next(numbers))}], metadata={}, name=None, key=topic_key("sums"))

    @dg.asset(deps=[source])
    def meanwhile() -> None:
        assert materialize(source).success

    latest = taker(seen, list[Event], metadata={"reads": "materialization"}, deps=[meanwhile])
    materialize(source, meanwhile, latest)
    assert values(seen) == [[b"0"]]
    materialize(source, meanwhile, latest, selection=["taker"])
    assert values(seen[1:]) == [[b"1"]]


def chain() -> dg.JobDefinition:
    """A job of an asset of one event, and of an asset that takes this event, and fails if `EVENTSQL_TEST_FAILS` is set.

    The second asset has the event as metadata.
    """

    @dg.asset(key=topic_key("sums"), io_manager_key="topics")
    def sums(context) -> list[Publication]:  # type: ignore[no-untyped-def]  # Dagster's own default
        return [Publication("sums", context.run.run_id.encode())]

    source = dg.AssetIn(key=topic_key("sums"), input_manager_key="topics", metadata={"reads": "materialization"})

    @dg.asset(name="taker", ins={"taken": source})
    def take(context, taken: list[Event]) -> None:  # type: ignore[no-untyped-def]  # Dagster's own default
        if "EVENTSQL_TEST_FAILS" in os.environ:
            raise RuntimeError
        context.add_output_metadata({"taken": [event.value.decode() for event in taken]})

    return job_of(sums, take)


def test_a_run_that_is_executed_again_from_its_failure_loads_the_events_that_it_had_published(
    bench: Workbench, shared_instance: dg.DagsterInstance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_TEST_DSN", dsn)

    def execute(again: dg.ReexecutionOptions | None = None) -> str:
        with dg.execute_job(dg.reconstructable(chain), shared_instance, reexecution_options=again) as result:
            return result.run_id

    def taken() -> Any:
        event = shared_instance.get_latest_materialization_event(dg.AssetKey("taker"))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization.metadata["taken"].value

    monkeypatch.setenv("EVENTSQL_TEST_FAILS", "")
    failed = execute()
    monkeypatch.delenv("EVENTSQL_TEST_FAILS")
    later = execute()
    assert taken() == [later]
    execute(dg.ReexecutionOptions.from_failure(failed, shared_instance))
    assert taken() == [failed]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda: DataFrame, id="Spark", marks=pytest.mark.nightly),
        *(form for form in FORMS if form.id in ("Arrow table", "events")),
    ],
)
def test_a_topic_begins_after_dropped_events_and_a_range_with_dropped_events_is_refused(
    bench: Workbench, materialize: Materialize, spark: SparkSession, form: Callable[[], Any]
) -> None:
    source = asset([{"value": "dropped"}], metadata={}, name=None, key=topic_key("sums"))
    materialize(source)
    bench.publish("sums", 20)
    bench.platform.registry.set_retention("sums", Retention(events=10))
    bench.platform.retention.run_once()
    ids = bench.publish("sums", 20, partition=0)
    bench.platform.retention.run_once()
    seen: list[Any] = []
    materialize(source, taker(seen, form()), selection=["taker"])
    assert [[offset for offset, _ in each] for each in seen] == [ids]
    for metadata in ({"reads": "materialization"}, {"after": 0}, {"upto": 5}, {"after": 5, "upto": ids[2]}):
        with pytest.raises(Exception, match="retention has dropped offsets") as failure:
            materialize(source, taker(seen, form(), metadata=metadata), selection=["taker"])
        error = failure.value
        assert isinstance(error if isinstance(error, EventSQLError) else eventsql_error(error), DataLossError)
    # Nothing is lost of a range without events.
    materialize(source, taker(seen, form(), metadata={"after": 0, "upto": 0}), selection=["taker"])
    assert seen == [[(id_, b"%d" % i) for i, id_ in enumerate(ids)], []]


def test_the_requested_partitions_of_a_partitioned_asset_are_loaded(bench: Workbench, materialize: Materialize) -> None:
    seen: list[Any] = []

    def compute(context: dg.AssetExecutionContext) -> list[Publication]:
        return [Publication("sums", context.partition_key.encode())]

    source = asset(compute, metadata={}, name=None, key=topic_key("sums"), partitions_def=DAYS)
    for day in DAYS.get_partition_keys():
        materialize(source, partition_key=day)
    daily = taker(seen, list[Event], partitions_def=DAYS)
    materialize(source, daily, partition_key="monday", selection=["taker"])
    materialize(source, taker(seen, list[Event]), selection=["taker"])
    assert values(seen) == [[b"monday"], [b"monday", b"tuesday"]]


@pytest.mark.parametrize("form", [form for form in FORMS if form.id in ("Spark", "Arrow table")])
def test_an_input_without_partitions_has_no_events(
    materialize: Materialize, spark: SparkSession, form: Callable[[], Any]
) -> None:
    """The first day has no day before it."""
    seen: list[Any] = []
    source = asset([], metadata={}, name=None, key=topic_key("sums"), partitions_def=DAYS)
    before = dg.StaticPartitionMapping({"monday": "tuesday"})
    daily = taker(seen, form(), partitions_def=DAYS, partition_mapping=before)
    assert materialize(source, daily, partition_key="monday", selection=["taker"]).success
    assert seen == [[]]


def test_events_of_several_partitions_of_one_run_are_loaded_together_or_not(
    bench: Workbench, materialize: Materialize
) -> None:
    seen: list[Any] = []

    def compute(context: dg.AssetExecutionContext) -> list[Publication]:
        return [Publication("sums", key.encode(), partition=0) for key in context.partition_keys]

    source = asset(compute, metadata={}, name=None, key=topic_key("sums"), partitions_def=DAYS)
    tags = {"dagster/asset_partition_range_start": "monday", "dagster/asset_partition_range_end": "tuesday"}
    materialize(source, tags=tags)

    one, both = taker(seen, list[Event], partitions_def=DAYS), taker(seen, list[Event])
    materialize(source, both, selection=["taker"])
    assert values(seen) == [[b"monday", b"tuesday"]]
    with pytest.raises(ValidationError, match=r"partitions monday\.\.\.tuesday of topic/sums together"):
        materialize(source, one, partition_key="monday", selection=["taker"])
    later = dg.StaticPartitionsDefinition(["tuesday", "wednesday"])
    moved = asset(compute, metadata={}, name=None, key=topic_key("sums"), partitions_def=later)
    latest = taker(seen, list[Event], partitions_def=later)
    with pytest.raises(ValidationError, match="only tuesday are loaded"):
        materialize(moved, latest, partition_key="tuesday", selection=["taker"])
    materialize(source, partition_key="tuesday")
    with pytest.raises(ValidationError, match="only monday are loaded"):
        materialize(source, both, selection=["taker"])
    materialize(source, partition_key="monday")
    materialize(source, both, selection=["taker"])
    assert values(seen[1:]) == [[b"monday", b"tuesday"]]


def test_arrivals_that_were_not_counted_are_not_loaded_as_no_events(bench: Workbench, materialize: Materialize) -> None:
    arrivals: dict[str, Any] = {"published topic": "sums", "published last offset": 2}
    bench.instance.report_runless_asset_event(dg.AssetMaterialization(topic_key("sums"), metadata=arrivals))
    latest = taker([], list[Event], metadata={"reads": "materialization"})
    with pytest.raises(ValidationError):
        materialize(topic_asset(RIDES), latest, selection=["taker"])


@pytest.mark.parametrize("unknown", [0, 1], ids=["first", "last"])
def test_publications_of_a_run_are_not_loaded_in_part(
    bench: Workbench, materialize: Materialize, monkeypatch: pytest.MonkeyPatch, unknown: int
) -> None:
    with_offsets, published = publication._Record._with_offsets, itertools.count()

    def not_in_time(record: Any, found: Published, at: datetime) -> Published:
        # As if the transfer had not moved these events in time.
        return found if next(published) == unknown else with_offsets(record, found, at)

    def passed_on(context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource) -> dict[str, Any]:
        value = {"value": str(claim.range.upto)}
        return publish_events(context, [value], eventsql=eventsql, topic="sums", claim=claim)

    rides, limits = Topic("rides"), RangeLimits(max_wait=0.0, max_events=1)
    consumer = range_asset(topic=rides, consumer="passing", publishes="sums", limits=limits)(passed_on)
    bench.platform.registry.register_topic(rides)
    consumer.register(bench.platform)
    bench.publish("rides", 2)
    with monkeypatch.context() as patched:
        patched.setattr(publication._Record, "_with_offsets", not_in_time)
        assert bench.run(consumer).success
    assert len(events(bench)) == 2

    latest = taker([], list[Event], metadata={"reads": "materialization"})
    with pytest.raises(ValidationError, match="does not name the offsets of its events"):
        materialize(topic_asset(RIDES), latest, selection=["taker"])


@pytest.mark.parametrize(
    ("annotation", "options", "message"),
    [
        (int, {}, "a topic cannot be loaded as <class 'int'>"),
        (list[Event], {"metadata": {"reads": "all"}}, "metadata reads is topic or materialization, not 'all'"),
        (list[Event], {"metadata": {"after": "1"}}, "metadata after is a whole number, not '1'"),
        (list[Event], {"metadata": {"topic partition": 2}}, "partition 2 is out of range"),
        (list[Event], {"metadata": {"after": 5, "upto": 4}}, "not a range of offsets"),
        (list[Event], {"metadata": {"reads": "materialization"}}, "topic/sums has not been materialized"),
        (list[Event], {"metadata": {"topic": "nowhere"}}, "nowhere"),
    ],
)
def test_an_impossible_input_is_refused(
    materialize: Materialize, annotation: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EventSQLError, match=message):
        materialize(topic_asset(RIDES), taker([], annotation, **options), selection=["taker"])


def test_the_topic_that_a_consumer_reads_is_not_its_output(bench: Workbench, materialize: Materialize) -> None:
    ids = bench.publish("sums", 2, partition=0)
    bench.platform.registry.register_topic(Topic("rides"))
    bench.publish("rides", 1)
    totals = consumer_asset(topic=Topic("rides"), consumer="totals", name="totals")(record)
    loaded: list[list[int]] = []

    def load(totals: list[Event]) -> None:
        loaded.append([event.id for event in totals])

    load.__annotations__ = {"totals": list[Event], "return": None}
    loading = dg.asset(name="loading", ins={"totals": dg.AssetIn(input_manager_key="topics")})(load)

    with pytest.raises(ConfigurationError, match="totals consumes topic 'rides'"):
        materialize(totals.asset, loading, selection=[loading])
    assert materialize(totals.asset, loading, selection=[loading], manager={"topics": {"totals": "sums"}}).success
    assert loaded == [ids]
