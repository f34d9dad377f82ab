"""Publishing a DataFrame from an asset, with a real Spark session."""

import json
import os
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from pyspark.sql import SparkSession

from eventsql_orchestration import Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    ConsumerDefinition,
    EventSQLResource,
    RangeLimits,
    publish_dataframe,
    range_asset,
    topic_key,
)
from eventsql_orchestration.dagster.lineage.published import add_up, leave_out
from eventsql_orchestration.spark import spark_config
from eventsql_orchestration.spark.java import ensure_java
from eventsql_orchestration.tracing import Tracing
from tests.dagster.conftest import Metadata, Workbench, registering
from tests.documents import DOCS, examples, play
from tests.shard_keys import shard_of_key

RIDES = Topic("rides", 2)
COUNTS = Topic("counts", 2)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LazyPySparkResource]:
    """The resource of a location; its session is the process's own, which other tests use as well."""
    os.environ.pop("EVENTSQL_DSN", None)
    home = tmp_path_factory.mktemp("spark")
    ensure_java(home)
    resource = LazyPySparkResource(
        spark_config=spark_config(**{"spark.sql.warehouse.dir": str(home / "warehouse"), "spark.master": "local[2,3]"})
    )
    others = SparkSession.getActiveSession()
    yield resource
    if others is None:
        resource.spark_session.stop()


def count(
    context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource, spark: LazyPySparkResource
) -> dict[str, Any]:
    """How many events each partition of a range has, as events."""
    events = eventsql.read_range(spark.spark_session, claim, columns="partition int")
    sums = events.groupBy("partition").count()
    frame = sums.selectExpr("concat('k', partition) key", "cast(count as string) value")
    return publish_dataframe(context, frame, eventsql=eventsql, topic="counts", claim=claim)


counts: ConsumerDefinition = range_asset(
    topic=RIDES,
    consumer="counts",
    publishes=COUNTS,
    name="counts",
    limits=RangeLimits(max_wait=0.0, drain_seconds=0.0),
)(count)

pytestmark = pytest.mark.prepared.with_args(registering(COUNTS, counts))


@pytest.mark.nightly
def test_events_of_a_frame_that_is_published_in_a_span_carry_the_context_of_the_span(
    bench: Workbench, spark: LazyPySparkResource
) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traced = range_asset(
        topic=RIDES, consumer="counts", publishes=COUNTS, name="counts",
        limits=RangeLimits(max_wait=0.0, drain_seconds=0.0),
    )(Tracing(provider).handler("rides", "counts")(count))  # fmt: skip
    bench.publish("rides", 3, partition=0)
    assert bench.run(traced, bench.request(counts), spark=spark).success

    [span] = spans.get_finished_spans()
    assert span.context is not None
    [event] = bench.platform.reader.read("counts")
    assert event.metadata["traceparent"].split("-")[1:3] == [
        format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)
    ]  # fmt: skip


def test_a_range_is_read_summed_up_and_published_exactly_once(
    bench: Workbench, metadata: Metadata, spark: LazyPySparkResource
) -> None:
    bench.publish("rides", 30, partition=0)
    last = bench.publish("rides", 20, partition=1)[-1]
    requested = bench.request(counts)
    result = bench.run(counts, requested, spark=spark)
    assert result.success

    published = bench.platform.reader.read("counts")
    assert sorted((event.key, event.value) for event in published) == [("k0", b"30"), ("k1", b"20")]
    for event in published:
        assert dict(event.metadata) == {"dagster_run_id": result.run_id, "dagster_asset_key": "counts"}
    assert bench.offset(counts) == last
    assert metadata(result, topic_key("counts")) == {
        "published topic": "counts",
        "published events": 2,
        "dagster/row_count": 2,
        "published first offset": published[0].id,
        "published last offset": published[-1].id,
        "published by run": result.run_id,
        "published by asset": "counts",
        "published to": topic_key("counts"),
        "trace published": f"eventsql trace counts {published[-1].id}",
    }
    assert metadata(result, counts.key)["events"] == 50

    assert bench.run(counts, requested, spark=spark).success
    assert bench.platform.reader.count("counts") == 2


@pytest.mark.nightly
def test_a_range_of_one_shard_is_read_and_published_to_all_shards_exactly_once(
    shards: dict[str, Workbench], metadata: Metadata, spark: LazyPySparkResource
) -> None:
    platform = shards["shard-1"].eventsql.platform
    platform.registry.register_topic(COUNTS)
    counts.register(platform)
    ends = {}
    for number, (name, bench) in enumerate(shards.items(), start=1):
        bench.publish("rides", number, partition=0)
        ends[name] = bench.publish("rides", 10 * number, partition=1)[-1]
    bench = shards["shard-1"]
    requests = bench.tick(counts.sensors[0])
    results = {each.tags["eventsql/shard"]: bench.run(counts, each, spark=spark) for each in requests}
    assert all(result.success for result in results.values())
    assert all(bench.run(counts, each, spark=spark).success for each in requests), "and publish nothing again"

    platform.transfer.run_once()
    published = {
        (event.metadata["eventsql_shard"], event.key, event.value, name)
        for name, each in shards.items()
        for event in each.platform.reader.read("counts")
    }
    assert [shard_of_key(key, list(shards)) for key in ("k0", "k1")] == ["shard-2", "shard-1"]
    assert published == {
        ("shard-1", "k0", b"1", "shard-2"),
        ("shard-1", "k1", b"10", "shard-1"),
        ("shard-2", "k0", b"2", "shard-2"),
        ("shard-2", "k1", b"20", "shard-1"),
    }
    assert {name: each.offset(counts) for name, each in shards.items()} == ends
    assert metadata(results["shard-2"], counts.key)["shard"] == "shard-2"
    told = metadata(results["shard-2"], topic_key("counts"))
    assert told["published events"] == 2
    assert {each["shard"] for each in told["published ranges"]} == {"shard-1", "shard-2"}


def test_an_asset_without_a_claim_publishes_once_in_a_run_and_partition(
    bench: Workbench, spark: LazyPySparkResource
) -> None:
    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["monday"]), key=topic_key("counts"))
    def daily(context: dg.AssetExecutionContext, eventsql: EventSQLResource, spark: LazyPySparkResource) -> None:
        frame = spark.spark_session.createDataFrame([("k", "v")], "key string, value string")
        for batch in (0, 0, 1):  # the second is the first, tried again
            publish_dataframe(context, frame, eventsql=eventsql, topic="counts", batch=batch)

    result = dg.materialize(
        [daily],
        partition_key="monday",
        instance=bench.instance,
        resources={"eventsql": bench.eventsql, "spark": spark},
    )
    events = bench.platform.reader.read("counts")
    assert [event.value for event in events] == [b"v", b"v"]
    assert dict(events[0].metadata) == {
        "dagster_run_id": result.run_id,
        "dagster_asset_key": "topic/counts",
        "dagster_partition": "monday",
    }


def test_publications_to_a_topic_add_up() -> None:
    said = [
        {"published topic": "a", "published events": 2, "published first offset": 5, "published last offset": 9},
        {"published topic": "b", "published events": 7},
        {"published topic": "a", "published events": 1, "published first offset": 12, "published last offset": 12},
    ]
    assert add_up(said, "a") == {
        "published topic": "a",
        "published events": 3,
        "dagster/row_count": 3,
        "published first offset": 5,
        "published last offset": 12,
    }
    assert add_up(said, "b") == {"published topic": "b", "published events": 7, "dagster/row_count": 7}
    assert add_up(said, "c") == {}
    # None of them is read if the offsets of some are not known; no events have no offsets.
    unknown, empty = ({"published topic": "a", "published events": number} for number in (1, 0))
    assert "published first offset" not in add_up([*said, unknown], "a")
    assert add_up([*said, empty], "a") == add_up(said, "a")
    assert leave_out({**said[1], "rows": 3}, {"b"}) == {"rows": 3}
    assert leave_out({**said[1], "rows": 3}, {"a"}) == {**said[1], "rows": 3}


def test_the_spark_asset_of_the_documentation_reads_and_publishes(
    bench: Workbench, spark: LazyPySparkResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTSQL_DSN", bench.platform.database.dsn)
    spark.spark_session  # noqa: B018 - the example takes the session of this process
    [example] = examples(DOCS / "spark.md", "@range_asset")
    location: dg.Definitions = play(example)["defs"]

    # No consumer reads the topic `items_sold`: `register` creates it, because an asset publishes to it.
    assert location.resolve_job_def("register").execute_in_process(instance=bench.instance).success
    bench.platform.publisher.publish_all(
        Publication("order_placed", b'{"item": "%s"}' % item) for item in (b"tea", b"rice", b"tea")
    )
    bench.platform.transfer.run_once()

    assert location.resolve_job_def("consume_sales").execute_in_process(instance=bench.instance).success
    bench.platform.transfer.run_once()
    sold = {event.key: json.loads(event.value) for event in bench.platform.reader.read("items_sold")}
    assert sold == {"rice": {"item": "rice", "pieces": 1}, "tea": {"item": "tea", "pieces": 2}}
