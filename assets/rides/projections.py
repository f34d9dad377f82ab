"""Read models of orders: each order's status and timeline, and how many changes every minute saw."""

from collections.abc import Sequence

import dagster as dg

from assets.range_sums import check_result
from assets.rides import verification
from assets.rides.effects import write_orders
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset


@consumer_asset(
    topic=RIDE_ORDERS,
    consumer="order_status",
    partitioned=True,
    limits=RunLimits(max_wait=2.0),
    options=AssetOptions(group_name="rides"),
)
def order_status(events: Sequence[Event], connection: Connection, eventsql: EventSQLResource) -> None:
    """Table rides.order_status: how each order stands now, its timeline and the changes per minute."""
    write_orders(events, connection, eventsql.platform.database)


@dg.asset_check(
    asset=order_status.key,
    description="The table, the timelines and the counts are what the whole log of ride_orders says, each event once.",
)
def order_status_matches_log(eventsql: EventSQLResource) -> dg.AssetCheckResult:
    """Recompute the rows from the log in plain Python, and compare them with the rows that the consumer wrote."""
    return check_result(verification.order_status_matches_log(eventsql.platform))
