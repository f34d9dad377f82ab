"""A Spark driver in a process of its own, to be killed, or to be on a cluster: it obeys orders."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
from pyspark import TaskContext
from pyspark.sql import SparkSession

from eventsql_orchestration.spark import FORMAT, spark_config
from eventsql_orchestration.spark.java import ensure_java
from tests.spark.orders import obey
from tests.spark.sessions import started
from tests.spark.streams import run_to_end
from tests.waiting import PATIENCE, wait_until

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
                    wait_until(resume.exists, "the order to resume", seconds=5 * PATIENCE)
                # A task stages megabytes at once.
                yield (f"{number:0200}",)

    return spark.sparkContext.parallelize([0, 1], 2).mapPartitions(numbers)


def differing(spark: SparkSession, *, dsn: str, topic: str, events: int, folder: str) -> str:
    """Write events through a shuffle, with new keys in each attempt. All tasks but the first pause behind the shuffle.

    A paused task makes a file, and waits for the file `resume`.
    """
    schema, home = "key string, value string", Path(folder)

    def keyed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Each of the two tasks waits for the other, so that both executors keep a part of the shuffle.
        (home / f"shuffling-{_part()}").touch()
        wait_until(lambda: all((home / f"shuffling-{part}").exists() for part in range(2)), "both tasks")
        for batch in batches:
            keys = [str(uuid.uuid4()) for _ in range(batch.num_rows)]
            yield pa.record_batch({"key": pa.array(keys), "value": batch.column(0).cast(pa.string())})

    def pausing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if _part() > 0 and not (home / "resume").exists():
                (home / f"paused-{_part()}").write_text(str(os.getpid()))
                wait_until((home / "resume").exists, "the order to resume", seconds=5 * PATIENCE)
            yield batch

    rows = spark.range(0, events, 1, 2).mapInArrow(keyed, schema).repartition(4, "key").mapInArrow(pausing, schema)
    rows.write.format(FORMAT).options(dsn=dsn, topic=topic).mode("append").save()
    return "written"


def _part() -> int:
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def _begin(given: dict[str, Any]) -> SparkSession:
    ensure_java(Path(given["home"]))
    return started(SparkSession.Builder().config(map={**spark_config(**given["settings"])}))


if __name__ == "__main__":
    obey(globals(), _begin)
