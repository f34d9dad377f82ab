"""Read models of orders: each order's status and timeline, and how many changes every minute saw."""

import json
from collections.abc import Sequence

import dagster as dg

from assets.rides.effects import CHANGES_PER_MINUTE, ORDER_TIMELINE, write_orders
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.views import Views


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
    """Fold the log in plain Python and compare it with what the consumer wrote."""
    platform = eventsql.platform
    expected: dict[str, tuple[int, str, int]] = {}
    events = 0
    upto = platform.reader.end(RIDE_ORDERS.name)
    for batch in platform.reader.stream(RIDE_ORDERS.name, upto=upto):
        for event in batch:
            state = json.loads(event.value)
            expected[state["order_id"]] = (state["version"], state["status"], state["price_cents"])
            events += 1
    with platform.database.transaction() as connection:
        rows = connection.execute("SELECT order_id, version, status, price_cents FROM rides.order_status")
        found = {order: (version, status, cents) for order, version, status, cents in rows}
    views = Views(platform.database)
    timeline = sum(len(views.timeline(ORDER_TIMELINE).read(order)) for order in expected)
    counted = sum(bucket.count for bucket in views.rollup(CHANGES_PER_MINUTE).read())
    return dg.AssetCheckResult(
        passed=found == expected and timeline == counted == events,
        metadata={
            "events": events,
            "orders": len(expected),
            "orders that differ": sum(found.get(order) != state for order, state in expected.items()),
            "orders beyond the log": len(found.keys() - expected.keys()),
            "timeline entries": timeline,
            "changes counted": counted,
        },
    )
