-- Segments of logs, the view of a log in blocks, and reading a range of a log.

-- The owner of a log owns its segments, so only the owner can make them. The table that new events enter gets the new
-- segments. If a log has both forms, `{topic}_block` is a view, and the segments of both tables share the ids.
CREATE OR REPLACE FUNCTION {schema}.make_segments(of_topic text, events bigint, kept integer) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    folded text := lower(of_topic COLLATE "C");
    log text := format('%I.%I', {literal}, folded || '_event');
    tables oid[] := ARRAY[to_regclass(log)];
    newest bigint;
    ahead integer;
    first bigint;
    past bigint;
    name text;
    segment text;
    settings text;
BEGIN
    IF EXISTS (SELECT FROM pg_class WHERE oid = to_regclass(log) AND relkind = 'v') THEN
        log := format('%I.%I', {literal}, folded || '_block');
        tables := ARRAY[to_regclass(log)];
        IF EXISTS (SELECT FROM pg_class WHERE oid = to_regclass(log) AND relkind = 'v') THEN
            log := format('%I.%I', {literal}, folded || CASE WHEN EXISTS (
                SELECT FROM {schema}.topic t WHERE t.eql_name = of_topic AND t.eql_storage = 'blocks'
            ) THEN '_array' ELSE '_rows' END);
            tables := ARRAY[
                to_regclass(format('%I.%I', {literal}, folded || '_rows')),
                to_regclass(format('%I.%I', {literal}, folded || '_array'))
            ];
        END IF;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class WHERE oid = to_regclass(log) AND relkind = 'p') THEN
        RETURN;
    END IF;
    newest := coalesce(pg_sequence_last_value(pg_get_serial_sequence(log, 'eql_id')::regclass), 0);
    SELECT count(*) FILTER (WHERE bounds.first > newest), coalesce(max(bounds.past), 0) INTO ahead, past
    FROM pg_inherits inherits
    JOIN pg_class c ON c.oid = inherits.inhrelid
    CROSS JOIN LATERAL (
        SELECT coalesce(substring(expression FROM 'FROM [(]''([0-9]+)''[)]')::bigint, 0) AS first,
               substring(expression FROM 'TO [(]''([0-9]+)''[)]')::bigint AS past
        FROM pg_get_expr(c.relpartbound, c.oid) AS expression
    ) bounds
    WHERE inherits.inhparent = ANY (tables);
    -- The log gives out the ids. If a segment depended on the log's sequence, the sequence could not be deleted. No plan
    -- uses statistics of arrays, and ANALYZE would read the keys of all blocks for them.
    SELECT 'ALTER COLUMN eql_id DROP DEFAULT'
        || coalesce(string_agg(format(', ALTER COLUMN %I SET STATISTICS 0', a.attname), ''), '')
    INTO settings
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = to_regclass(log) AND a.attnum > 0 AND NOT a.attisdropped AND t.typcategory = 'A';
    WHILE ahead < kept OR past <= newest LOOP
        first := past;
        past := greatest(past, newest);
        -- The last segment ends at the largest id.
        EXIT WHEN past = 9223372036854775807;
        past := past + least(events, 9223372036854775807 - past);
        IF first > newest THEN
            ahead := ahead + 1;
        END IF;
        name := left(of_topic, 26) || '_' || left(encode(sha256(convert_to(of_topic, 'UTF8')), 'hex'), 8)
            || '_segment_' || first;
        segment := format('%I.%I', {literal}, name);
        -- A segment of a topic of this name that was deleted. A table without the mark stays: an operator keeps it.
        IF obj_description(to_regclass(segment), 'pg_class') = 'eventsql: dropped by retention' THEN
            EXECUTE 'DROP TABLE ' || segment;
        END IF;
        EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL)', segment, log);
        EXECUTE format('ALTER TABLE %s %s', segment, settings);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', log, segment, first, past);
    END LOOP;
END
$$;

-- Makes segments for a role that cannot make tables.
CREATE OR REPLACE FUNCTION {schema}.ensure_segments(of_topic text, events bigint, kept integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF (events BETWEEN 1 AND 1000000000000 AND kept BETWEEN 0 AND 10) IS NOT TRUE THEN
        RAISE EXCEPTION 'a log cannot have segments of % events, with % of them ahead', events, kept
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A segment has 1 to 1000000000000 events, and at most 10 segments are ahead.';
    END IF;
    PERFORM FROM {schema}.topic t JOIN {schema}.event_buffer_lock l ON l.eql_topic = t.eql_name
    WHERE t.eql_name = of_topic FOR UPDATE OF l;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'topic % does not exist', of_topic USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM {schema}.make_segments(of_topic, events, kept);
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.ensure_segments(text, bigint, integer) FROM PUBLIC;

-- The trigger of the view of a log in blocks: EventSQL's Java library and earlier versions of this package insert rows.
CREATE OR REPLACE FUNCTION {schema}.refuse_rows() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the log % is in blocks and takes no rows', quote_ident(TG_TABLE_NAME)
        USING ERRCODE = 'feature_not_supported',
              HINT = 'Only this version of EventSQL Orchestration, or a later one, writes to this log. '
                     'Store a topic that other programs write to in rows.';
END
$$;

-- EXECUTE makes a plan for the values of each call: a plan that was made while the log was small would read the whole
-- log later. Logs of EventSQL's Java library have times without a zone, in UTC.
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
        RAISE EXCEPTION 'the argument % for topic % is NULL', CASE WHEN after IS NULL THEN 'after' ELSE 'upto' END,
            quote_literal(of_topic)
            USING ERRCODE = 'null_value_not_allowed',
                  HINT = 'Leave after out to begin with the first event, and upto to end with the last event.';
    END IF;
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event')) AND relkind = 'v'
    ) THEN
        -- The conditions on the blocks' own ids exclude the blocks outside of the range.
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
COMMENT ON FUNCTION {schema}.events(text, bigint, bigint) IS
    'The events of a topic with after < eql_id <= upto, in order. Needs SELECT on the topic''s log.';
