"""A Spark driver in a process of its own, to be killed, or to be on a cluster: it obeys orders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.spark.orders import obey
from tests.spark.sessions import started
from tests.spark.streams import run_to_end

BEFORE_PAUSE = 45_000
"""Events of the task that pauses: more than four of Spark's batches, so that some of them are staged by then."""


def batch(spark: SparkSession, *, dsn: str, topic: str, events: int, options: dict[str, str]) -> str:
    """Write events whose value is their number."""
    rows = spark.range(0, events, 1, 2).selectExpr("cast(id AS string) AS value")
    rows.write.format(FORMAT).options(dsn=dsn, topic=topic, **options).mode("append").save()
    return "written"


def stream(spark: SparkSession, *, dsn: str, source: str, topic: str, checkpoint: str, options: dict[str, str]) -> str:
    """Copy what is new in a topic to another, as two tasks."""
    reading = {"dsn": dsn, "subscribe": source, "startingOffsets": "earliest", "minPartitions": "2"}
    rows = spark.readStream.format(FORMAT).options(**reading).load()
    run_to_end(
        rows.selectExpr("key", "value")
        .writeStream.format(FORMAT)
        .options(dsn=dsn, topic=topic, checkpointLocation=checkpoint, **options)
        .trigger(availableNow=True)
    )
    return "copied"


def copy(spark: SparkSession, *, dsn: str, source: str, topic: str) -> str:
    """Copy a topic to another."""
    rows = spark.read.format(FORMAT).options(dsn=dsn, subscribe=source, numPartitions="4").load()
    rows.select("key", "value").write.format(FORMAT).options(dsn=dsn, topic=topic).mode("append").save()
    return "copied"


def paused(spark: SparkSession, *, dsn: str, topic: str, events: int, paused: str, resume: str) -> str:
    """Write events; the first attempt of the first task stages some, makes a file, and waits for another one."""
    rows = spark.createDataFrame(_numbers(spark, events, Path(paused), Path(resume)), "value string")
    rows.write.format(FORMAT).options(dsn=dsn, topic=topic, writerId=paused).mode("append").save()
    return "written"


def _numbers(spark: SparkSession, events: int, paused: Path, resume: Path) -> Any:
    half = events // 2

    def numbers(parts: Iterable[int]) -> Iterator[tuple[str]]:
        context = TaskContext.get()
        assert context is not None
        for part in parts:
            for number in range(part * half, part * half + half):
                if part == 0 and number == BEFORE_PAUSE and context.attemptNumber() == 0:
                    paused.write_text(str(os.getpid()))
                    while not resume.exists():
                        time.sleep(0.02)
                # A task stages megabytes at once.
                yield (f"{number:0200}",)

    return spark.sparkContext.parallelize([0, 1], 2).mapPartitions(numbers)


def _begin(given: dict[str, Any]) -> SparkSession:
    ensure_java(Path(given["home"]))
    return started(SparkSession.Builder().config(map={**spark_config(**given["settings"])}))


if __name__ == "__main__":
    obey(globals(), _begin)
