"""Captured tables: a statement that changes many rows writes their changes to the buffer in blocks."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0042"
down_revision = "0041"


def upgrade() -> None:
    install("capture_changes")
