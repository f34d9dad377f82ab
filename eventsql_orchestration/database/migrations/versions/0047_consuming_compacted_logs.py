"""Consuming in SQL goes on behind blocks that compaction merged, and reads few events of a log in both forms."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    install("reading", "consuming")
