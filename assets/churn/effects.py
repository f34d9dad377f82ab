"""The topics of churn, and what their consumers write: the same for every orchestrator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from assets.json_values import json_values
from eventsql_orchestration import Connection, Event, Topic

FILE_CHANGES: Final = Topic("file_changes", partitions=4)
"""One event for each file that a commit changed; keyed by path."""

DIRECTORY_CHURN: Final = Topic("directory_churn", partitions=2)
"""The sums that a range of file changes adds to a directory's month; keyed by directory."""

_ADD = """
INSERT INTO churn.directory_churn (repo, directory, month, changes, added, deleted)
VALUES (%(repo)s, %(directory)s, %(month)s, %(changes)s, %(added)s, %(deleted)s)
ON CONFLICT (repo, directory, month) DO UPDATE
SET changes = directory_churn.changes + excluded.changes,
    added = directory_churn.added + excluded.added,
    deleted = directory_churn.deleted + excluded.deleted
"""


def add_churn(events: Sequence[Event], connection: Connection) -> None:
    """Table churn.directory_churn: all changes per repository, directory and month."""
    with connection.cursor() as cursor:
        cursor.executemany(_ADD, json_values(events))
