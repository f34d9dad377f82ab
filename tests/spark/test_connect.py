"""Spark Connect: clients without a Spark of their own read and write through a server, declarative pipelines too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyspark
import pytest
from pyspark.sql import SparkSession

from eventsql_orchestration import EventSQL, Publication, Topic
from tests.shards.conftest import Databases, databases
from tests.spark.connect import connect_server, environment
from tests.spark.processes import Driver

__all__ = ["databases"]

REMOTE = "tests.spark.remote"


PIPELINE = """
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
database = {"dsn": spark.conf.get("eventsql.dsn")}


@dp.table
def seen() -> DataFrame:
    reader = spark.readStream.format("eventsql").options(**database, subscribe="orders", startingOffsets="earliest")
    return reader.schema("key string, value binary, offset bigint").load()


@dp.materialized_view
def per_key() -> DataFrame:
    return spark.read.table("seen").groupBy("key").count()


dp.create_sink("copies", "eventsql", {**database, "topic": "copies"})


@dp.append_flow(target="copies")
def copied() -> DataFrame:
    return spark.readStream.table("seen").select("key", "value")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connect")


@pytest.fixture(scope="module", params=["in a driver", pytest.param("alone", marks=pytest.mark.nightly)])
def address(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    """A server in the process of the tests' session, and Spark's own program, without a Python driver."""
    if request.param == "alone":
        with connect_server(home) as address:
            yield address
        return
    session: SparkSession = request.getfixturevalue("spark")
    yield f"sc://127.0.0.1:{session.conf.get('spark.connect.grpc.binding.port')}"


@pytest.fixture(scope="module")
def client(home: Path, address: str) -> Iterator[Driver]:
    running = Driver(home, {"remote": address}, program=REMOTE)
    try:
        yield running
    finally:
        running.close()


def run_pipeline(project: Path, home: Path, address: str) -> None:
    program = Path(pyspark.__file__).parent / "bin" / "spark-pipelines"
    ran = subprocess.run(
        [str(program), "run", "--remote", address],
        cwd=project, env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


def values(platform: EventSQL, topic: str) -> list[bytes]:
    platform.transfer.run_once()
    return [event.value for event in platform.reader.read(topic)]


def test_a_server_listens_on_loopback_alone(address: str) -> None:
    port = int(address.rpartition(":")[2])
    listening = [
        {each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        for process in psutil.Process().children(recursive=True)
    ]
    (of_server,) = [found for found in listening if port in {each.port for each in found}]
    assert {each.ip for each in of_server} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_reads_what_a_session_of_its_own_would(client: Driver, platform: EventSQL, orders: str, dsn: str) -> None:
    options = {"dsn": dsn, "subscribe": orders, "startingOffsets": "990", "includeHeaders": "true"}
    rows = json.loads(
        client.do("read", columns=["offset", "partition", "key", "hex(value)", "headers"], options=options)
    )
    assert rows == [
        [event.id, event.partition, event.key, event.value.hex().upper(), dict(event.metadata)]
        for event in platform.reader.read(orders, after=989)
    ]
    assert len(rows) == 11


def test_fetches_the_columns_that_are_asked_for(client: Driver, orders: str, dsn: str) -> None:
    options = {"dsn": dsn, "subscribe": orders, "partition": "2"}
    schema = "offset bigint, partition int"
    rows = json.loads(client.do("read", columns=["*"], options=options, schema=schema))
    assert rows
    assert {tuple(map(type, row)) for row in rows} == {(int, int)}
    assert {partition for _, partition in rows} == {2}


@pytest.mark.nightly
def test_a_run_s_log_and_metadata_have_the_progress_of_its_own_queries(client: Driver) -> None:
    seen = json.loads(client.do("progress"))
    assert seen["metadata"]["spark jobs"] >= 1
    assert seen["metadata"]["spark failed tasks"] == 0
    assert [(stage["in"], stage["out"]) for stage in seen["metadata"]["spark rows by stage"]][-1][0] == 14
    assert any("14 rows in" in line for line in seen["lines"])


def test_a_block_that_fails_ends_its_query_on_the_server(client: Driver) -> None:
    statuses = json.loads(client.do("fail"))
    assert statuses
    assert set(statuses) <= {"COMPLETE", "FAILED"}


def test_a_view_in_sql_reads_a_topic(client: Driver, orders: str, dsn: str) -> None:
    options = f"dsn '{dsn}', subscribe '{orders}', startingOffsets '901'"
    statements = [
        f"CREATE OR REPLACE TEMPORARY VIEW recent USING eventsql OPTIONS ({options})",
        "SELECT count(*) FROM recent WHERE offset > 950",
    ]
    assert json.loads(client.do("sql", statements=statements)) == [[50]]


def test_a_client_reads_all_shards(client: Driver, databases: Databases) -> None:
    urls = databases(2)
    with EventSQL(*urls, transfer=False) as shards:
        shards.registry.register_topic(Topic("orders"))
        shards.publisher.publish_all(Publication("orders", b"%d" % number, key=str(number)) for number in range(20))
        shards.transfer.run_once()
        wanted = sorted([shard.name, event.key] for shard in shards.shards for event in shard.reader.read("orders"))
    rows = json.loads(
        client.do("read", columns=["shard", "key"], options={"dsn": " ".join(urls), "subscribe": "orders"})
    )
    assert sorted(rows) == wanted
    assert len(wanted) == 20


@pytest.mark.nightly
def test_a_repeated_write_is_published_once(client: Driver, platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("fares", partitions=3))
    options = {"dsn": dsn, "topic": "fares", "writerId": "connect", "batchId": "7"}
    assert [client.do("write", events=30, options=options) for _ in range(2)] == ["written", "written"]
    assert sorted(map(int, values(platform, "fares"))) == list(range(30))


@pytest.mark.nightly
def test_a_stream_copies_a_topic(client: Driver, platform: EventSQL, orders: str, dsn: str, checkpoint: Path) -> None:
    platform.registry.register_topic(Topic("copies"))
    answer = client.do(
        "copy",
        reading={"dsn": dsn, "subscribe": orders, "startingOffsets": "earliest"},
        writing={"dsn": dsn, "topic": "copies"},
        checkpoint=str(checkpoint),
    )
    assert answer == "copied"
    assert sorted(values(platform, "copies")) == sorted(values(platform, orders))


@pytest.mark.nightly
def test_a_batch_of_foreach_batch_that_has_other_events_is_refused_instead_of_losing_them(
    client: Driver, platform: EventSQL, orders: str, dsn: str, tmp_path: Path
) -> None:
    platform.registry.register_topic(Topic("copies"))
    writing = {"dsn": dsn, "topic": "copies", "writerId": "copy"}

    def copy(checkpoint: str, **options: str) -> str:
        given = {"dsn": dsn, "subscribe": orders, **options}
        return client.do("copy_batches", reading=given, writing=writing, checkpoint=str(tmp_path / checkpoint))

    assert copy("first", startingOffsets="501") == "copied"
    assert copy("the same again", startingOffsets="501") == "copied"
    # Without its checkpoint, the stream's batch 0 has as many events, and others.
    platform.publisher.publish_all(Publication(orders, b"later", key="key-1") for _ in range(500))
    platform.transfer.run_once()
    assert "ConfigurationError" in copy("second", startingOffsets="1001")
    assert len(values(platform, "copies")) == 500


def test_an_error_of_ours_is_found_in_the_clients(client: Driver, platform: EventSQL, dsn: str) -> None:
    platform.registry.register_topic(Topic("orders"))
    answer = client.do("read", columns=["*"], options={"dsn": dsn, "subscribe": "rides"})
    assert answer.startswith("failed: TopicNotFoundError: ")
    assert "'rides'" in answer


@pytest.mark.nightly
def test_a_declarative_pipeline_goes_on_where_it_was(  # noqa: PLR0917 - fixtures
    client: Driver,
    home: Path,
    address: str,
    platform: EventSQL,
    orders: str,
    publish: Callable[..., None],
    dsn: str,
    tmp_path: Path,
) -> None:
    platform.registry.register_topic(Topic("copies"))
    specification = {
        "name": "orders",
        "storage": (tmp_path / "storage").as_uri(),
        "libraries": [{"glob": {"include": "transformations/**"}}],
        "configuration": {"eventsql.dsn": dsn},
    }
    (tmp_path / "storage").mkdir()
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "orders.py").write_text(PIPELINE)
    (tmp_path / "spark-pipeline.yml").write_text(json.dumps(specification))
    statements = [
        # A session keeps the list of a table's files.
        "REFRESH TABLE seen",
        "REFRESH TABLE per_key",
        "SELECT (SELECT count(DISTINCT offset) FROM seen), count(*), (SELECT sum(count) FROM per_key) FROM seen",
    ]
    for events in (1_000, 1_010):
        run_pipeline(tmp_path, home, address)
        assert json.loads(client.do("sql", statements=statements)) == [[events] * 3]
        assert sorted(values(platform, "copies")) == sorted(values(platform, orders))
        publish(10, first=5_000)
