"""A simulation of riders and drivers: seeded, so that a round on an empty database is the same every time."""

import json
import random
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from assets.rides.commands import commands_of
from assets.rides.order import Order
from eventsql_orchestration import Connection, EventSQL
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.store import Repository, Store

DISPATCH_QUEUE = "ride_dispatch"
"""Commands to find a driver for an order."""

ZONES = ("airport", "centre", "harbour", "north", "south", "university")
EPOCH = datetime(2026, 1, 5, 6, tzinfo=UTC)
NAMESPACE = uuid.UUID("6a2c35a4-8d3a-4f3e-9d64-0a3b8b7a5c11")


class RideSimulation:
    """Plays orders against the platform as a ride service would: a command side, and workers behind a queue.

    Each accepted ride puts its commands on the queue `commands`, if there is one.
    """

    def __init__(
        self, platform: EventSQL, *, seed: int, metadata: Mapping[str, str] = MappingProxyType({}),
        commands: Queue | None = None,
    ) -> None:  # fmt: skip
        self._database = platform.database
        self._store = Store(platform.database)
        self._orders = Repository(self._store, Order, platform.publisher)
        self._queue = Queue(platform.database, DISPATCH_QUEUE)
        self._commands = commands
        self._seed = seed
        self._metadata = metadata

    def run(self, orders: int) -> int:
        """Place `orders` further orders and drive each to its end; gives the number of events published."""
        first = self._store.count(Order.aggregate_type)
        for number in range(first, first + orders):
            self._place(number)
        return orders + self._raise_prices(first, orders) + self._dispatch()

    def _random(self, *of: object) -> random.Random:
        return random.Random(f"{self._seed}:{of}")  # noqa: S311 - a simulation, to be repeated

    def _order_id(self, number: int) -> str:
        return str(uuid.uuid5(NAMESPACE, f"{self._seed}:{number}"))

    def _place(self, number: int) -> None:
        """Store the order, tell the world, and command its dispatch: one transaction."""
        draw = self._random("place", number)
        order = Order(self._order_id(number))
        zone = draw.choice(ZONES)
        order.place(
            rider=f"rider-{draw.randrange(500)}",
            zone=zone,
            route=[zone, draw.choice(ZONES)],
            price_cents=draw.randrange(600, 6_000),
            at=EPOCH + timedelta(seconds=20 * number),
        )
        with self._database.transaction() as connection:
            self._save(order, connection)
            self._queue.send(json.dumps({"order_id": order.id}).encode(), key=order.id, connection=connection)

    def _raise_prices(self, first: int, orders: int) -> int:
        raised = 0
        for number in range(first, first + orders):
            draw = self._random("raise", number)
            if draw.random() < 0.2:
                order = self._orders.load(self._order_id(number))
                order.raise_price(
                    order.price_cents + draw.randrange(50, 900),
                    at=datetime.fromisoformat(order.updated_at) + timedelta(seconds=draw.randrange(30, 120)),
                )
                self._save(order)
                raised += 1
        return raised

    def _dispatch(self) -> int:
        """Work the queue off: each message is acknowledged in the transaction that its order is saved in."""
        published = 0
        while messages := self._queue.receive(max_messages=50, visibility_timeout=60.0):
            for message in messages:
                order_id = json.loads(message.body)["order_id"]
                with self._database.transaction() as connection:
                    published += self._drive(order_id, connection)
                    self._queue.acknowledge(message, connection=connection)
        return published

    def _drive(self, order_id: str, connection: Connection) -> int:
        """Find a driver for an order and bring it to its end; gives the number of events published.

        The commands of an accepted ride are sent in the transaction that accepts it.
        """
        draw = self._random("drive", order_id)
        order = self._orders.load(order_id, connection=connection)
        at = datetime.fromisoformat(order.updated_at)
        if draw.random() < 0.1:
            order.cancel("rider", at=at + timedelta(seconds=draw.randrange(10, 300)))
            self._save(order, connection)
            return 1
        at += timedelta(seconds=draw.randrange(15, 240))
        order.accept(f"driver-{draw.randrange(80)}", at=at)
        self._save(order, connection)
        if self._commands is not None:
            self._commands.send_all(commands_of(order), connection=connection)
        if draw.random() < 0.05:
            order.cancel("driver", at=at + timedelta(seconds=draw.randrange(30, 600)))
        else:
            order.complete(at=at + timedelta(seconds=draw.randrange(240, 2_400)))
        self._save(order, connection)
        return 2

    def _save(self, order: Order, connection: Connection | None = None) -> None:
        self._orders.save(order, publications=[order.integration_event(self._metadata)], connection=connection)
