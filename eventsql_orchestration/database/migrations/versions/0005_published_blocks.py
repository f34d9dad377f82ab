"""Blocks of events that are published by one row of the buffer each, and a guard for that row."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0005"
down_revision = "0004"

# No default: no table is rewritten.
_PLACES = """
ALTER TABLE spark_staged_event ADD COLUMN eql_buffer_id bigint;
CREATE UNIQUE INDEX spark_staged_event_published ON spark_staged_event (eql_buffer_id)
    WHERE eql_buffer_id IS NOT NULL;
"""

# Who moves rows of the buffer without knowing of blocks fails with this, and takes nothing out of it.
_GUARD = """
CREATE FUNCTION keep_published_block() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.spark_staged_event WHERE eql_buffer_id = $1)', TG_TABLE_SCHEMA)
        INTO waiting USING OLD.eql_id;
    IF waiting THEN
        RAISE EXCEPTION 'row % of the buffer of topic % stands for a block of events, which only the transfer of '
            'eventsql-orchestration moves', OLD.eql_id, OLD.eql_topic
            USING ERRCODE = 'check_violation', CONSTRAINT = 'event_buffer_published_block';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER event_buffer_published_block AFTER DELETE ON event_buffer
    FOR EACH ROW WHEN (OLD.eql_partition < -1) EXECUTE FUNCTION keep_published_block();
"""


def upgrade() -> None:
    for statements in (_PLACES, _GUARD):
        run(statements)
