"""A code location for backfills: a consumer with an effects table, one that fails on demand, one over whole ranges."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import dagster as dg

from eventsql_orchestration import Event
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    build_backfill,
    consumer_asset,
    range_asset,
)
from eventsql_orchestration.database import Connection
from tests.dagster.location import ORDERS, record

POISON = b"poison"
BATCH = 10


@consumer_asset(
    topic=ORDERS, consumer="ledger", partitioned=True, batch=BATCH, limits=RunLimits(max_events=25, lease=3.0)
)
def ledger(events: Sequence[Event], connection: Connection) -> None:
    record(events, connection)
    time.sleep(float(os.environ.get("EVENTSQL_TEST_DELAY", "0")))


@consumer_asset(topic=ORDERS, consumer="fragile", batch=BATCH, max_attempts=2, limits=RunLimits(max_events=25))
def fragile(events: Sequence[Event], connection: Connection) -> None:
    record(events, connection)
    if any(event.value == POISON for event in events):
        raise ValueError("it is poison")


@range_asset(
    topic=ORDERS, consumer="ranges", publishes="sums", limits=RangeLimits(max_events=25), options=AssetOptions(kinds=())
)
def ranges(claim: Claim, eventsql: EventSQLResource) -> dict[str, int]:
    platform = eventsql.platform
    with platform.database.transaction() as connection:
        platform.claims.check(connection, claim)
        record(platform.reader.read(claim.range.topic, after=claim.position, upto=claim.range.upto), connection)
        platform.claims.commit(connection, claim)
    return {"sum": claim.events}


CONSUMERS = [ledger, fragile, ranges]
ledger_backfill, fragile_backfill, ranges_backfill = BACKFILLS = [build_backfill(consumer) for consumer in CONSUMERS]

defs = dg.Definitions(
    assets=[*(consumer.asset for consumer in CONSUMERS), *(backfill.asset for backfill in BACKFILLS)],
    jobs=[*(consumer.job for consumer in CONSUMERS), *(job for backfill in BACKFILLS for job in backfill.jobs)],
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
