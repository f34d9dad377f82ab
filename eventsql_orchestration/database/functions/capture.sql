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

-- The type below a domain.
CREATE OR REPLACE FUNCTION {schema}.capture_type(type oid) RETURNS oid
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    below oid := type;
BEGIN
    WHILE below <> 0 LOOP
        type := below;
        SELECT t.typbasetype INTO below FROM pg_type t WHERE t.oid = type;
    END LOOP;
    RETURN type;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_type(oid) FROM PUBLIC;

-- Expressions on rows of a captured table: `o` is a row before the change, `n` a row after the change, and `c` the row
-- as it is now. The expressions run with the rights of the platform's owner. So a value whose type is not the system's
-- becomes text by the output function of the type, and never by a cast that somebody has defined. A new capture refuses
-- keys of these types. Keys without a fixed length pass through `capture_key`. The texts of keys are compared only if
-- equal values of the type may have different texts.
--
-- Each statement of a writer pays for this function, so it makes one pass over the columns. It makes patterns of
-- `format`, where `%1$s` is a row and a percent sign in a name is doubled.
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
    places integer[];
    columns text;
    key text;
    image text;
    present boolean;
    short boolean;
    exact boolean;
BEGIN
    SELECT array_agg(attnum) FILTER (WHERE place > 0), array_agg(place) FILTER (WHERE place > 0),
           string_agg('%1$s.' || name, ', ' ORDER BY place) FILTER (WHERE place > 0),
           string_agg('c.' || quote_ident(attname) || '::text', ', ' ORDER BY place) FILTER (WHERE place > 0),
           string_agg(CASE WHEN base < 16384 THEN '%1$s.' || name || '::text'
                           ELSE 'format(''%%s'', %1$s.' || name || ')' END, ', ' ORDER BY place)
               FILTER (WHERE place > 0),
           string_agg(CASE WHEN base >= 16384
                           THEN replace(
                               'CASE WHEN num_nonnulls(?) = 1 THEN format(''%%s'', ?) END', '?', '%1$s.' || name
                           )
                           WHEN base = ANY (ARRAY['numeric', 'json', 'jsonb']::regtype[]) OR typcategory = 'A'
                           THEN '%1$s.' || name || '::text'
                           ELSE '%1$s.' || name END || ' AS ' || name, ', ' ORDER BY attnum)
               FILTER (WHERE attgenerated <> 'v' AND (
                   captured.eql_column_names IS NULL OR place > 0
                   OR CASE WHEN same_table THEN attnum = ANY (captured.eql_column_numbers)
                           ELSE attname = ANY (captured.eql_column_names) END
               )),
           string_agg(format('$1[%s]::%s', place, format_type(base, -1)), ', ' ORDER BY place)
               FILTER (WHERE place > 0),
           bool_and(attnotnull) FILTER (WHERE place > 0), bool_and(attlen > 0) FILTER (WHERE place > 0),
           bool_and(base = ANY (ARRAY['boolean', 'smallint', 'integer', 'bigint', 'uuid', 'date', 'timestamp',
                                      'timestamptz']::regtype[])) FILTER (WHERE place > 0)
    INTO key_numbers, places, columns, key_texts, key, image, key_values, present, short, exact
    FROM (
        SELECT a.attnum, a.attname, a.attgenerated, a.attnotnull, a.attlen, t.typcategory,
               replace(quote_ident(a.attname), '%', '%%') AS name,
               CASE WHEN t.typtype = 'd' THEN {schema}.capture_type(t.oid) ELSE t.oid END AS base,
               CASE WHEN same_table THEN array_position(captured.eql_key_numbers, a.attnum)
                    ELSE array_position(captured.eql_key_names, a.attname::text) END AS place
        FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
        WHERE a.attrelid = of_table AND a.attnum > 0 AND NOT a.attisdropped OFFSET 0
    ) columns;
    IF cardinality(places) IS DISTINCT FROM cardinality(captured.eql_key_names) THEN
        SELECT 'has no column ' || string_agg(format('%I', k.name), ', ' ORDER BY k.place) INTO missing
        FROM unnest(captured.eql_key_names) WITH ORDINALITY AS k (name, place)
        WHERE k.place = ANY (places) IS NOT TRUE;
        RETURN;
    END IF;
    -- Rows without a unique key cannot be told apart.
    IF NOT present OR NOT EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = of_table AND i.indisunique AND i.indimmediate AND i.indisvalid
          AND i.indpred IS NULL AND i.indnkeyatts = cardinality(key_numbers)
          AND (i.indkey::smallint[])[0:i.indnkeyatts - 1] <@ key_numbers
    ) THEN
        missing := 'has no unique key on ' || array_to_string(captured.eql_key_names, ', ');
        RETURN;
    END IF;
    IF cardinality(places) > 1 THEN
        key := 'json_build_array(' || key || ')::text';
    END IF;
    IF NOT short THEN
        key := '{schema}.capture_key(' || key || ')';
    END IF;
    -- With a star, because a column may have the same name as the row.
    image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || image || ') i)';
    old_key := format(key, 'o');
    new_key := format(key, 'n');
    current_key := format(key, 'c');
    old_image := format(image, 'o');
    current_image := format(image, 'c');
    key_columns := format(columns, 'c');
    old_is_current := format('(%s) = (%s)', key_columns, format(columns, 'o'));
    new_is_current := format('(%s) = (%s)', key_columns, format(columns, 'n'));
    old_is_new := format('(%s) = (%s)', format(columns, 'o'), format(columns, 'n'));
    IF NOT exact THEN
        old_is_current := format('%s AND (%s) COLLATE "C" = (%s) COLLATE "C"', old_is_current, current_key, old_key);
        new_is_current := format('%s AND (%s) COLLATE "C" = (%s) COLLATE "C"', new_is_current, current_key, new_key);
        old_is_new := format('%s AND (%s) COLLATE "C" = (%s) COLLATE "C"', old_is_new, old_key, new_key);
    END IF;
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
                  HINT = format('Run: eventsql capture drop --execute %s %s', captured.eql_table, captured.eql_topic);
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
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ms CONSTANT bigint := floor(extract(epoch FROM clock_timestamp()) * 1000);
BEGIN
    SELECT format(
               ',"source":{"version":"1","connector":"eventsql","name":%s,"ts_ms":%s,"snapshot":"%s","db":%s,'
               '"schema":%s,"table":%s,"txId":%s},"ts_ms":%2$s}',
               to_json(captured.eql_topic), ms, snapshot, to_json(current_database()), to_json(n.nspname),
               to_json(c.relname), pg_current_xact_id()
           ),
           n.nspname || '.' || c.relname
    INTO tail, name
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = of_table;
END
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
