"""The record of a batch names its topics: a batch for other topics is refused, instead of being skipped."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0072"
down_revision = "0071"

_COLUMN = "ALTER TABLE spark_publication ADD COLUMN eql_topics text[];"


def upgrade() -> None:
    run(_COLUMN)
