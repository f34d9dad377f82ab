"""Which backfills are done: their windows are deleted then, as the windows of a backfill that was given up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0015"
down_revision = "0014"

# Older versions of this package end a backfill without a row here.
_ADDED = """
CREATE TABLE finished_backfill (
    eql_topic text NOT NULL,
    eql_consumer text NOT NULL,
    eql_id text NOT NULL,
    eql_finished_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_consumer, eql_id)
);
"""


def upgrade() -> None:
    run(_ADDED)
    install("leftovers")
