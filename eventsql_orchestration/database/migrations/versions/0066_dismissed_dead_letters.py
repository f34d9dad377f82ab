"""A dead letter can be dismissed: closed without being published again."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0066"
down_revision = "0065"

_COLUMN = "ALTER TABLE {schema}.redriven_dead_letter ADD COLUMN eql_dismissed boolean NOT NULL DEFAULT false;"


def upgrade() -> None:
    run(_COLUMN)
