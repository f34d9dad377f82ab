"""Read models of orders: each order's status and timeline, and how many changes every minute saw."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta

import dagster as dg

from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Connection, Event
from eventsql_orchestration.dagster import AssetOptions, EventSQLResource, RunLimits, consumer_asset
from eventsql_orchestration.views import Rollup, RollupEntry, Timeline, Views

ORDER_TIMELINE = Timeline("ride_orders")
CHANGES_PER_MINUTE = Rollup("ride_order_changes", grain=timedelta(minutes=1), dimensions=("change",))

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
    views = Views(eventsql.platform.database)
    at = [datetime.fromisoformat(state["at"]) for state in states]
    views.timeline(ORDER_TIMELINE).append(
        connection, [(state["order_id"], state, time) for state, time in zip(states, at, strict=True)]
    )
    views.rollup(CHANGES_PER_MINUTE).add(
        connection,
        [RollupEntry(time, {"change": state["change"]}) for state, time in zip(states, at, strict=True)],
        # The runs of other partitions do not wait for this one's buckets.
        slot=events[0].partition,
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
