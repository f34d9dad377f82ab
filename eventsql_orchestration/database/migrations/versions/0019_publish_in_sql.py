"""Publishing in SQL: `SELECT eventsql.publish('orders', 'key', value)`, for programs of any language and triggers."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    install("publishing")
