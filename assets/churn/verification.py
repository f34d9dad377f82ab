"""The expected rows of the table of churn, counted in plain Python over the whole log of file_changes."""

from __future__ import annotations

from assets.churn.counting import count, stored
from assets.churn.effects import FILE_CHANGES
from assets.comparison import Comparison, compared
from assets.json_values import json_values
from eventsql_orchestration import EventSQL


def directory_churn_matches_log(platform: EventSQL) -> Comparison:
    """Count without Spark and compare row by row."""
    batches = platform.reader.stream(FILE_CHANGES.name)
    expected = count(change for batch in batches for change in json_values(batch))
    with platform.database.transaction() as connection:
        found = stored(connection)
    return compared(expected, found)
