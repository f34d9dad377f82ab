"""The windows in which a run is paused, each with a consumer of that name; and a table of effects by consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.model import Event

BEFORE_ADOPTION: Final = "before_adoption"
AFTER_ADOPTION: Final = "after_adoption"
BETWEEN_BATCHES: Final = "between_batches"
IN_HANDLER: Final = "in_handler"
BEFORE_NEXT_CLAIM: Final = "before_next_claim"
AFTER_NEXT_CLAIM: Final = "after_next_claim"
AFTER_LAST_COMMIT: Final = "after_last_commit"
IN_RANGE: Final = "in_range"
SHARED: Final = "shared"
SHARING: Final = "sharing"
"""The consumer that shares its runs with `SHARED`."""
HANDED_OVER: Final = "handed_over"
REPLAYED: Final = "replayed"

CHOSEN: Final = "EVENTSQL_TEST_WINDOWS"
"""The environment variable that names the consumers of the location: each has a sensor, which costs time."""

LEASE: Final = 5.0
BATCH: Final = 5
LEAD: Final = 25.0
"""Seconds before the end of a run's window from which it gets a successor: ticks of a busy machine are rare."""

EFFECTS: Final = "CREATE TABLE effect_of (consumer text NOT NULL, id bigint NOT NULL)"


def record_for(consumer: str, events: Sequence[Event], connection: Connection) -> None:
    """One row for each time that an event takes effect in a consumer."""
    ids = [event.id for event in events]
    connection.execute("INSERT INTO effect_of SELECT %s, unnest(%s::bigint[])", (consumer, ids))


def effects_of(platform: EventSQL, consumer: str) -> list[int]:
    """The ids of events that took effect in a consumer, as often as they did."""
    with platform.database.connection() as connection:
        rows = connection.execute("SELECT id FROM effect_of WHERE consumer = %s ORDER BY id", (consumer,))
        return [row[0] for row in rows]


def retry_of(window: str) -> str:
    """The point at which an automatic retry of the run that is paused stops before it does anything."""
    return f"{window}_retry"
