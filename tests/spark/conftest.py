"""One Spark session for all of Spark's tests, on two cores, with three attempts for each task."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    # Spark's Java keeps the environment that it starts with, and these would stand in for a missing option.
    for name in ("EVENTSQL_DSN", "EVENTSQL_SCHEMA"):
        os.environ.pop(name, None)
    home = tmp_path_factory.mktemp("spark")
    ensure_java(home)
    builder = SparkSession.Builder()
    settings = {"spark.master": "local[2,3]", "spark.sql.warehouse.dir": str(home / "warehouse")}
    for name, value in spark_config(**settings).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


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
def write(dsn: str) -> Callable[..., None]:
    """Writes to the test's database: `write(rows, topic=…, option=value)`."""

    def save(rows: DataFrame, *, mode: str = "append", **options: object) -> None:
        values = {name: str(value) for name, value in options.items()}
        rows.write.format(FORMAT).options(dsn=dsn, **values).mode(mode).save()

    return save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"
