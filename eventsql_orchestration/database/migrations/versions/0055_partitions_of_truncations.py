"""The event of a truncation has the number of partitions by which the keys of its rows are found."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0055"
down_revision = "0054"


def upgrade() -> None:
    install("capture_changes")
