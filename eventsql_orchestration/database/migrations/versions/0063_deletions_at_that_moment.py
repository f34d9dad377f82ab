"""A queue or a topic that is deleted, or made, at that moment loses no message and no event of functions in SQL."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    install("consuming", "publishing", "queue_receiving", "queue_sending", "reading")
