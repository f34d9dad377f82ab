"""Consuming in SQL: `SELECT * FROM eventsql.fetch('orders', 'mailer')`, for programs of any language."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    install("reading", "consuming")
