"""A sender that calls `put_messages` itself writes no metadata that receivers do not expect."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0062"
down_revision = "0061"


def upgrade() -> None:
    install("queue_sending")
