"""The hint of a captured table that lost its key is a command that a shell takes, also for a name with quotes."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0049"
down_revision = "0048"


def upgrade() -> None:
    install("capture_changes")
