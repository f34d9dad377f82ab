"""Blocks of events in the buffer: one row has the events of a publication that go to one partition."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0040"
down_revision = "0039"

# No default: no table is rewritten. Such a row has the partition -3, so a transfer of an earlier version stops at it.
_ARRAYS = """
ALTER TABLE event_buffer
    ADD COLUMN eql_events integer, ADD COLUMN eql_block_partition smallint,
    ADD COLUMN eql_keys text[], ADD COLUMN eql_values bytea[], ADD COLUMN eql_event_metadata json[];
ALTER TABLE event_buffer
    ALTER COLUMN eql_keys SET STORAGE EXTERNAL, ALTER COLUMN eql_values SET STORAGE EXTERNAL,
    ALTER COLUMN eql_event_metadata SET STORAGE EXTERNAL;
"""

# Moving single events looks for the first block among them.
_INDEX = """
CREATE INDEX event_buffer_blocks ON event_buffer (eql_topic, eql_id) WHERE eql_partition < -1;
"""

# A program that knows no blocks in the buffer does not make the setting: it fails, and takes nothing out.
_GUARD = """
DROP TRIGGER event_buffer_published_block ON event_buffer;
CREATE TRIGGER event_buffer_published_block AFTER DELETE ON event_buffer
    FOR EACH ROW WHEN (
        OLD.eql_partition < -1
        AND (OLD.eql_values IS NULL OR current_setting('eventsql.takes_blocks', true) IS DISTINCT FROM 'on')
    ) EXECUTE FUNCTION keep_published_block();
"""


def upgrade() -> None:
    for statements in (_ARRAYS, _INDEX):
        run(statements)
    install("publishing")
    run(_GUARD)
