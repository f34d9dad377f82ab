"""Logs in both forms: new segments belong to the table that new events enter."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0032"
down_revision = "0031"


def upgrade() -> None:
    install("log")
