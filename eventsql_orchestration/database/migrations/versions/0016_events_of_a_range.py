"""A range of a topic's log as a function: `SELECT … FROM eventsql.events('orders', 100, 200)`."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    install("log")
