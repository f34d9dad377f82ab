"""A client of Spark Connect in a process of its own: it obeys orders, as driver.py does.

A process has sessions of one kind only, so the tests' own cannot be it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from eventsql_orchestration.dagster.io import spark_progress as module
from eventsql_orchestration.dagster.io.spark_progress import SparkProgress, spark_progress
from eventsql_orchestration.spark import FORMAT
from tests.spark.orders import obey
from tests.spark.streams import run_to_end
from tests.waiting import wait_until

# The tests are about the figures, and a busy machine has them late.
module.ANSWER_SECONDS = 60.0  # type: ignore[misc]


def read(spark: SparkSession, *, columns: list[str], options: dict[str, str], schema: str | None = None) -> str:
    """The rows of a read, in the order of their offsets."""
    reader = spark.read.format(FORMAT).options(**options)
    frame = (reader if schema is None else reader.schema(schema)).load()
    return json.dumps([list(row) for row in frame.orderBy("offset").selectExpr(*columns).collect()])


def sql(spark: SparkSession, *, statements: list[str]) -> str:
    """The rows of the last of some statements."""
    rows = [spark.sql(statement).collect() for statement in statements]
    return json.dumps([list(row) for row in rows[-1]])


def write(spark: SparkSession, *, events: int, options: dict[str, str]) -> str:
    """Write events whose value is their number."""
    rows = spark.range(0, events, 1, 2).selectExpr("cast(id AS string) AS value", "concat('key-', id % 3) AS key")
    rows.write.format(FORMAT).options(**options).mode("append").save()
    return "written"


def copy(spark: SparkSession, *, reading: dict[str, str], writing: dict[str, str], checkpoint: str) -> str:
    """Copy what is new in a topic to another, as a stream."""
    rows = spark.readStream.format(FORMAT).options(**reading).load().selectExpr("key", "value")
    run_to_end(
        rows.writeStream.format(FORMAT).options(checkpointLocation=checkpoint, **writing).trigger(availableNow=True)
    )
    return "copied"


def copy_batches(spark: SparkSession, *, reading: dict[str, str], writing: dict[str, str], checkpoint: str) -> str:
    """The same with a function that writes each batch."""

    def publish(frame: DataFrame, batch: int) -> None:
        frame.write.format(FORMAT).options(**writing, batchId=batch).mode("append").save()

    rows = spark.readStream.format(FORMAT).options(**reading).load().selectExpr("key", "value")
    run_to_end(
        rows.writeStream.foreachBatch(publish).option("checkpointLocation", checkpoint).trigger(availableNow=True)
    )
    return "copied"


def progress(spark: SparkSession) -> str:
    """What a run of Dagster logs of a query, and its metadata."""
    lines: list[str] = []
    with spark_progress(_context(lines), spark, every=0.05) as progress:
        spark.range(1000).selectExpr("id % 7 AS key").groupBy("key").count().collect()
        # The server's figures come a moment after the answer.
        wait_until(lambda: any(stage.rows_in for stage in progress.stages()), "figures")
    spark.range(5).count()  # not in the block
    return json.dumps({"metadata": progress.metadata(), "lines": lines})


def fail(spark: SparkSession) -> str:
    """Leave a block while a query runs that would not end, and wait until the server has ended it."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    def interrupt_begun(progress: SparkProgress) -> None:
        wait_until(progress.stages, "the server has begun the query")
        os.kill(os.getpid(), signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    try:
        with spark_progress(_context([]), spark, every=0.05) as progress:
            threading.Thread(target=interrupt_begun, args=[progress], daemon=True).start()
            spark.range(10**15).selectExpr("max(id % 7)").collect()
    except InterruptedError:
        wait_until(lambda: all(stage.status != "ACTIVE" for stage in progress.stages()), "the server ends the query")
        return json.dumps([stage.status for stage in progress.stages()])
    return "not interrupted"


def _context(lines: list[str]) -> Any:
    """The parts of a run's context that `spark_progress` uses."""
    log = SimpleNamespace(info=lambda text, *arguments: lines.append(text % arguments))
    return SimpleNamespace(run=SimpleNamespace(run_id="connected"), log=log)


if __name__ == "__main__":
    obey(globals(), lambda given: SparkSession.builder.remote(given["settings"]["remote"]).getOrCreate())
