"""The code location that `eventsql bench dagster` measures. The environment of its processes describes it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import (
    ConsumerDefinition,
    EventSQLResource,
    RunLimits,
    build_transfer_schedule,
    consumer_asset,
)
from eventsql_orchestration.database import Connection

VARIABLE: Final = "EVENTSQL_BENCH_DAGSTER"
"""JSON: the arguments of `recording_consumer`."""

TRANSFER_VARIABLE: Final = "EVENTSQL_BENCH_TRANSFER"
"""Set if the location has the schedule of the transfer."""

CONSUMER: Final = "bench"


def recording_consumer(
    *, topic: str, partitions: int, record: str, limits: Mapping[str, Any], **options: Any
) -> ConsumerDefinition:
    """A consumer whose function writes a line to the file `record` for each event.

    The line has the time of the publication, the time of the call, and the id of the process. `limits` are the
    arguments of `RunLimits`, and `options` the arguments of `consumer_asset`.
    """

    def bench(events: Sequence[Event], connection: Connection) -> None:  # noqa: ARG001 - what consumers take
        now = time.time()
        with Path(record).open("a", encoding="utf-8") as file:
            file.write("".join(f"{event.value.decode()} {now} {os.getpid()}\n" for event in events))

    asset = consumer_asset(
        topic=Topic(topic, partitions), consumer=CONSUMER, partitioned=True, name=CONSUMER,
        limits=RunLimits(**limits), **options,
    )  # fmt: skip
    return asset(bench)


if VARIABLE in os.environ:
    _consumer = recording_consumer(**json.loads(os.environ[VARIABLE]))
    defs = dg.Definitions(
        assets=[_consumer.asset],
        jobs=[_consumer.job],
        sensors=_consumer.sensors,
        schedules=[build_transfer_schedule()] if TRANSFER_VARIABLE in os.environ else [],
        resources={
            "eventsql": EventSQLResource(
                dsn=dg.EnvVar("EVENTSQL_DSN"), db_schema=os.environ.get("EVENTSQL_SCHEMA", "eventsql")
            )
        },
    )
