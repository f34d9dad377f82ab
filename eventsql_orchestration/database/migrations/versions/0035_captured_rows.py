"""Captured tables: less work for each row of a statement that changes many."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    install("capture", "capture_changes")
