-- Events of one partition, for consuming in SQL. Partition -1 is the whole topic.
--
-- A log that has blocks is read as blocks, even if its new events are rows: the view of its events would read the
-- whole log. A plan that was made while a table was empty would read the whole table later. EXECUTE makes a plan for
-- the values of each call.

-- Without a limit, `most` is the largest bigint. The first statement takes the ids of a block for consecutive, and also
-- looks for blocks with gaps: compaction may make them between two statements.
CREATE OR REPLACE FUNCTION {schema}.partition_waiting(
    of_topic text, of_partition smallint, after bigint, upto bigint, most bigint,
    OUT events bigint, OUT first bigint, OUT last bigint
)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $4 AND ' ELSE '' END;
    log text := format('{schema}.%I', lower(of_topic COLLATE "C") || '_block');
    gaps boolean;
BEGIN
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event')) AND relkind = 'v'
    ) THEN
        EXECUTE format(
            'WITH with_gaps AS MATERIALIZED ('
            'SELECT EXISTS (SELECT FROM %1$s WHERE eql_span IS NOT NULL AND eql_id > $1) AS found) '
            'SELECT coalesce(sum(least(held, $3 - before)), 0)::bigint, min(start) + 1, '
            'max(start + least(held, $3 - before)), (SELECT found FROM with_gaps) FROM ('
            'SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before FROM ('
            'SELECT greatest(eql_id - eql_events, $1) AS start, '
            'least(eql_id, $2) - greatest(eql_id - eql_events, $1) AS held FROM %1$s '
            'WHERE NOT (SELECT found FROM with_gaps) AND %2$s eql_id > $1 '
            'AND eql_id <= least($2, 9223372036854755807) + 20000 AND eql_id - eql_events < $2 '
            'ORDER BY eql_id LIMIT $3) block) next WHERE before < $3',
            log, own
        ) INTO events, first, last, gaps USING after, upto, most, of_partition;
        IF gaps THEN
            -- The first blocks with enough events, of which at most 20,000 come before the range. Then the blocks with
            -- gaps that have events before the end of the first blocks.
            EXECUTE format(
                'WITH own AS NOT MATERIALIZED (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base '
                'FROM %s WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
                'AND eql_id - coalesce(eql_span, eql_events) < $2), '
                'reach AS MATERIALIZED (SELECT max(eql_id) AS id FROM ('
                'SELECT eql_id, sum(eql_events) OVER (ORDER BY eql_id) - eql_events AS before FROM ('
                'SELECT eql_id, eql_events FROM own ORDER BY eql_id LIMIT $3) block) found WHERE before - 20000 < $3), '
                'near AS (SELECT * FROM own WHERE eql_id <= (SELECT id FROM reach) UNION ALL '
                'SELECT * FROM own WHERE eql_span IS NOT NULL AND eql_id > (SELECT id FROM reach) '
                'AND eql_id <= least((SELECT id FROM reach), 9223372036854755807) + 20000 '
                'AND base < (SELECT id FROM reach)) '
                'SELECT count(*), min(next.id), max(next.id) FROM ('
                'SELECT each.id FROM near CROSS JOIN LATERAL ('
                'SELECT near.base + number AS id FROM generate_series(1, near.eql_events) AS number '
                'WHERE near.eql_span IS NULL UNION ALL SELECT near.base + place FROM unnest(near.eql_places) AS place'
                ') each WHERE each.id > $1 AND each.id <= least($2, (SELECT id FROM reach)) '
                'ORDER BY each.id LIMIT $3) next',
                log, own
            ) INTO events, first, last USING after, upto, most, of_partition;
        END IF;
        RETURN;
    END IF;
    EXECUTE format(
        'SELECT count(*), min(eql_id), max(eql_id) FROM (SELECT eql_id FROM {schema}.%I '
        'WHERE %s eql_id > $1 AND eql_id <= $2 ORDER BY eql_id LIMIT $3) next',
        lower(of_topic COLLATE "C") || '_event', own
    ) INTO events, first, last USING after, upto, most, of_partition;
END
$$;
COMMENT ON FUNCTION {schema}.partition_waiting(text, smallint, bigint, bigint, bigint) IS
    'The first events of a range, at most this number of events: their number, first and last offset.';

-- The statement that reads the events $1 < eql_id <= $2 of a topic, or of its partition $3. `arrays` are the columns of
-- values and of times of a block. A caller that needs neither passes other arrays, and the values stay on the disk.
CREATE OR REPLACE FUNCTION {schema}.range_statement(of_topic text, of_partition smallint, arrays text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own text := CASE WHEN of_partition >= 0 THEN 'eql_partition = $3 AND ' ELSE '' END;
BEGIN
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event')) AND relkind = 'v'
    ) THEN
        RETURN format(
            'SELECT b.eql_partition, b.base + coalesce(e.place, e.number) AS eql_id, e.key AS eql_key, '
            'e.value AS eql_value, coalesce(e.metadata, ''{}''::json) AS eql_metadata, '
            'coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at '
            'FROM (SELECT *, eql_id - coalesce(eql_span, eql_events) AS base FROM {schema}.%I '
            'WHERE %s eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
            'AND eql_id - coalesce(eql_span, eql_events) < $2 ORDER BY eql_id) b '
            'CROSS JOIN LATERAL unnest(%s, b.eql_keys, b.eql_metadata, b.eql_places) '
            'WITH ORDINALITY AS e (value, published, key, metadata, place, number) '
            'WHERE b.base + coalesce(e.place, e.number) > $1 AND b.base + coalesce(e.place, e.number) <= $2',
            lower(of_topic COLLATE "C") || '_block', own, arrays
        );
    END IF;
    RETURN format(
        'SELECT * FROM {schema}.%I WHERE %s eql_id > $1 AND eql_id <= $2',
        lower(of_topic COLLATE "C") || '_event', own
    );
END
$$;

CREATE OR REPLACE FUNCTION {schema}.partition_events(of_topic text, of_partition smallint, after bigint, upto bigint)
RETURNS TABLE (
    partition smallint, id bigint, key text, value bytea, metadata json, published_at timestamptz
)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET timezone = 'UTC' AS $$
BEGIN
    -- The metadata of an erased event begin with a mark.
    RETURN QUERY EXECUTE
        'SELECT eql_partition, eql_id, eql_key, CASE WHEN octet_length(eql_value) > 0 '
        'OR NOT starts_with(eql_metadata::text, ''{"eventsql_erased":'') THEN eql_value END, eql_metadata, '
        'eql_buffered_at::timestamptz FROM ('
        || {schema}.range_statement(of_topic, of_partition, 'b.eql_values, b.eql_times') || ') event ORDER BY eql_id'
        USING after, upto, of_partition;
END
$$;
COMMENT ON FUNCTION {schema}.partition_events(text, smallint, bigint, bigint) IS
    'The events of a range of offsets of one partition, or with -1 of all partitions, in order.';

-- JSON can name a NUL character or half of a character. No text of PostgreSQL can hold these, so functions that take
-- the JSON apart fail. The function writes an escaped backslash in another way first: in JSON, `\\u0000` is a text
-- without a NUL. PostgreSQL parses the body when the function is made, so no session's settings change it, and the
-- planner inlines it.
CREATE OR REPLACE FUNCTION {schema}.readable_metadata(metadata json) RETURNS json LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN json_typeof(metadata) <> 'object' THEN '{}'::json
    WHEN strpos(metadata::text, E'\\u') = 0 THEN metadata
    ELSE regexp_replace(
        replace(metadata::text, E'\\\\', E'\\u005c'),
        E'\\\\u(?:0000|[dD][89abAB][0-9a-fA-F]{2}(?!\\\\u[dD][c-fC-F])'
            || E'|(?<!\\\\u[dD][89abAB][0-9a-fA-F]{2}\\\\u)[dD][c-fC-F][0-9a-fA-F]{2})',
        E'\\\\ufffd', 'g'
    )::json
END;
COMMENT ON FUNCTION {schema}.readable_metadata(json) IS
    'Metadata that PostgreSQL can take apart: without NUL and halves of characters; {} for JSON that is no object.';

CREATE OR REPLACE FUNCTION {schema}.filter_takes(conditions jsonb, key text, metadata json) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (conditions -> 'keys' IS NULL OR coalesce(conditions -> 'keys' ? key, false))
        AND (conditions -> 'key_prefix' IS NULL OR coalesce(starts_with(key, conditions ->> 'key_prefix'), false))
        AND NOT EXISTS (
            SELECT FROM jsonb_each_text(coalesce(conditions -> 'metadata', '{}')) wanted
            WHERE {schema}.readable_metadata(metadata) ->> wanted.key IS DISTINCT FROM wanted.value
               OR json_typeof({schema}.readable_metadata(metadata) -> wanted.key) IS DISTINCT FROM 'string'
        );
END
$$;
COMMENT ON FUNCTION {schema}.filter_takes(jsonb, text, json) IS 'Whether a consumer''s filter takes an event.';

-- The arrays of keys and of metadata are NULL in a block without them. The values of blocks are not read.
CREATE OR REPLACE FUNCTION {schema}.first_taken(
    of_topic text, of_partition smallint, after bigint, upto bigint, conditions jsonb
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    taken bigint;
BEGIN
    EXECUTE 'SELECT min(eql_id) FROM ('
        || {schema}.range_statement(
            of_topic, of_partition, 'array_fill(0, ARRAY[b.eql_events]), NULL::timestamptz[]')
        || ') event WHERE {schema}.filter_takes($4, eql_key, eql_metadata)'
        INTO taken USING after, upto, of_partition, conditions;
    RETURN taken;
END
$$;
