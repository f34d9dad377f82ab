"""A code location for kills: consumers of events and of ranges, with backfills, whose runs Dagster retries."""

from __future__ import annotations

import time
from collections.abc import Sequence

import dagster as dg

from eventsql_orchestration import Event, Publication, Topic
from eventsql_orchestration.consuming.claims import Claim
from eventsql_orchestration.dagster import (
    AssetOptions,
    EventSQLResource,
    RangeLimits,
    RunLimits,
    TickOptions,
    build_backfill,
    consumer_asset,
    range_asset,
)
from eventsql_orchestration.database import Connection

ORDERS, SUMS = Topic("orders", 2), Topic("sums")
LEASE = 5.0
RETRIED = {"dagster/max_retries": "2"}
TICKS = TickOptions(adopt_timeout=2 * LEASE)

EFFECTS = """
CREATE TABLE effect_of (
    position bigserial, consumer text NOT NULL, id bigint NOT NULL, partition int NOT NULL
)
"""


def record(consumer: str, events: Sequence[Event], connection: Connection) -> None:
    connection.cursor().executemany(
        "INSERT INTO effect_of (consumer, id, partition) VALUES (%s, %s, %s)",
        [(consumer, event.id, event.partition) for event in events],
    )
    # Time for a kill between the effects and their commit.
    time.sleep(0.2)


@consumer_asset(
    topic=ORDERS, consumer="ledger", partitioned=True, batch=5, ticks=TICKS, options=AssetOptions(tags=RETRIED),
    limits=RunLimits(max_wait=0.0, max_events=40, drain_seconds=5.0, lease=LEASE),
)  # fmt: skip
def ledger(events: Sequence[Event], connection: Connection) -> None:
    record("ledger", events, connection)


@range_asset(
    topic=ORDERS, consumer="totals", partitioned=True, publishes="sums", ticks=TICKS,
    options=AssetOptions(tags=RETRIED, kinds=()),
    limits=RangeLimits(max_wait=0.0, max_events=20, drain_seconds=5.0, lease=LEASE),
)  # fmt: skip
def totals(claim: Claim, eventsql: EventSQLResource) -> dict[str, int]:
    platform = eventsql.platform
    events = platform.claims.read(claim)
    with platform.database.transaction() as connection:
        platform.claims.check(connection, claim)
        record("totals", events, connection)
        platform.publisher.publish(Publication("sums", b"%d" % len(events), key=str(claim.id)), connection=connection)
        platform.claims.commit(connection, claim)
    return {"events": len(events)}


CONSUMERS = [ledger, totals]
ledger_backfill, totals_backfill = BACKFILLS = [build_backfill(consumer) for consumer in CONSUMERS]

defs = dg.Definitions(
    assets=[*(consumer.asset for consumer in CONSUMERS), *(backfill.asset for backfill in BACKFILLS)],
    jobs=[*(consumer.job for consumer in CONSUMERS), *(job for backfill in BACKFILLS for job in backfill.jobs)],
    sensors=[sensor for consumer in CONSUMERS for sensor in consumer.sensors],
    # Dagster's own backfills run the job of all assets. A process for each step would take seconds of processor time.
    executor=dg.in_process_executor,
    resources={"eventsql": EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"))},
)
