"""What the tasks and the driver of a write over shards do, without Spark; in processes too, which are killed."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types

from eventsql_orchestration.spark.commit_protocol import Publications
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt, ClaimHold, stage

KEYS = [f"key {number}" for number in range(24)]


def source_of(dsns: list[str]) -> Source:
    return Source.of(dsns, "eventsql")


def rows(first: int, events: int) -> pa.RecordBatch:
    """Events numbered on from `first`, under the keys in turn."""
    numbers = range(first, first + events)
    return pa.record_batch(
        {
            "value": pa.array([b"%d" % number for number in numbers], pa.binary()),
            "key": pa.array([KEYS[number % len(KEYS)] for number in numbers], pa.string()),
        }
    )


def staged(publications: Publications, first: int, events: int) -> list[Attempt]:
    """Two attempts, each with every other row; with rows of some keys alone if there are few events."""
    targets = publications.write_targets("orders", {})
    whole = rows(first, events)
    halves = (whole.slice(0, events // 2), whole.slice(events // 2))
    return [stage(targets, [half]) for half in halves]


def publish(dsns: list[str], first: int, events: int, claim: ClaimHold | None = None) -> bool:
    """Publish as batch 7 of the writer `nightly`; False if it was done before."""
    with Publications(source_of(dsns)) as publications:
        attempts = staged(publications, first, events)
        try:
            return publications.publish("nightly", 7, attempts, claim)
        except BaseException:
            # As Spark does after a commit that failed.
            publications.discard(attempts)
            raise


def start(dsns: list[str], first: int, events: int) -> BaseProcess:
    """A process that publishes, forked from one that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.spark.spreading"])
    process = context.Process(target=publish, args=(dsns, first, events), daemon=True)
    process.start()
    return process
