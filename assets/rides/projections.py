"""Read models of orders: each order's status and timeline, and how many changes every minute saw."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import dagster as dg

from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.views import Rollups, Timelines

ORDER_TIMELINE = "order"
CHANGES_PER_MINUTE = "order_changes_per_minute"

_UPSERT = """
INSERT INTO rides.order_status
    (order_id, version, status, rider, driver, zone, price_cents, placed_at, updated_at)
VALUES
    (%(order_id)s, %(version)s, %(status)s, %(rider)s, %(driver)s, %(zone)s, %(price_cents)s, %(placed_at)s, %(at)s)
ON CONFLICT (order_id) DO UPDATE
SET version = excluded.version, status = excluded.status, driver = excluded.driver,
    price_cents = excluded.price_cents, updated_at = excluded.updated_at
WHERE order_status.version <= excluded.version
"""


@consumer_asset(
    topic=RIDE_ORDERS,
    consumer="order_status",
    partitioned=True,
    limits=RunLimits(max_wait=2.0),
    options=AssetOptions(group_name="rides"),
)
def order_status(events: Sequence[Event], connection: Connection, eventsql: EventSQLResource) -> None:
    """Table rides.order_status: how each order stands now, its timeline and the changes per minute."""
    states = [json.loads(event.value) for event in events]
    with connection.cursor() as cursor:
        cursor.executemany(_UPSERT, states)
    database = eventsql.platform.database
    Timelines(database).append_all(
        connection,
        ORDER_TIMELINE,
        [(state["order_id"], state, datetime.fromisoformat(state["at"])) for state in states],
    )
    minutes = Counter(
        (datetime.fromisoformat(state["at"]).replace(second=0, microsecond=0), state["change"]) for state in states
    )
    Rollups(database).add(
        connection, CHANGES_PER_MINUTE, [(minute, change, count, 0) for (minute, change), count in minutes.items()]
    )


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
    timeline = sum(len(Timelines(platform.database).read(ORDER_TIMELINE, order)) for order in expected)
    counted = sum(bucket.count for bucket in Rollups(platform.database).read(CHANGES_PER_MINUTE))
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
