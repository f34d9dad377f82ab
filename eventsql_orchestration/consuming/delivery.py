"""Events that were handed out to be acknowledged by themselves, and how far a partition is handed out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eventsql_orchestration.model import Event


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """An event that `worker` has to acknowledge, by `cursor` and the event's id. `key` is None without order.

    When a partition is moved, it gets a cursor with a new number. Acknowledgements of events from before then have no
    effect. Two deliveries of one event are not equal: after a seek, a process may have the event twice.
    """

    cursor: int
    worker: int
    partition: int
    event: Event
    key: int | None
    attempts: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class HandOut:
    """The events that a call handed out.

    With `more`, further events wait. With `others`, the partition has events that this process does not hold: another
    process has them, or they wait for a retry. Before the call, this process held `own` events.
    """

    deliveries: Sequence[Delivery]
    more: bool = False
    others: bool = False
    held: bool = False
    """Whether the partition has events that are not acknowledged."""
    taken: bool = True
    """Whether the partition could be locked and consumed."""
    own: int = 0
    due_in: float | None = None
    """The seconds until the next retry is due; None if none waits to be due."""


class Cursor(NamedTuple):
    """How far a partition is handed out. `offset` is the consumer's offset when the cursor was last moved."""

    number: int
    offset: int
    claimed_upto: int
    unacknowledged: int
    by_key: bool


class Fresh(NamedTuple):
    """An event that was never handed out, and whether this process gets it now."""

    event: Event
    key: int | None
    own: bool


class Standing(NamedTuple):
    """The events of a partition that are not acknowledged: their number, and the lowest id.

    No live process holds `free` of them, and this process does not hold `not_own`. `failed` is the first that failed.
    The next retry is due in `due_in` seconds; None if none waits to be due.
    """

    unacknowledged: int
    lowest: int | None
    free: int
    not_own: int
    failed: int | None
    due_in: float | None


def number_of_key(key: str) -> int:
    """A key as a number. Keys with the same number wait for each other, which does no harm."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def arrays(deliveries: Collection[Delivery]) -> dict[str, list[int]]:
    """Deliveries as parameters of a statement."""
    return {
        "cursors": [each.cursor for each in deliveries],
        "ids": [each.event.id for each in deliveries],
        "workers": [each.worker for each in deliveries],
    }
