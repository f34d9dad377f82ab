"""Blocks with gaps in their ids, as compaction makes them, and with the times when each event entered the log."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0030"
down_revision = "0029"

# A place is how far an id is behind the id before the block's first event; eql_span is the last place.
_COLUMNS = """
DO $$
DECLARE
    log text;
    stored text;
BEGIN
    FOR log IN
        SELECT c.relname
        FROM pg_class c
        JOIN {schema}.topic t ON c.relname = lower(t.eql_name COLLATE "C") || '_event'
        WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'v'
    LOOP
        stored := format('%I.%I', {literal}, left(log, -6) || '_block');
        EXECUTE format(
            'ALTER TABLE %s ADD COLUMN eql_span integer, ADD COLUMN eql_places smallint[], '
            'ADD COLUMN eql_entered timestamptz[], '
            'ADD CONSTRAINT eql_whole_places CHECK ((eql_places IS NULL) = (eql_span IS NULL) AND ('
            'eql_places IS NULL OR array_ndims(eql_places) = 1 AND array_lower(eql_places, 1) = 1 '
            'AND cardinality(eql_places) = eql_events AND eql_places[1] = 1 AND eql_places[eql_events] = eql_span '
            'AND eql_span > eql_events AND eql_span <= 20000 AND eql_id >= eql_span)), '
            'ADD CONSTRAINT eql_whole_entered CHECK (eql_entered IS NULL OR array_ndims(eql_entered) = 1 '
            'AND array_lower(eql_entered, 1) = 1 AND cardinality(eql_entered) = eql_events)',
            stored
        );
        EXECUTE format(
            'ALTER TABLE %s ALTER COLUMN eql_places SET STORAGE EXTERNAL, '
            'ALTER COLUMN eql_entered SET STORAGE EXTERNAL',
            stored
        );
        EXECUTE format('CREATE INDEX ON %s (eql_id) WHERE eql_span IS NOT NULL', stored);
        EXECUTE format(
            'CREATE OR REPLACE VIEW %I.%I AS '
            'SELECT b.eql_id - coalesce(b.eql_span, b.eql_events) + coalesce(e.place, e.number) AS eql_id, '
            'b.eql_partition, e.key AS eql_key, e.value AS eql_value, '
            'coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at, '
            'coalesce(e.entered, b.eql_created_at) AS eql_created_at, '
            'coalesce(e.metadata, ''{}''::json) AS eql_metadata '
            'FROM %s b CROSS JOIN LATERAL unnest('
            'b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times, b.eql_places, b.eql_entered) '
            'WITH ORDINALITY AS e (value, key, metadata, published, place, entered, number)',
            {literal}, log, stored
        );
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_COLUMNS)
    install("log", "reading")
