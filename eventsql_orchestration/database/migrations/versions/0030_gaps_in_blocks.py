"""Blocks with gaps in their ids, as compaction makes them, and with the times when each event entered the log."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

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

# EXECUTE plans the range for its values each time: a plan that was made while the log was small would read all of it.
_EVENTS = """
CREATE OR REPLACE FUNCTION {schema}.events(
    of_topic text, after bigint DEFAULT 0, upto bigint DEFAULT 9223372036854775807
)
RETURNS TABLE (
    eql_id bigint, eql_partition smallint, eql_key text, eql_value bytea,
    eql_buffered_at timestamptz, eql_created_at timestamptz, eql_metadata json
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.topic t WHERE t.eql_name = of_topic) THEN
        RAISE EXCEPTION 'topic % does not exist', coalesce(quote_literal(of_topic), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'The table {schema}.topic lists the topics.';
    END IF;
    IF after IS NULL OR upto IS NULL THEN
        RAISE EXCEPTION 'the range of topic % has no offset where it %', quote_literal(of_topic),
            CASE WHEN after IS NULL THEN 'begins' ELSE 'ends' END
            USING ERRCODE = 'null_value_not_allowed',
                  HINT = 'Leave the argument out for the first event, or for the last.';
    END IF;
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event')) AND relkind = 'v'
    ) THEN
        -- The conditions on the blocks' own ids keep the blocks outside the range from being read.
        RETURN QUERY EXECUTE format(
            'SELECT b.base + coalesce(e.place, e.number), b.eql_partition, e.key, e.value, '
            'coalesce(e.published, b.eql_buffered_at), coalesce(e.entered, b.eql_created_at), '
            'coalesce(e.metadata, ''{}''::json) '
            'FROM (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base FROM %I.%I '
            'WHERE eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
            'AND eql_id - coalesce(eql_span, eql_events) < $2 ORDER BY eql_id) b '
            'CROSS JOIN LATERAL unnest('
            'b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times, b.eql_places, b.eql_entered) '
            'WITH ORDINALITY AS e (value, key, metadata, published, place, entered, number) '
            'WHERE b.base + coalesce(e.place, e.number) > $1 AND b.base + coalesce(e.place, e.number) <= $2 '
            'ORDER BY 1',
            {literal}, lower(of_topic COLLATE "C") || '_block'
        ) USING after, upto;
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT eql_id, eql_partition, eql_key, eql_value, eql_buffered_at::timestamptz, eql_created_at::timestamptz, '
        'eql_metadata FROM %I.%I WHERE eql_id > $1 AND eql_id <= $2 ORDER BY eql_id',
        {literal}, lower(of_topic COLLATE "C") || '_event'
    ) USING after, upto;
END
$$;
"""


# A plan that was made while a table was empty would read the whole table later. EXECUTE plans for its values each time.
_SETTINGS = """LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

# Partition -1 is the whole topic.
_READ = """
CREATE OR REPLACE FUNCTION {schema}.partition_waiting(
    of_topic text, of_partition smallint, after bigint, upto bigint, most bigint,
    OUT events bigint, OUT first bigint, OUT last bigint
)
{settings} AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $4 AND ' ELSE '' END;
    gaps boolean;
BEGIN
    IF (SELECT t.eql_storage FROM {schema}.topic t WHERE t.eql_name = of_topic) = 'blocks' THEN
        EXECUTE format(
            'SELECT EXISTS (SELECT FROM {schema}.%I WHERE eql_span IS NOT NULL AND eql_id > $1)',
            lower(of_topic COLLATE "C") || '_block'
        ) INTO gaps USING after;
        IF gaps THEN
            -- The first blocks with enough events, at most 20,000 of which come before the range, and the blocks with
            -- gaps that have events before the end of these.
            EXECUTE format(
                'WITH own AS NOT MATERIALIZED (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base '
                'FROM {schema}.%I WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
                'AND eql_id - coalesce(eql_span, eql_events) < $2), '
                'reach AS MATERIALIZED (SELECT max(eql_id) AS id FROM ('
                'SELECT eql_id, sum(eql_events) OVER (ORDER BY eql_id) - eql_events AS before FROM ('
                'SELECT eql_id, eql_events FROM own ORDER BY eql_id LIMIT $3) block) found WHERE before < $3 + 20000), '
                'near AS (SELECT * FROM own WHERE eql_id <= (SELECT id FROM reach) UNION ALL '
                'SELECT * FROM own WHERE eql_span IS NOT NULL AND eql_id > (SELECT id FROM reach) '
                'AND eql_id <= (SELECT id FROM reach) + 20000 AND base < (SELECT id FROM reach)) '
                'SELECT count(*), min(next.id), max(next.id) FROM ('
                'SELECT each.id FROM near CROSS JOIN LATERAL ('
                'SELECT near.base + number AS id FROM generate_series(1, near.eql_events) AS number '
                'WHERE near.eql_span IS NULL UNION ALL SELECT near.base + place FROM unnest(near.eql_places) AS place'
                ') each WHERE each.id > $1 AND each.id <= least($2, (SELECT id FROM reach)) '
                'ORDER BY each.id LIMIT $3) next',
                lower(of_topic COLLATE "C") || '_block', own
            ) INTO events, first, last USING after, upto, most, of_partition;
            RETURN;
        END IF;
        EXECUTE format(
            'SELECT coalesce(sum(least(held, $3 - before)), 0)::bigint, min(start) + 1, '
            'max(start + least(held, $3 - before)) FROM ('
            'SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before FROM ('
            'SELECT greatest(eql_id - eql_events, $1) AS start, '
            'least(eql_id, $2) - greatest(eql_id - eql_events, $1) AS held FROM {schema}.%I '
            'WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 AND eql_id - eql_events < $2 '
            'ORDER BY eql_id LIMIT $3) block) next WHERE before < $3',
            lower(of_topic COLLATE "C") || '_block', own
        ) INTO events, first, last USING after, upto, most, of_partition;
        RETURN;
    END IF;
    EXECUTE format(
        'SELECT count(*), min(eql_id), max(eql_id) FROM (SELECT eql_id FROM {schema}.%I '
        'WHERE %s eql_id > $1 AND eql_id <= $2 ORDER BY eql_id LIMIT $3) next',
        lower(of_topic COLLATE "C") || '_event', own
    ) INTO events, first, last USING after, upto, most, of_partition;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.partition_events(of_topic text, of_partition smallint, after bigint, upto bigint)
RETURNS TABLE (
    partition smallint, id bigint, key text, value bytea, metadata json, published_at timestamptz
)
{settings} SET timezone = 'UTC' AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $3 AND ' ELSE '' END;
    source text;
BEGIN
    IF (SELECT t.eql_storage FROM {schema}.topic t WHERE t.eql_name = of_topic) = 'blocks' THEN
        source := format(
            'SELECT b.eql_partition, b.base + coalesce(e.place, e.number) AS eql_id, e.key AS eql_key, '
            'e.value AS eql_value, coalesce(e.metadata, ''{}''::json) AS eql_metadata, '
            'coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at '
            'FROM (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base FROM {schema}.%I '
            'WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
            'AND eql_id - coalesce(eql_span, eql_events) < $2 ORDER BY eql_id) b '
            'CROSS JOIN LATERAL unnest(b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times, b.eql_places) '
            'WITH ORDINALITY AS e (value, key, metadata, published, place, number) '
            'WHERE b.base + coalesce(e.place, e.number) > $1 AND b.base + coalesce(e.place, e.number) <= $2',
            lower(of_topic COLLATE "C") || '_block', own
        );
    ELSE
        source := format(
            'SELECT * FROM {schema}.%I WHERE %s eql_id > $1 AND eql_id <= $2',
            lower(of_topic COLLATE "C") || '_event', own
        );
    END IF;
    -- The metadata of an erased event begin with a mark.
    RETURN QUERY EXECUTE
        'SELECT eql_partition, eql_id, eql_key, CASE WHEN octet_length(eql_value) > 0 '
        'OR NOT starts_with(eql_metadata::text, ''{"eventsql_erased":'') THEN eql_value END, eql_metadata, '
        'eql_buffered_at::timestamptz FROM (' || source || ') event ORDER BY eql_id'
        USING after, upto, of_partition;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements in (_COLUMNS, _EVENTS, _READ.replace("{settings}", _SETTINGS)):
        run(statements.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
