"""Receiving from an ordered queue and recording a failure are refused in transactions that are not READ COMMITTED.

A snapshot that is older than the statement may miss that another message of the key is received, or that an event was
erased.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    install("queue_receiving", "consuming")
