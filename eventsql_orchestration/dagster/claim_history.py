"""Deletes old claims that are over: a run that drains makes several a second, and each is a row."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Queries

BATCH: Final = 1_000
"""Claims that one statement deletes: a few milliseconds, in which nobody waits."""

MAX_ID: Final = 2**63 - 1


def delete_claims(platform: EventSQL, *, before: datetime) -> int:
    """Delete the claims of one database that ended before a time; gives their number.

    One that is not over stays, whatever its age. A run whose claim is gone cannot replay it, and `eventsql trace` does
    not find what an event of then was made from.
    """
    queries = Queries("claim_history", platform.database.schema)
    deleted = 0
    with platform.database.connection() as connection:
        young = connection.execute(queries("first_since"), {"before": before}).fetchone()
        values = {"first": MAX_ID if young is None else young[0], "before": before, "batch": BATCH}
        while (batch := connection.execute(queries("delete_before"), values).rowcount) == BATCH:
            deleted += batch
    return deleted + batch
