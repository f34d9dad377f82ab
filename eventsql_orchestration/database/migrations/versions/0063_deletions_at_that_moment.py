"""A deletion at that moment loses no event or message of functions in SQL, whose errors and comments are plainer."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0063"
down_revision = "0062"


def upgrade() -> None:
    install(
        "capture", "capture_changes", "consuming", "layouts", "log", "publishing", "queue", "queue_receiving",
        "queue_sending", "queue_settling", "reading", "views",
    )  # fmt: skip
