"""A code location for tests: a consumer that writes an effects table, and one that takes its time over each event."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence

import dagster as dg

from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    HistoryRetention,
    RunLimits,
    build_housekeeping_schedule,
    build_transfer_schedule,
    consumer_asset,
)
from eventsql_orchestration.database import Connection

ORDERS = Topic("orders", 2)
SLOW_BATCH = 10
AT_ONCE = RunLimits(max_wait=0.0, drain_seconds=0.0)
"""The limits of a consumer whose ticks wait for no further event, and whose runs do not either."""


def record(events: Sequence[Event], connection: Connection) -> None:
    """One row for each time that an event takes effect."""
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO effect (id, partition) VALUES (%s, %s)", [(e.id, e.partition) for e in events])


def cut_off(batch: int) -> Callable[[Sequence[Event], Connection], None]:
    """A handler that records, and whose connection breaks in the batch of this number, from 1."""
    calls = itertools.count(1)

    def handle(events: Sequence[Event], connection: Connection) -> None:
        record(events, connection)
        if next(calls) == batch:
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    return handle


@consumer_asset(
    topic=ORDERS,
    consumer="ledger",
    partitioned=True,
    limits=RunLimits(max_events=100, max_wait=0.0, drain_seconds=0.0),
    options=AssetOptions(description="Effects of orders."),
)
def ledger(events: Sequence[Event], connection: Connection) -> None:
    record(events, connection)


@consumer_asset(
    topic=ORDERS,
    consumer="slow",
    batch=SLOW_BATCH,
    limits=RunLimits(max_events=1_000, max_wait=0.0, drain_seconds=0.0, lease=2.0),
)
def slow(events: Sequence[Event], connection: Connection) -> None:
    """Writes at once, and commits late: a process that is killed meanwhile must leave nothing of the batch."""
    record(events, connection)
    time.sleep(float(os.environ.get("EVENTSQL_TEST_DELAY", "0")))


eager = consumer_asset(topic=Topic("rides"), consumer="eager", name="eager", limits=AT_ONCE)(record)
transfer = build_transfer_schedule(limit_seconds=120.0)
housekeeping = build_housekeeping_schedule(
    HistoryRetention(internal_hours=0.0), default_status=dg.DefaultScheduleStatus.STOPPED
)


@dg.sensor(target=[ledger.asset], default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=1)
def somebody_elses() -> dg.SkipReason:
    """A sensor that does not belong to this package."""
    return dg.SkipReason("nothing to do")


defs = dg.Definitions(
    assets=[ledger.asset, slow.asset],
    jobs=[ledger.job, slow.job],
    sensors=[*ledger.sensors, *slow.sensors, somebody_elses],
    schedules=[transfer, housekeeping],
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
