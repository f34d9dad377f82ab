"""Consuming in SQL counts the events of a range by one snapshot: compaction may give blocks gaps at any moment."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0054"
down_revision = "0053"


def upgrade() -> None:
    install("reading")
