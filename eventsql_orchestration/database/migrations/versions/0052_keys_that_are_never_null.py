"""A key of a captured table may not have rows with NULL that a constraint of PostgreSQL 18 has not looked at."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install

revision = "0052"
down_revision = "0051"


def upgrade() -> None:
    install("capture")
