"""A message that waits for another again keeps its timeout in its history, and no dead letter holds a queue up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0059"
down_revision = "0058"


def upgrade() -> None:
    install("queue_receiving")
