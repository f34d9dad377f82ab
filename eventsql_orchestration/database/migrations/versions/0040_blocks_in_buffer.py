"""Blocks of events in the buffer: one row has the events of a publication that go to one partition."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

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
CREATE OR REPLACE FUNCTION keep_published_block() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    waiting boolean := OLD.eql_values IS NOT NULL;
BEGIN
    IF NOT waiting THEN
        EXECUTE pg_catalog.format(
            'SELECT EXISTS (SELECT FROM %I.spark_staged_event WHERE eql_buffer_id OPERATOR(pg_catalog.=) $1)',
            TG_TABLE_SCHEMA
        ) INTO waiting USING OLD.eql_id;
    END IF;
    IF waiting THEN
        RAISE EXCEPTION 'row % of the buffer of topic % stands for a block of events, which only the transfer of '
            'eventsql-orchestration moves', OLD.eql_id, OLD.eql_topic
            USING ERRCODE = 'check_violation', CONSTRAINT = 'event_buffer_published_block';
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER event_buffer_published_block ON event_buffer;
CREATE TRIGGER event_buffer_published_block AFTER DELETE ON event_buffer
    FOR EACH ROW WHEN (
        OLD.eql_partition < -1
        AND (OLD.eql_values IS NULL OR current_setting('eventsql.takes_blocks', true) IS DISTINCT FROM 'on')
    ) EXECUTE FUNCTION keep_published_block();
"""

# A block in its row takes the right that its events take. A row that stands for a staged block takes a stager's.
_CHECK_PUBLICATION = """
CREATE OR REPLACE FUNCTION {schema}.check_publication() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.eql_partition OPERATOR(pg_catalog.<) -1 THEN
        IF (NEW.eql_partition OPERATOR(pg_catalog.<>) -3 OR NEW.eql_values IS NULL)
            AND NOT pg_catalog.has_table_privilege('{schema}.spark_staged_event'::pg_catalog.regclass, 'INSERT')
        THEN
            RAISE EXCEPTION 'permission denied for table spark_staged_event' USING ERRCODE = 'insufficient_privilege';
        END IF;
        IF pg_catalog.has_function_privilege('{schema}.publish_anywhere()'::pg_catalog.regprocedure, 'EXECUTE') THEN
            RETURN NULL;
        END IF;
    END IF;
    -- Whoever may publish to every topic does not come here.
    IF pg_catalog.has_column_privilege(
        pg_catalog.to_regclass(pg_catalog.format(
            '%I.%I_event', TG_TABLE_SCHEMA, pg_catalog.lower(NEW.eql_topic COLLATE pg_catalog."C")
        ))::pg_catalog.oid, 'eql_id', 'INSERT'
    ) IS NOT TRUE THEN
        RAISE EXCEPTION 'permission denied for topic %', NEW.eql_topic USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NULL;
END
$$;
"""


def upgrade() -> None:
    schema = context.config.attributes["schema"]
    for statements in (_ARRAYS, _INDEX, _GUARD, _CHECK_PUBLICATION):
        run(statements.replace("{schema}", f'"{schema}"'))
