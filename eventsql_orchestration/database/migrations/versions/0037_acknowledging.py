"""Acknowledging finds each message by its id, whatever the statistics of the table say."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0037"
down_revision = "0036"


def upgrade() -> None:
    install("queue_settling")
