"""A capture that exists goes on while a constraint of its key is not valid: only a new capture is refused."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0053"
down_revision = "0052"


def upgrade() -> None:
    install("capture")
