"""One Spark session for all of Spark's tests, on two cores, with three attempts for each task, and Spark Connect."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition

from eventsql_orchestration import EventSQL, OffsetRange, Publication, Topic
from eventsql_orchestration.model import Retention
from eventsql_orchestration.orchestration.local_processes import free_port
from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.conftest import Prepared
from tests.spark.sessions import started


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Spark's Java keeps the environment that it starts with, and these would stand in for a missing option.
    for name in ("EVENTSQL_DSN", "EVENTSQL_SCHEMA"):
        os.environ.pop(name, None)
    # Left to itself, the UI listens on every interface.
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    home = tmp_path_factory.mktemp("spark")
    ensure_java(home)
    settings = {
        "spark.master": "local[2,3]",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(free_port(0)),
        # Clients of Spark Connect ask it for progress.
        "spark.ui.enabled": "true",
        "spark.ui.port": str(free_port(0)),
    }
    session = started(SparkSession.Builder().config(map={**spark_config(**settings)}))
    yield session
    session.stop()


@pytest.fixture
def publish(platform: EventSQL) -> Callable[..., None]:
    """Publishes events, some without key or metadata: `publish(5, first=10)`, to another topic with `topic=`."""
    return functools.partial(publish_some, platform)


def publish_some(platform: EventSQL, events: int, *, topic: str = "orders", first: int = 0) -> None:
    platform.publisher.publish_all(
        Publication(
            topic,
            f"válue {number}".encode() + bytes([number % 256]),
            key=None if number % 5 == 0 else f"kéy-{number % 7}",
            metadata={} if number % 3 == 0 else {"source": "wéb", "number": str(number), "": '\\"{}'},
        )
        for number in range(first, first + events)
    )
    platform.transfer.run_once()


def drop_the_first_events(platform: EventSQL, topic: str) -> int:
    """Let retention drop all events of a topic, publish others, and give the first offset that is left."""
    platform.registry.set_retention(topic, Retention(events=10))
    platform.retention.run_once()
    publish_some(platform, 20, topic=topic, first=1_000)
    platform.retention.run_once()
    return platform.reader.read(topic)[0].id


def ranges_of(splits: Iterable[InputPartition]) -> list[OffsetRange]:
    """The ranges of splits, each of a split that has several."""
    return [piece.offsets for split in splits for piece in split.value]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", partitions=4))
    for first in range(0, 1_000, 100):
        publish_some(platform, 100, first=first)


@pytest.fixture
def template(template: str, prepared: Prepared, request: pytest.FixtureRequest) -> str:
    return prepared(prepare)[0] if "orders" in request.fixturenames else template


@pytest.fixture
def orders(platform: EventSQL) -> str:
    """A topic of 1,000 events over 4 partitions, in 10 publications."""
    return "orders"


@pytest.fixture
def read(spark: SparkSession, dsn: str) -> Callable[..., DataFrame]:
    """Reads a topic of the test's database: `read(topic, option=value)`, or some of its columns with `schema=`."""

    def load(topic: str, *, schema: str | None = None, **options: object) -> DataFrame:
        reader = spark.read.format(FORMAT).options(dsn=dsn, subscribe=topic)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**{name: str(value) for name, value in options.items()}).load()

    return load


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[None]:
    """Spark pushes filters to sources that are written in Python."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.fixture
def write(dsn: str) -> Callable[..., None]:
    """Writes to the test's database: `write(rows, topic=…, option=value)`."""

    def save(rows: DataFrame, *, mode: str = "append", **options: object) -> None:
        values = {name: str(value) for name, value in options.items()}
        rows.write.format(FORMAT).options(dsn=dsn, **values).mode(mode).save()

    return save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"
