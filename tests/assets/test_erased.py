"""Erased events have no value: the consumers and the checks of the reference location leave them out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES, add_churn
from assets.churn.verification import directory_churn_matches_log
from assets.rides.commands import RIDE_ANSWERS, RIDE_COMMANDS
from assets.rides.effects import DRIVER_UTILISATION, ZONE_FARES, add_fares, add_utilisation, write_orders
from assets.rides.order import RIDE_ORDERS
from assets.rides.service import RideSimulation
from assets.rides.verification import order_status_matches_log, ride_charges_match_log, zone_fares_match_log
from assets.tables import prepare
from eventsql_orchestration import Connection, Event, EventSQL, Publication, Topic
from eventsql_orchestration.queue import Queue

Add: TypeAlias = Callable[[Sequence[Event], Connection], None]

DAY = {"driver": "", "day": "2026-01-05", "accepted": 1, "ended": 1, "completed": 1, "busy_micros": 1}
QUARTER = {"zone": "", "quarter_hour": "2026-01-05T06:00:00Z", "rides": 1, "fares_cents": 1}
MONTH = {"directory": "", "repo": "one", "month": "2026-01", "changes": 1, "added": 1, "deleted": 1}


@pytest.mark.parametrize(
    ("topic", "sums", "add", "table"),
    [
        (ZONE_FARES, QUARTER, add_fares, "rides.zone_fares"),
        (DRIVER_UTILISATION, DAY, add_utilisation, "rides.driver_utilisation"),
        (DIRECTORY_CHURN, MONTH, add_churn, "churn.directory_churn"),
    ],
)
def test_an_erased_event_adds_nothing_to_a_table(
    platform: EventSQL, topic: Topic, sums: dict[str, Any], add: Add, table: str
) -> None:
    # The first column is the key.
    column = next(iter(sums))
    prepare(platform.shards[0])
    platform.registry.register_topic(topic)
    platform.publisher.publish_all(
        Publication(topic.name, json.dumps({**sums, column: key}).encode(), key=key) for key in ("kept", "erased")
    )
    platform.transfer.run_once()
    platform.eraser.execute(topic.name, ["erased"])
    with platform.database.transaction() as connection:
        add(platform.reader.read(topic.name), connection)
        assert connection.execute(f"SELECT {column} FROM {table}").fetchall() == [("kept",)]


def test_an_erased_order_stops_neither_its_consumer_nor_a_check(platform: EventSQL) -> None:
    prepare(platform.shards[0])
    for topic in (RIDE_ORDERS, ZONE_FARES, RIDE_ANSWERS, FILE_CHANGES):
        platform.registry.register_topic(topic)
    commands = Queue(platform, RIDE_COMMANDS, ordered=True)
    RideSimulation(platform, seed=7, commands=commands).run(5)
    platform.transfer.run_once()
    orders = {str(event.key) for event in platform.reader.read(RIDE_ORDERS.name)}
    platform.eraser.execute(RIDE_ORDERS.name, [min(orders)])
    with platform.database.transaction() as connection:
        write_orders(platform.reader.read(RIDE_ORDERS.name), connection, platform.database)
    compared = order_status_matches_log(platform)
    assert compared.passed, compared.figures
    assert compared.figures["orders"] == len(orders) - 1
    assert ride_charges_match_log(platform).figures["accepted rides"]
    assert zone_fares_match_log(platform).figures["rows"]

    change = {"repo": "one", "path": "a.py", "committed_at": "2026-01-05T06:00:00+00:00", "added": 1, "deleted": 0}
    platform.publisher.publish(Publication(FILE_CHANGES.name, json.dumps(change).encode(), key="a.py"))
    platform.transfer.run_once()
    platform.eraser.execute(FILE_CHANGES.name, ["a.py"])
    assert directory_churn_matches_log(platform).passed
