"""The code location that `eventsql bench dagster` measures. It is described by the environment of its processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, cast

import dagster as dg

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource, consumer_asset
from eventsql_orchestration.database import Connection

VARIABLE: Final = "EVENTSQL_BENCH_DAGSTER"
"""JSON: `topic`, `partitions`, `sensor`, `drain` and `idle` (seconds), and `record`, which the function writes."""

CONSUMER: Final = "bench"


def measured(*, topic: str, partitions: int, sensor: str, drain: float, idle: float, record: str) -> ConsumerDefinition:
    """A consumer whose function writes down, for each event, when it was published, when it was given it, and where."""

    def bench(events: Sequence[Event], connection: Connection) -> None:  # noqa: ARG001 - what consumers take
        now = time.time()
        with Path(record).open("a", encoding="utf-8") as file:
            file.write("".join(f"{event.value.decode()} {now} {os.getpid()}\n" for event in events))

    return consumer_asset(
        topic=Topic(topic, partitions), consumer=CONSUMER, partitioned=True, name=CONSUMER,
        max_wait=0.0, drain_seconds=drain, drain_idle=idle, sensor=cast("Literal['partition', 'consumer']", sensor),
    )(bench)  # fmt: skip


if VARIABLE in os.environ:
    _consumer = measured(**json.loads(os.environ[VARIABLE]))
    defs = dg.Definitions(
        assets=[_consumer.asset],
        jobs=[_consumer.job],
        sensors=_consumer.sensors,
        resources={
            "eventsql": EventSQLResource(
                dsn=dg.EnvVar("EVENTSQL_DSN"), db_schema=os.environ.get("EVENTSQL_SCHEMA", "eventsql")
            )
        },
    )
