"""The expected rows of the tables of rides, computed in plain Python over the whole log of ride_orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from assets.comparison import Comparison, compared
from assets.json_values import json_values
from assets.rides.commands import ANSWERS, CHARGE, RIDE_ANSWERS, RIDE_COMMANDS
from assets.rides.counting import count_fares, count_utilisation
from assets.rides.effects import CHANGES_PER_MINUTE, ORDER_TIMELINE
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import EventSQL
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.views import Views


def order_status_matches_log(platform: EventSQL) -> Comparison:
    """Whether the table, the timelines and the counts are what the log says, each event once."""
    expected: dict[str, tuple[int, str, int]] = {}
    events = 0
    for state in _orders(platform):
        expected[state["order_id"]] = (state["version"], state["status"], state["price_cents"])
        events += 1
    with platform.database.transaction() as connection:
        rows = connection.execute("SELECT order_id, version, status, price_cents FROM rides.order_status")
        found = {order: (version, status, cents) for order, version, status, cents in rows}
    views = Views(platform)
    timeline = sum(len(views.timeline(ORDER_TIMELINE).read(order)) for order in expected)
    counted = sum(bucket.count for bucket in views.rollup(CHANGES_PER_MINUTE).read())
    return Comparison(
        found == expected and timeline == counted == events,
        {
            "events": events,
            "orders": len(expected),
            "orders that differ": sum(found.get(order) != state for order, state in expected.items()),
            "orders beyond the log": len(found.keys() - expected.keys()),
            "timeline entries": timeline,
            "changes counted": counted,
        },
    )


def ride_charges_match_log(platform: EventSQL) -> Comparison:
    """Whether each accepted ride was notified and charged once. Commands and answers may still be on their way."""
    accepted = {state["order_id"] for state in _orders(platform) if state["change"] == "accepted"}
    # In the order of the way of a command, so that nothing is missed that moves on meanwhile.
    commands = Queue(platform, RIDE_COMMANDS, ordered=True).statistics()
    under_way = commands.depth + commands.dead + platform.buffered().get(RIDE_ANSWERS.name, 0)
    answers = Counter(
        (answer["order_id"], answer["answer"])
        for batch in platform.reader.stream(RIDE_ANSWERS.name)
        for answer in json_values(batch)
    )
    with platform.database.transaction() as connection:
        charged = {order for (order,) in connection.execute("SELECT order_id FROM rides.charge")}
    missing = {(order, answer) for order in accepted for answer in ANSWERS.values()} - answers.keys()
    twice = sum(count > 1 for count in answers.values())
    uncharged = sum(answer == ANSWERS[CHARGE] and order not in charged for order, answer in answers)
    return Comparison(
        not twice and not uncharged and len(missing) <= under_way,
        {
            "accepted rides": len(accepted),
            "answers": answers.total(),
            "answers twice": twice,
            "answers missing": len(missing),
            "commands and answers under way": under_way,
            "charges": len(charged),
            "charges missing": uncharged,
        },
    )


def zone_fares_match_log(platform: EventSQL) -> Comparison:
    """Compute the sums of zones without Spark and compare row by row."""
    expected = count_fares(_orders(platform))
    with platform.database.transaction() as connection:
        rows = connection.execute("SELECT zone, quarter_hour, orders, rides, fares_cents FROM rides.zone_fares")
        found = {(zone, quarter): (orders, rides, cents) for zone, quarter, orders, rides, cents in rows}
    return compared(expected, found)


def driver_utilisation_matches_log(platform: EventSQL) -> Comparison:
    """Compute the sums of drivers without Spark and compare row by row."""
    expected = count_utilisation(_orders(platform))
    with platform.database.transaction() as connection:
        rows = connection.execute(
            "SELECT driver, day, accepted, ended, completed, busy_micros FROM rides.driver_utilisation"
        )
        found = {(driver, day): tuple(counts) for driver, day, *counts in rows}
    return compared(expected, found)


def _orders(platform: EventSQL) -> Iterator[dict[str, Any]]:
    """The states of orders in the log, in its order."""
    upto = platform.reader.end(RIDE_ORDERS.name)
    for batch in platform.reader.stream(RIDE_ORDERS.name, upto=upto):
        yield from json_values(batch)
