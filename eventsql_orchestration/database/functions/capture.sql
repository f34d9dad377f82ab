-- Captured tables: the rows of a table as events of a topic.

-- The key of an event has at most 64 KiB. A row may have a longer key that compresses well in its index. The event then
-- gets the hash of the key, so the changes of the key keep their order. An error would fail a transaction that knows
-- nothing of the capture. The planner inlines the function, so the function has no search_path of its own: PostgreSQL
-- resolves the names in it when it is made.
CREATE OR REPLACE FUNCTION {schema}.capture_key(key text) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN pg_catalog.octet_length(key) OPERATOR(pg_catalog.>) 65536
    THEN 'sha256:' OPERATOR(pg_catalog.||)
        pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')), 'hex')
    ELSE key
END;
REVOKE EXECUTE ON FUNCTION {schema}.capture_key(text) FROM PUBLIC;

-- Expressions on rows of a captured table: `o` is a row before the change, `n` a row after the change, and `c` the row
-- as it is now. The expressions run with the rights of the platform's owner. So a value whose type is not the system's
-- becomes text by the output function of the type, and never by a cast that somebody has defined. A new capture refuses
-- keys of these types. Keys without a fixed length pass through `capture_key`. The texts of keys are compared only if
-- equal values of the type may have different texts.
--
-- Since version 18, PostgreSQL has NOT NULL constraints that are not valid. If the key of a capture has one, the
-- capture goes on, and a new capture is refused.
CREATE OR REPLACE FUNCTION {schema}.capture_columns(
    captured {schema}.capture, of_table oid,
    OUT old_key text, OUT new_key text, OUT current_key text, OUT old_image text, OUT current_image text,
    OUT old_is_current text, OUT new_is_current text, OUT old_is_new text, OUT key_columns text, OUT key_texts text,
    OUT key_values text, OUT missing text
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    same_table boolean := captured.eql_relation = of_table;
    key_numbers smallint[];
    short boolean;
    exact boolean;
BEGIN
    SELECT array_agg(a.attnum ORDER BY k.place),
           string_agg(format('%I', k.name), ', ' ORDER BY k.place) FILTER (WHERE a.attnum IS NULL)
    INTO key_numbers, missing
    FROM unnest(captured.eql_key_names, captured.eql_key_numbers) WITH ORDINALITY AS k (name, number, place)
    LEFT JOIN pg_attribute a ON a.attrelid = of_table AND NOT a.attisdropped AND a.attnum > 0
        AND CASE WHEN same_table THEN a.attnum = k.number ELSE a.attname = k.name END;
    IF missing IS NOT NULL THEN
        missing := 'has no column ' || missing;
        RETURN;
    END IF;
    -- Rows without a unique key cannot be told apart.
    IF NOT EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = of_table AND i.indisunique AND i.indimmediate AND i.indisvalid
          AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = cardinality(key_numbers)
          AND (i.indkey::smallint[])[0:i.indnkeyatts - 1] <@ key_numbers
    ) OR EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = of_table AND a.attnum = ANY (key_numbers) AND NOT a.attnotnull
    ) THEN
        missing := 'has no unique key on ' || array_to_string(captured.eql_key_names, ', ');
        RETURN;
    END IF;
    SELECT string_agg(format(key_form, 'o', attname), ', ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format(key_form, 'n', attname), ', ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format(key_form, 'c', attname), ', ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format(form || ' AS %2$I', 'o', attname), ', ' ORDER BY attnum) FILTER (WHERE shown),
           string_agg(format(form || ' AS %2$I', 'c', attname), ', ' ORDER BY attnum) FILTER (WHERE shown),
           string_agg(format('c.%1$I = o.%1$I', attname), ' AND ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format('c.%1$I = n.%1$I', attname), ' AND ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format('o.%1$I = n.%1$I', attname), ' AND ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format('c.%I', attname), ', ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format('c.%I::text', attname), ', ' ORDER BY place) FILTER (WHERE place IS NOT NULL),
           string_agg(format('$1[%s]::%s', place, format_type(base, -1)), ', ' ORDER BY place)
               FILTER (WHERE place IS NOT NULL),
           bool_and(length > 0) FILTER (WHERE place IS NOT NULL),
           bool_and(base = ANY (ARRAY['boolean', 'smallint', 'integer', 'bigint', 'uuid', 'date', 'timestamp',
                                      'timestamptz']::regtype[])) FILTER (WHERE place IS NOT NULL)
    INTO old_key, new_key, current_key, old_image, current_image, old_is_current, new_is_current, old_is_new,
         key_columns, key_texts, key_values, short, exact
    FROM (
        SELECT a.attnum, a.attname, a.attlen AS length, base, array_position(key_numbers, a.attnum) AS place,
               a.attgenerated <> 'v' AND (
                   captured.eql_column_names IS NULL OR a.attnum = ANY (key_numbers)
                   OR CASE WHEN same_table THEN a.attnum = ANY (captured.eql_column_numbers)
                           ELSE a.attname = ANY (captured.eql_column_names) END
               ) AS shown,
               CASE WHEN of_system THEN '%1$s.%2$I::text' ELSE 'format(''%%s'', %1$s.%2$I)' END AS key_form,
               CASE WHEN NOT of_system
                    THEN 'CASE WHEN num_nonnulls(%1$s.%2$I) = 1 THEN format(''%%s'', %1$s.%2$I) END'
                    WHEN base = ANY (ARRAY['numeric', 'json', 'jsonb']::regtype[]) OR category = 'A'
                    THEN '%1$s.%2$I::text'
                    ELSE '%1$s.%2$I' END AS form
        FROM pg_attribute a
        CROSS JOIN LATERAL (
            WITH RECURSIVE below (oid, typtype, typbasetype, typcategory) AS (
                SELECT t.oid, t.typtype, t.typbasetype, t.typcategory FROM pg_type t WHERE t.oid = a.atttypid
                UNION ALL
                SELECT t.oid, t.typtype, t.typbasetype, t.typcategory
                FROM below JOIN pg_type t ON below.typtype = 'd' AND t.oid = below.typbasetype
            )
            SELECT below.oid::regtype AS base, below.oid < 16384 AS of_system, below.typcategory AS category
            FROM below WHERE below.typtype <> 'd'
        ) type
        WHERE a.attrelid = of_table AND a.attnum > 0 AND NOT a.attisdropped
    ) columns;
    IF cardinality(key_numbers) > 1 THEN
        old_key := 'json_build_array(' || old_key || ')::text';
        new_key := 'json_build_array(' || new_key || ')::text';
        current_key := 'json_build_array(' || current_key || ')::text';
    END IF;
    IF NOT short THEN
        old_key := format('{schema}.capture_key(%s)', old_key);
        new_key := format('{schema}.capture_key(%s)', new_key);
        current_key := format('{schema}.capture_key(%s)', current_key);
    END IF;
    IF NOT exact THEN
        old_is_current := format('%s AND (%s) COLLATE "C" = (%s) COLLATE "C"', old_is_current, current_key, old_key);
        old_is_new := format('%s AND (%s) COLLATE "C" = (%s) COLLATE "C"', old_is_new, old_key, new_key);
    END IF;
    -- With a star, because a column may have the same name as the row.
    old_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || old_image || ') i)';
    current_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || current_image || ') i)';
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_columns({schema}.capture, oid) FROM PUBLIC;

-- The partitions of a topic, for a transaction that is about to write to the buffer. Nobody can change them until the
-- transaction ends.
CREATE OR REPLACE FUNCTION {schema}.capture_destination(captured {schema}.capture, OUT partitions smallint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE {schema}.event_buffer IN ROW EXCLUSIVE MODE;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- The snapshot may be older than the definition. Then this call fails, as a write to a changed row does.
        PERFORM FROM {schema}.hold_topics(ARRAY[captured.eql_topic]);
    END IF;
    IF EXISTS (SELECT FROM {schema}.shard) THEN
        RAISE EXCEPTION 'table % is captured, and its database has become a shard', captured.eql_table
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Run: eventsql capture drop %s %s', captured.eql_table, captured.eql_topic);
    END IF;
    -- A look under the lock: the capture and its topic may be gone, and another topic may have the same name.
    SELECT t.eql_partitions INTO partitions
    FROM {schema}.topic t JOIN {schema}.capture c ON c.eql_topic = t.eql_name
    WHERE c.eql_id = captured.eql_id;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_destination({schema}.capture) FROM PUBLIC;

-- The last parts of Debezium's envelope, and the name of the table.
CREATE OR REPLACE FUNCTION {schema}.capture_source(
    captured {schema}.capture, of_table oid, snapshot text, OUT tail text, OUT name text
)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT format(
               ',"source":{"version":"1","connector":"eventsql","name":%s,"ts_ms":%s,"snapshot":"%s","db":%s,'
               '"schema":%s,"table":%s,"txId":%s},"ts_ms":%2$s}',
               to_json(captured.eql_topic), moment.ms, snapshot, to_json(current_database()), to_json(n.nspname),
               to_json(c.relname), pg_current_xact_id()
           ),
           n.nspname || '.' || c.relname
    FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms) moment
    WHERE c.oid = of_table
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_source({schema}.capture, oid, text) FROM PUBLIC;

-- Deletes the captures of a deleted topic. Without their rows, the triggers on the captured tables do nothing.
CREATE OR REPLACE FUNCTION {schema}.forget_captures() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {schema}.capture WHERE eql_topic = OLD.eql_name;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.forget_captures() FROM PUBLIC;
