"""Queues in SQL: `SELECT * FROM eventsql.queue_receive('thumbnails')`, for programs of any language."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    install("queue_sending", "queue_receiving", "queue_settling")
