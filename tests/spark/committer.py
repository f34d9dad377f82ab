"""What the tasks and the driver of a batch write do, without Spark: a process of its own, to be killed at any step.

Takes the URL of a database and a number of events on standard input, a line each.
"""

from __future__ import annotations

import sys

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.encoder import Encoder
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import WriteTarget, stage

WRITER = {"writerId": "nightly", "batchId": "7"}


def publish(dsn: str, events: int) -> bool:
    """Publish events whose value is their number to the topic `orders`, as two tasks; False if it was done before."""
    source = Source(dsn, "eventsql", "the database")
    targets = [WriteTarget(source, Encoder({"orders": 4}, "orders", {}))]
    halves = (range(events // 2), range(events // 2, events))
    attempts = [stage(targets, [pa.record_batch({"value": [b"%d" % number for number in half]})]) for half in halves]
    with Publications(source) as publications:
        try:
            return publications.publish(WRITER["writerId"], int(WRITER["batchId"]), attempts)
        except BaseException:
            publications.discard(attempts)
            raise


if __name__ == "__main__":
    publish(sys.stdin.readline().strip(), int(sys.stdin.readline()))
