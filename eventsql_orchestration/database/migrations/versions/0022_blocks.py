"""Logs in blocks: the table `{topic}_block` has them, and the view `{topic}_event` shows their events."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0022"
down_revision = "0021"

_STORAGE = """
ALTER TABLE {schema}.topic ADD COLUMN eql_storage text NOT NULL DEFAULT 'rows'
    CONSTRAINT topic_storage CHECK (eql_storage IN ('rows', 'blocks'));
"""


def upgrade() -> None:
    run(_STORAGE)
    install("log", "layouts")
