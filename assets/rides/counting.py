"""The sums of orders as plain Python counts them over a log, to be compared with the contents of the tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeAlias

Fares: TypeAlias = dict[tuple[str, datetime], tuple[int, int, int]]
"""(zone, quarter of an hour) to (orders, rides, fares in cents)."""

Utilisation: TypeAlias = dict[tuple[str, date], tuple[int, int, int, int]]
"""(driver, day) to (rides accepted, ended, completed, microseconds from the one to the other)."""

_MICROSECOND = timedelta(microseconds=1)


def count_fares(orders: Iterable[Mapping[str, Any]]) -> Fares:
    """Demand and fares of a stream of orders' states."""
    sums: defaultdict[tuple[str, datetime], list[int]] = defaultdict(lambda: [0, 0, 0])
    for order in orders:
        if order["change"] not in {"placed", "completed"}:
            continue
        at = datetime.fromisoformat(order["at"]).astimezone(UTC)
        entry = sums[order["zone"], at.replace(minute=at.minute - at.minute % 15, second=0, microsecond=0)]
        if order["change"] == "placed":
            entry[0] += 1
        else:
            entry[1] += 1
            entry[2] += order["price_cents"]
    return {key: (placed, rides, cents) for key, (placed, rides, cents) in sums.items()}


def count_utilisation(orders: Iterable[Mapping[str, Any]]) -> Utilisation:
    """How much each driver drove, of a stream of orders' states."""
    sums: defaultdict[tuple[str, date], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for order in orders:
        change = order["change"]
        if order["driver"] is None or change not in {"accepted", "completed", "cancelled"}:
            continue
        placed_at = datetime.fromisoformat(order["placed_at"]).astimezone(UTC)
        since_placed = (datetime.fromisoformat(order["at"]) - placed_at) // _MICROSECOND
        entry = sums[order["driver"], placed_at.date()]
        if change == "accepted":
            entry[0] += 1
            entry[3] -= since_placed
        else:
            entry[1] += 1
            entry[2] += change == "completed"
            entry[3] += since_placed
    return {key: (accepted, ended, done, busy) for key, (accepted, ended, done, busy) in sums.items()}
