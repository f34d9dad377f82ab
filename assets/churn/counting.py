"""Churn as plain Python counts it, and as the table holds it, to be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from eventsql_orchestration import Connection

Churn: TypeAlias = dict[tuple[str, str, str], tuple[int, int, int]]
"""(repo, directory, month) to (changes, lines added, lines deleted)."""


def count(changes: Iterable[Mapping[str, Any]]) -> Churn:
    """The churn of a stream of file changes; those of binary files count no lines.

    A change belongs to the month that its commit states, in whatever time zone it does.
    """
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for change in changes:
        directory = change["path"].rpartition("/")[0] or "."
        entry = sums[change["repo"], directory, change["committed_at"][:7]]
        entry[0] += 1
        entry[1] += change["added"] or 0
        entry[2] += change["deleted"] or 0
    return {key: (changed, added, deleted) for key, (changed, added, deleted) in sums.items()}


def stored(connection: Connection, repos: Iterable[str] | None = None) -> Churn:
    """The churn that table churn.directory_churn holds, of these repositories or of all."""
    rows = connection.execute(
        "SELECT repo, directory, month, changes, added, deleted FROM churn.directory_churn "
        "WHERE %(repos)s::text[] IS NULL OR repo = ANY (%(repos)s)",
        {"repos": None if repos is None else sorted(repos)},
    )
    return {
        (repo, directory, month): (changes, added, deleted) for repo, directory, month, changes, added, deleted in rows
    }


def differing(expected: Churn, found: Churn) -> list[tuple[str, str, str]]:
    """The keys whose counts differ, those that one side lacks included."""
    return sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
