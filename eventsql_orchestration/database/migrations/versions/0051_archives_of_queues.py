"""Two acknowledgements at once make an archive of queues once, and a worker makes none beyond the longest retention."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    install("queue_settling")
