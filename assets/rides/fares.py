"""Fares: Spark sums up what completed rides earned per zone and quarter of an hour, and publishes it as events."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import functions as f

from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Event, Topic
from eventsql_orchestration.dagster import (
    EventSQLResource,
    consumer_asset,
    publish_dataframe,
    range_asset,
)
from eventsql_orchestration.database import Connection
from eventsql_orchestration.log.claims import Claim

ZONE_FARES = Topic("zone_fares", partitions=2)
"""What completed rides add to a zone's quarter of an hour; keyed by zone."""

ORDER_SCHEMA = "order_id string, change string, zone string, price_cents long, at timestamp"


@range_asset(
    topic=RIDE_ORDERS,
    consumer="zone_fares",
    publishes=ZONE_FARES,
    max_events=50_000,
    max_wait=5.0,
    group_name="rides",
    description="Rides and fares per zone and quarter of an hour, as Spark sums up a range of ride_orders.",
)
def zone_fares(
    context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource, spark: LazyPySparkResource
) -> Mapping[str, Any]:
    """Sum up the claimed range and publish the sums, together with the consumer's offset."""
    events = eventsql.read_range(spark.spark_session, claim.remaining)
    sums = (
        events.select(f.from_json(f.col("value").cast("string"), ORDER_SCHEMA).alias("order"))
        .where("order.change = 'completed'")
        .groupBy("order.zone", f.window("order.at", "15 minutes").start.alias("quarter_hour"))
        .agg(f.count("*").alias("rides"), f.sum("order.price_cents").alias("fares_cents"))
    )
    return publish_dataframe(
        context,
        sums.select(f.col("zone").alias("key"), f.to_json(f.struct(*sums.columns)).alias("value")),
        eventsql=eventsql,
        topic=ZONE_FARES.name,
        claim=claim,
    )


_ADD = """
INSERT INTO rides.zone_fares (zone, quarter_hour, rides, fares_cents)
VALUES (%(zone)s, %(quarter_hour)s, %(rides)s, %(fares_cents)s)
ON CONFLICT (zone, quarter_hour) DO UPDATE
SET rides = zone_fares.rides + excluded.rides, fares_cents = zone_fares.fares_cents + excluded.fares_cents
"""


@consumer_asset(
    topic=ZONE_FARES,
    consumer="zone_fares_table",
    partitioned=True,
    max_wait=2.0,
    group_name="rides",
    description="Table rides.zone_fares: all rides and fares per zone and quarter of an hour.",
)
def zone_fares_table(events: Sequence[Event], connection: Connection) -> None:
    """Add the events' sums to the table."""
    with connection.cursor() as cursor:
        cursor.executemany(_ADD, [json.loads(event.value) for event in events])


@dg.asset_check(
    asset=zone_fares_table.key,
    description="The table holds what plain Python sums up over the whole log of ride_orders.",
)
def zone_fares_table_matches_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Compute the sums without Spark and compare row by row."""
    platform = eventsql.platform
    expected: dict[tuple[str, datetime], tuple[int, int]] = {}
    for batch in platform.reader.stream(RIDE_ORDERS.name):
        for event in batch:
            order = json.loads(event.value)
            if order["change"] == "completed":
                at = datetime.fromisoformat(order["at"])
                quarter = at.replace(minute=at.minute - at.minute % 15, second=0, microsecond=0)
                rides, cents = expected.get((order["zone"], quarter), (0, 0))
                expected[order["zone"], quarter] = (rides + 1, cents + order["price_cents"])
    with platform.database.transaction() as connection:
        rows = connection.execute("SELECT zone, quarter_hour, rides, fares_cents FROM rides.zone_fares")
        found = {(zone, quarter): (rides, cents) for zone, quarter, rides, cents in rows}
    differing = sum(found.get(key) != sums for key, sums in expected.items())
    return dg.AssetCheckResult(
        passed=found == expected,
        metadata={
            "rows": len(expected),
            "rows that differ": differing,
            "rows beyond the log": len(found.keys() - expected.keys()),
        },
    )
