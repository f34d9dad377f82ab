"""Driver utilisation: Spark sums up how long each driver drove on each day, and publishes the sums as events."""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from assets.range_sums import SPARK_LIMITS, check_result, publish_sums
from assets.rides import sums, verification
from assets.rides.effects import DRIVER_UTILISATION, add_utilisation
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Claim, Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset, range_asset


@range_asset(
    topic=RIDE_ORDERS,
    consumer="driver_utilisation",
    name="driver_utilisation_sums",
    publishes=DRIVER_UTILISATION,
    limits=SPARK_LIMITS,
    options=AssetOptions(group_name="rides"),
)
def driver_utilisation(
    context: dg.AssetExecutionContext, claim: Claim, eventsql: EventSQLResource, spark: LazyPySparkResource
) -> Mapping[str, Any]:
    """Rides and time driven per driver and day, as Spark sums up a range of ride_orders."""
    return publish_sums(
        context, claim, eventsql=eventsql, spark=spark,
        compute=lambda events: sums.utilisation(sums.orders_of(events)), topic=DRIVER_UTILISATION, key="driver",
    )  # fmt: skip


@consumer_asset(
    topic=DRIVER_UTILISATION,
    consumer="driver_utilisation_table",
    partitioned=True,
    limits=RunLimits(max_wait=2.0),
    options=AssetOptions(group_name="rides"),
)
def driver_utilisation_table(events: Sequence[Event], connection: Connection) -> None:
    """Table rides.driver_utilisation: all rides and the time driven per driver and day."""
    add_utilisation(events, connection)


@dg.asset_check(
    asset=driver_utilisation_table.key,
    description="The table holds what plain Python sums up over the whole log of ride_orders.",
)
def driver_utilisation_table_matches_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Compute the sums without Spark and compare row by row."""
    return check_result(verification.driver_utilisation_matches_log(eventsql.platform))
