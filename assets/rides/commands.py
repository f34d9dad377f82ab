"""Commands on a queue when a driver accepts a ride, and the events that answer them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from assets.rides.order import Order
from eventsql_orchestration import Connection, Publication, Topic
from eventsql_orchestration.queue import Message, NewMessage

RIDE_COMMANDS: Final = "ride_commands"
"""Commands to notify the rider and to charge the price; in the order of each order."""

RIDE_ANSWERS: Final = Topic("ride_answers", partitions=2)
"""An event for each command that was carried out, keyed by order."""

NOTIFY, CHARGE = "notify_rider", "charge"
ANSWERS: Final = {NOTIFY: "rider_notified", CHARGE: "charged"}

_CHARGE = """
INSERT INTO rides.charge (order_id, rider, price_cents) VALUES (%(order_id)s, %(rider)s, %(price_cents)s)
"""


def commands_of(order: Order) -> list[NewMessage]:
    """The commands that an accepted order gives."""
    known = {"order_id": order.id, "rider": order.rider, "driver": order.driver, "price_cents": order.price_cents}
    return [NewMessage(json.dumps({"command": name, **known}).encode(), key=order.id) for name in ANSWERS]


def carry_out(messages: Sequence[Message], connection: Connection) -> list[Publication]:
    """Table rides.charge, whose key refuses a second charge of an order, and the answers to the commands."""
    commands = [json.loads(message.body) for message in messages]
    with connection.cursor() as cursor:
        cursor.executemany(_CHARGE, [each for each in commands if each["command"] == CHARGE])
    return [
        Publication(
            RIDE_ANSWERS.name,
            json.dumps({"answer": ANSWERS[each["command"]], "order_id": each["order_id"]}).encode(),
            key=each["order_id"],
        )
        for each in commands
    ]
