"""An acknowledgement takes less of the server's time: it sorts few ids, and plans two statements less."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0045"
down_revision = "0044"


def upgrade() -> None:
    install("queue_settling")
