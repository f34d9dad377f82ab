"""The expected rows of the table of churn, counted in plain Python over the whole log of file_changes."""

from __future__ import annotations

import json

from assets.churn.counting import count, stored
from assets.churn.effects import FILE_CHANGES
from assets.comparison import Comparison, compared
from eventsql_orchestration import EventSQL


def directory_churn_matches_log(platform: EventSQL) -> Comparison:
    """Count without Spark and compare row by row."""
    batches = platform.reader.stream(FILE_CHANGES.name)
    expected = count(json.loads(event.value) for batch in batches for event in batch)
    with platform.database.transaction() as connection:
        found = stored(connection)
    return compared(expected, found)
