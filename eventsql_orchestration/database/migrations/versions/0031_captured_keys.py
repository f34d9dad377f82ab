"""Captured tables: long keys become their hash, and what a restore leaves of a dropped capture fails no writer."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0031"
down_revision = "0030"


def upgrade() -> None:
    install("capture", "capture_changes")
