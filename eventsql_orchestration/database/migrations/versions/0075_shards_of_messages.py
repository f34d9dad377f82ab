"""A shard refuses a message in order whose key belongs to another shard, also from the library."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0075"
down_revision = "0074"


def upgrade() -> None:
    install("queue_sending")
