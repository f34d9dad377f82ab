"""A key that is too long for the order of a queue holds no redrive up, and one function notes each timeout."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0060"
down_revision = "0059"


def upgrade() -> None:
    install("queue", "queue_receiving")
