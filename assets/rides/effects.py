"""Writes of the consumers of rides, the same for every orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from assets.json_values import json_values
from eventsql_orchestration import Connection, Database, Event, Topic
from eventsql_orchestration.views import Rollup, RollupEntry, Timeline, Views

ZONE_FARES: Final = Topic("zone_fares", partitions=2)
"""The sums that orders and rides add to a zone's quarter of an hour; keyed by zone."""

DRIVER_UTILISATION: Final = Topic("driver_utilisation", partitions=2)
"""The sums that rides add to a driver's day; keyed by driver."""

ORDER_TIMELINE: Final = Timeline("ride_orders")
CHANGES_PER_MINUTE: Final = Rollup("ride_order_changes", grain=timedelta(minutes=1), dimensions=("change",))

_UPSERT_ORDER = """
INSERT INTO rides.order_status
    (order_id, version, status, rider, driver, zone, price_cents, placed_at, updated_at)
VALUES
    (%(order_id)s, %(version)s, %(status)s, %(rider)s, %(driver)s, %(zone)s, %(price_cents)s, %(placed_at)s, %(at)s)
ON CONFLICT (order_id) DO UPDATE
SET version = excluded.version, status = excluded.status, driver = excluded.driver,
    price_cents = excluded.price_cents, updated_at = excluded.updated_at
WHERE order_status.version <= excluded.version
"""


def write_orders(events: Sequence[Event], connection: Connection, database: Database) -> None:
    """Table rides.order_status, the timeline of each order, and the changes per minute."""
    states = json_values(events)
    with connection.cursor() as cursor:
        cursor.executemany(_UPSERT_ORDER, states)
    views = Views(database)
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


_ADD_FARES = """
INSERT INTO rides.zone_fares (zone, quarter_hour, orders, rides, fares_cents)
VALUES (%(zone)s, %(quarter_hour)s, %(orders)s, %(rides)s, %(fares_cents)s)
ON CONFLICT (zone, quarter_hour) DO UPDATE
SET orders = zone_fares.orders + excluded.orders,
    rides = zone_fares.rides + excluded.rides,
    fares_cents = zone_fares.fares_cents + excluded.fares_cents
"""


def add_fares(events: Sequence[Event], connection: Connection) -> None:
    """Table rides.zone_fares: all orders, rides and fares per zone and quarter of an hour."""
    with connection.cursor() as cursor:
        # Events that were published before demand was counted have none.
        cursor.executemany(_ADD_FARES, [{"orders": 0, **sums} for sums in json_values(events)])


_ADD_UTILISATION = """
INSERT INTO rides.driver_utilisation (driver, day, accepted, ended, completed, busy_micros)
VALUES (%(driver)s, %(day)s, %(accepted)s, %(ended)s, %(completed)s, %(busy_micros)s)
ON CONFLICT (driver, day) DO UPDATE
SET accepted = driver_utilisation.accepted + excluded.accepted,
    ended = driver_utilisation.ended + excluded.ended,
    completed = driver_utilisation.completed + excluded.completed,
    busy_micros = driver_utilisation.busy_micros + excluded.busy_micros
"""


def add_utilisation(events: Sequence[Event], connection: Connection) -> None:
    """Table rides.driver_utilisation: all rides and the time driven per driver and day."""
    with connection.cursor() as cursor:
        cursor.executemany(_ADD_UTILISATION, json_values(events))
