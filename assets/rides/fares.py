"""Fares and demand: Spark sums up orders and rides per zone and quarter of an hour, and publishes it as events."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from assets.range_sums import SPARK_LIMITS, check_result, publish_sums
from assets.rides import sums, verification
from assets.rides.effects import ZONE_FARES, add_fares
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Claim, Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset, range_asset


@range_asset(
    topic=RIDE_ORDERS,
    consumer="zone_fares",
    name="zone_fares_sums",
    publishes=ZONE_FARES,
    limits=SPARK_LIMITS,
    options=AssetOptions(group_name="rides"),
)
def zone_fares(
    context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource, spark: LazyPySparkResource
) -> Mapping[str, Any]:
    """Orders, rides and fares per zone and quarter of an hour, as Spark sums up a range of ride_orders."""
    return publish_sums(
        context, claim, eventsql=eventsql, spark=spark,
        compute=lambda events: sums.fares(sums.orders_of(events)), topic=ZONE_FARES, key="zone",
    )  # fmt: skip


@consumer_asset(
    topic=ZONE_FARES,
    consumer="zone_fares_table",
    partitioned=True,
    limits=RunLimits(max_wait=2.0),
    options=AssetOptions(group_name="rides"),
)
def zone_fares_table(events: Sequence[Event], connection: Connection) -> None:
    """Table rides.zone_fares: all orders, rides and fares per zone and quarter of an hour."""
    add_fares(events, connection)


@dg.asset_check(
    asset=zone_fares_table.key,
    description="The table holds what plain Python sums up over the whole log of ride_orders.",
)
def zone_fares_table_matches_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Compute the sums without Spark and compare row by row."""
    return check_result(verification.zone_fares_match_log(eventsql.platform))
