"""The hint of a captured table that refuses changes is the command that drops the capture, and not its plan."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0070"
down_revision = "0069"


def upgrade() -> None:
    install("capture", "capture_changes")
