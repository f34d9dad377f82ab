"""Metadata of any JSON, which another program may write, hold up no consumer, no redrive and no erasure."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0056"
down_revision = "0055"


def upgrade() -> None:
    install("reading", "consuming")
