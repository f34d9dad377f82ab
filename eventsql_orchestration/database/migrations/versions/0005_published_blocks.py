"""Blocks of events that are published by one row of the buffer each, and a guard for that row."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0005"
down_revision = "0004"

# No default: no table is rewritten.
_PLACES = """
ALTER TABLE spark_staged_event ADD COLUMN eql_buffer_id bigint;
CREATE UNIQUE INDEX spark_staged_event_published ON spark_staged_event (eql_buffer_id)
    WHERE eql_buffer_id IS NOT NULL;
"""

_GUARD = """
CREATE TRIGGER event_buffer_published_block AFTER DELETE ON event_buffer
    FOR EACH ROW WHEN (OLD.eql_partition < -1) EXECUTE FUNCTION keep_published_block();
"""


def upgrade() -> None:
    run(_PLACES)
    install("publishing")
    run(_GUARD)
