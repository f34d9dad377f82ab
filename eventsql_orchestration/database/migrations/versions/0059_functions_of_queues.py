"""An ordered queue notes each timeout, refuses keys in words, and no dead letter with a long key holds a queue up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    install("queue_sending", "queue_receiving", "log")
