"""Senders do not wait for one another's transactions, and an ordered queue keeps priorities when messages come again.

A send in a transaction that goes on deletes no expired deduplication ids: their next senders would wait for it.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0058"
down_revision = "0057"


def upgrade() -> None:
    install("queue_sending", "queue_receiving")
