"""The order of a ride: an event-sourced aggregate, and the events that are published about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from eventsql_orchestration import Publication, Topic
from eventsql_orchestration.store import Aggregate

RIDE_ORDERS = Topic("ride_orders", partitions=2)
"""Changes of orders: one event for each change, keyed by order, with the order's state after it."""


class OrderStatus(StrEnum):
    """Where an order stands."""

    PLACED = "placed"
    ACCEPTED = "accepted"
    COMPLETED = "completed"
    CANCELLED = "cancelled"


class OrderRuleError(Exception):
    """An order was asked for something that its status does not allow."""


class Order(Aggregate):
    """An order for a ride along a route at a price in cents."""

    aggregate_type = "order"

    def __init__(self, aggregate_id: str) -> None:
        super().__init__(aggregate_id)
        self.status: OrderStatus | None = None
        self.rider = ""
        self.driver: str | None = None
        self.zone = ""
        self.route: list[str] = []
        self.price_cents = 0
        self.placed_at = ""
        self.updated_at = ""

    def place(self, *, rider: str, zone: str, route: list[str], price_cents: int, at: datetime) -> None:
        """A rider orders a ride."""
        if self.status is not None:
            raise OrderRuleError(f"order {self.id} was placed before")
        if price_cents <= 0 or not route:
            raise OrderRuleError(f"order {self.id} needs a price and a route")
        self.record(
            "placed", {"rider": rider, "zone": zone, "route": route, "price_cents": price_cents, "at": at.isoformat()}
        )

    def raise_price(self, price_cents: int, *, at: datetime) -> None:
        """The rider offers more, instead of waiting."""
        self._require(OrderStatus.PLACED)
        if price_cents <= self.price_cents:
            raise OrderRuleError(f"order {self.id} already pays {self.price_cents}")
        self.record("price_raised", {"price_cents": price_cents, "at": at.isoformat()})

    def accept(self, driver: str, *, at: datetime) -> None:
        """A driver takes the order."""
        self._require(OrderStatus.PLACED)
        self.record("accepted", {"driver": driver, "at": at.isoformat()})

    def complete(self, *, at: datetime) -> None:
        """The driver has brought the rider to the end of the route."""
        self._require(OrderStatus.ACCEPTED)
        self.record("completed", {"at": at.isoformat()})

    def cancel(self, by: str, *, at: datetime) -> None:
        """Rider or driver call the ride off."""
        self._require(OrderStatus.PLACED, OrderStatus.ACCEPTED)
        self.record("cancelled", {"by": by, "at": at.isoformat()})

    def _require(self, *statuses: OrderStatus) -> None:
        if self.status not in statuses:
            raise OrderRuleError(f"order {self.id} is {self.status or 'not placed yet'}")

    def apply(self, kind: str, data: Mapping[str, Any]) -> None:
        self.updated_at = data["at"]
        match kind:
            case "placed":
                self.status = OrderStatus.PLACED
                self.rider, self.zone, self.route = data["rider"], data["zone"], list(data["route"])
                self.price_cents, self.placed_at = data["price_cents"], data["at"]
            case "price_raised":
                self.price_cents = data["price_cents"]
            case "accepted":
                self.status, self.driver = OrderStatus.ACCEPTED, data["driver"]
            case "completed":
                self.status = OrderStatus.COMPLETED
            case "cancelled":
                self.status = OrderStatus.CANCELLED

    def integration_event(self, metadata: Mapping[str, str]) -> Publication:
        """The event by which other services learn of the order's newest change: the state after it."""
        change = self.new_changes[-1]
        state = {
            "order_id": self.id,
            "version": self.version,
            "change": change.kind,
            "status": self.status,
            "rider": self.rider,
            "driver": self.driver,
            "zone": self.zone,
            "price_cents": self.price_cents,
            "placed_at": self.placed_at,
            "at": self.updated_at,
        }
        return Publication(RIDE_ORDERS.name, json.dumps(state).encode(), key=self.id, metadata=metadata)
