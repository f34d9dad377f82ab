"""A transaction with a snapshot from before a change of a captured table's definition must begin anew."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0073"
down_revision = "0072"


def upgrade() -> None:
    install("capture_changes")
