-- Captured tables: the changes of statements, and the pages of a snapshot.
--
-- The text of a value must not depend on the settings of the session that changes the table. So the functions have
-- settings of their own.

-- Other triggers may change the same rows again within a statement, and the events of these changes come first. So
-- `after` is the row as it is now, and not as this statement left it: the last event of a key always has the state of
-- its row.
--
-- The table's owner must be able to become the platform's owner: to plan a query of a table, the server runs functions
-- that the table's owner can choose, such as functions in an expression of an index. A writer of the table needs no
-- right on the platform.
--
-- If this server has not reached the number of a transaction yet, the number is another server's. New keys are found
-- before their rows are read. An expression computes the partitions of many rows: a call of `partition_of_key` for each
-- row takes twice as long. The expression is a sum with few terms. The image of a row is a lateral subquery, which the
-- planner makes a part of the join. In the list of columns, the subquery would run once for each row. All values have
-- the same end. The end and the metadata, a third of the bytes, are added after the sort. The row of a block in the
-- buffer has the partition -3. If there are few changes for each partition, they stay rows.
--
-- For few changes, planning takes most of the time. So they are read by a query of one table, with subqueries that find
-- each row as it is now, and the session keeps the plan of their INSERT. That query also tells whether a key is new, and
-- most often none is. It is read row by row, because FOR would hold 50 rows, which may be long.
--
-- The event of a truncation names the number of partitions: the last event of a row may be in a former partition of the
-- topic, which gets no event of the truncation. The hint is a command for a shell, even for a name with quotes. It has
-- no backslash, because sessions read backslashes differently.
CREATE OR REPLACE FUNCTION {schema}.capture_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 SET lc_monetary = 'C'
SET row_security = off AS $$
DECLARE
    captured {schema}.capture;
    place smallint;
    changes integer;
    part record;
    source record;
    new_rows text;
    of_old text;
    of_new text;
    status text;
    altered boolean;
    own text := '';
    changed text;
    rows refcursor;
    change record;
    operation text;
    written bytea;
    largest bigint;
    to_partition text := '-1';
    in_blocks boolean := false;
    value CONSTANT text := 'convert_to(head || $2, ''UTF8'')';
    metadata CONSTANT text := 'CASE op WHEN ''c'' THEN $3 WHEN ''u'' THEN $4 ELSE $5 END';
BEGIN
    SELECT * INTO captured FROM {schema}.capture c WHERE c.eql_id = TG_ARGV[0]::bigint;
    IF NOT FOUND THEN
        -- The capture was dropped, or this transaction began before it was made: then the transaction must begin again.
        IF current_setting('transaction_isolation') <> 'read committed'
           AND NOT pg_visible_in_snapshot(TG_ARGV[1]::xid8, pg_current_snapshot()) THEN
            BEGIN
                PERFORM pg_xact_status(TG_ARGV[1]::xid8);
            EXCEPTION WHEN invalid_parameter_value THEN
                -- The number is of another server, from which this table was restored.
                RETURN NULL;
            END;
            RAISE EXCEPTION 'could not serialize access: table % was captured after this transaction began',
                TG_TABLE_NAME USING ERRCODE = 'serialization_failure', HINT = 'Try the transaction again.';
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        SELECT count(*) INTO changes FROM (SELECT FROM new_rows LIMIT 1000) counted;
    ELSIF TG_OP <> 'TRUNCATE' THEN
        SELECT count(*) INTO changes FROM (SELECT FROM old_rows LIMIT 1000) counted;
    END IF;
    IF changes = 0 THEN
        RETURN NULL;
    END IF;
    place := {schema}.capture_destination(captured);
    IF place IS NULL THEN
        RETURN NULL;
    END IF;
    source := {schema}.capture_source(captured, TG_RELID, 'false');
    IF TG_OP = 'TRUNCATE' THEN
        INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
        SELECT captured.eql_topic, partition, NULL,
               convert_to('{"before":null,"after":null,"op":"t"' || source.tail, 'UTF8'),
               json_build_object('op', 't', 'table', source.name, 'partitions', place::text)
        FROM generate_series(CASE WHEN place < 0 THEN -1 ELSE 0 END, CASE WHEN place < 0 THEN -1 ELSE place - 1 END)
            AS partition;
        RETURN NULL;
    END IF;

    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- xmin and xmax have the last 32 bits of a number of 64.
        status := format(
            'pg_xact_status((%1$s + ((%%s::text::bigint - %1$s + 2147483648) & 4294967295) - 2147483648)::text::xid8)',
            pg_current_xact_id()
        );
        -- This function reads the table's columns as of the snapshot. The statement has those that the table has now.
        EXECUTE format(
            'SELECT EXISTS (SELECT FROM ('
            'SELECT xmax FROM pg_class WHERE oid = $1 UNION ALL SELECT xmax FROM pg_attribute WHERE attrelid = $1'
            ') rows WHERE xmax <> ''0'' AND %s = ''committed'')', format(status, 'xmax')
        ) INTO altered USING TG_RELID;
        IF altered THEN
            RAISE EXCEPTION 'could not serialize access: table % was altered after this transaction began', source.name
                USING ERRCODE = 'serialization_failure', HINT = 'Try the transaction again.';
        END IF;
        -- A row that another transaction deleted since the snapshot is still visible. This transaction wrote the row
        -- that has its key now: of the transactions whose rows are visible, only this one is in progress.
        own := format(' AND %s = ''in progress''', format(status, 'c.xmin'));
    END IF;
    part := {schema}.capture_columns(captured, TG_RELID);
    IF NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), current_user, 'MEMBER') THEN
        part.missing := format('its owner is not a member of role %I', current_user);
    END IF;
    IF part.missing IS NOT NULL THEN
        RAISE EXCEPTION 'table % is captured to topic %, and %', source.name, captured.eql_topic, part.missing
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Run: eventsql capture drop --execute %s %s',
                      CASE WHEN strpos(captured.eql_table, '"') = 0 THEN captured.eql_table
                      ELSE '''' || replace(captured.eql_table, '''', '''"''"''') || '''' END, captured.eql_topic);
    END IF;
    part.old_is_current := part.old_is_current || own;
    part.new_is_current := part.new_is_current || own;
    -- Rows whose key is new.
    new_rows := CASE WHEN TG_OP = 'INSERT' THEN 'new_rows n' ELSE format(
        '(SELECT * FROM new_rows n WHERE NOT EXISTS (SELECT FROM old_rows o WHERE %s) OFFSET 0) n', part.old_is_new
    ) END;
    IF changes < 100 THEN
        of_old := format(
            'SELECT %s AS key, %s AS before, (SELECT %s FROM ONLY %I.%I c WHERE %s) AS after, %s AS moved '
            'FROM old_rows o',
            part.old_key, part.old_image, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.old_is_current,
            CASE WHEN TG_OP = 'DELETE' THEN 'false' ELSE format(
                'EXISTS (SELECT FROM new_rows n WHERE ((%s) COLLATE "C" IN (SELECT (%s) COLLATE "C" FROM old_rows o)) '
                'IS NOT TRUE)', part.new_key, part.old_key
            ) END
        );
        of_new := format(
            'SELECT %s AS key, NULL::text AS before, (SELECT %s FROM ONLY %I.%I c WHERE %s) AS after, false AS moved '
            'FROM %s',
            part.new_key, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.new_is_current, new_rows
        );
        changed := CASE WHEN TG_OP = 'INSERT' THEN of_new ELSE of_old END;
        WHILE changed IS NOT NULL LOOP
            OPEN rows FOR EXECUTE changed;
            changed := NULL;
            LOOP
                FETCH rows INTO change;
                EXIT WHEN NOT FOUND;
                IF change.moved THEN
                    changed := of_new;
                END IF;
                CONTINUE WHEN change.before IS NOT DISTINCT FROM change.after;
                operation := CASE WHEN change.before IS NULL THEN 'c' WHEN change.after IS NULL THEN 'd' ELSE 'u' END;
                written := convert_to(
                    '{"before":' || coalesce(change.before, 'null') || ',"after":' || coalesce(change.after, 'null')
                    || ',"op":"' || operation || '"' || source.tail, 'UTF8'
                );
                INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
                VALUES (captured.eql_topic,
                        CASE WHEN place < 0 THEN -1 ELSE {schema}.partition_of_key(change.key, place) END, change.key,
                        written, json_build_object('op', operation, 'table', source.name));
                largest := greatest(largest, octet_length(written));
            END LOOP;
            CLOSE rows;
        END LOOP;
    ELSE
        of_old := format(
            'SELECT key, before, after, CASE WHEN after IS NULL THEN ''d'' ELSE ''u'' END AS op FROM ('
            'SELECT %s AS key, stood.image AS before, CASE WHEN c.ctid IS NOT NULL THEN stands.image END AS after '
            'FROM old_rows o CROSS JOIN LATERAL %s stood (image) '
            'LEFT JOIN ONLY %I.%I c ON %s CROSS JOIN LATERAL %s stands (image) OFFSET 0'
            ') images WHERE before IS DISTINCT FROM after',
            part.old_key, part.old_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.old_is_current, part.current_image
        );
        of_new := format(
            'SELECT %s AS key, NULL::text AS before, stands.image AS after, ''c'' AS op '
            'FROM %s JOIN ONLY %I.%I c ON %s CROSS JOIN LATERAL %s stands (image)',
            part.current_key, new_rows, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.new_is_current, part.current_image
        );
        changed := CASE TG_OP WHEN 'INSERT' THEN of_new WHEN 'DELETE' THEN of_old
                              ELSE of_old || ' UNION ALL ' || of_new END;
        IF place >= 0 THEN
            -- The same partition: for each remainder of a byte's place, the sum of its bytes times the remainder.
            WITH RECURSIVE bytes (number, weight) AS (
                SELECT 31, 1 % place
                UNION ALL
                SELECT number - 1, weight * 256 % place FROM bytes WHERE number > 0
            )
            SELECT format('(%s) %% %s', coalesce(string_agg(format('(%s) * %s', terms, weight), ' + '), '0'), place)
            INTO to_partition
            FROM (
                SELECT weight, string_agg(format('get_byte(hash, %s)', number), ' + ') AS terms
                FROM bytes WHERE weight > 0 GROUP BY weight
            ) weighted;
            changed := 'SELECT *, sha256(convert_to(key, ''UTF8'')) AS hash FROM (' || changed || ') keyed OFFSET 0';
        END IF;
        changed := format(
            'SELECT %s AS partition, key, op, ''{"before":'' || coalesce(before, ''null'') || '',"after":'' '
            '|| coalesce(after, ''null'') || '',"op":"'' || op || ''"'' AS head FROM (%s) changed',
            to_partition, changed
        );
        IF changes = 1000 AND place <= 100 THEN
            SELECT t.eql_storage = 'blocks' INTO in_blocks FROM {schema}.topic t WHERE t.eql_name = captured.eql_topic;
        END IF;
        IF in_blocks THEN
            -- As a block of a publisher, a block has at most 10,000 changes, and less than a mebibyte besides its first
            -- change. All changes may be of one partition. A key has one change.
            changed := format(
                'INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_events, '
                'eql_block_partition, eql_keys, eql_values, eql_event_metadata) '
                'SELECT $1, -3, '''', ''{}'', count(*), partition, array_agg(key), array_agg(%s), array_agg(%s) '
                'FROM (SELECT *, (row_number() OVER own - 1) / 10000 AS by_number, '
                'sum(octet_length(head) + octet_length($2)) OVER own / 1048576 AS by_size '
                'FROM (%s OFFSET 0) headed WINDOW own AS (PARTITION BY partition ROWS UNBOUNDED PRECEDING)) numbered '
                'GROUP BY partition, by_number, by_size '
                'RETURNING CASE WHEN pg_column_size(eql_values) > 67108864 '
                'THEN (SELECT max(octet_length(value)) FROM unnest(eql_values) AS value) END AS size',
                value, metadata, changed
            );
        ELSE
            changed := format(
                'INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) '
                'SELECT $1, partition, key, %s, %s FROM (%s) headed RETURNING octet_length(eql_value) AS size',
                value, metadata, changed
            );
        END IF;
        EXECUTE 'WITH written AS (' || changed || ') SELECT max(size) FROM written'
        INTO largest
        USING captured.eql_topic, source.tail, json_build_object('op', 'c', 'table', source.name),
              json_build_object('op', 'u', 'table', source.name), json_build_object('op', 'd', 'table', source.name);
    END IF;
    IF largest > 67108864 THEN
        RAISE EXCEPTION 'a change of table % has % bytes, and an event of topic % has at most 67108864', source.name,
            largest, captured.eql_topic USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Capture the table again with the columns that are needed.';
    END IF;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_changes() FROM PUBLIC;

-- A row is locked and read in the transaction that publishes it: the events of its earlier changes are in the buffer,
-- and its later changes wait. A page waits for no lock while it holds others, so it causes no deadlock with a writer.
CREATE OR REPLACE FUNCTION {schema}.capture_page(of_capture bigint, most integer, waiting boolean) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 SET lc_monetary = 'C'
SET row_security = off AS $$
DECLARE
    captured {schema}.capture;
    relation record;
    part record;
    source record;
    place smallint;
    bound text[];
    range text;
    events integer;
    largest bigint;
BEGIN
    SELECT * INTO captured FROM {schema}.capture c
    WHERE c.eql_id = of_capture AND c.eql_snapshot = 'running' FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    SELECT c.oid, format('%I.%I', n.nspname, c.relname) AS name INTO relation
    FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE g.tgname = 'eventsql_capture_' || of_capture || '_insert'
      AND g.tgfoid = '{schema}.capture_changes()'::regprocedure;
    part := {schema}.capture_columns(captured, relation.oid);
    IF part.missing IS NOT NULL OR relation.oid IS NULL THEN
        RAISE EXCEPTION 'table % %', captured.eql_table, coalesce(part.missing, 'has no trigger of this capture')
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    range := CASE WHEN captured.eql_snapshot_after IS NULL THEN 'true'
                  ELSE format('(%s) > (%s)', part.key_columns, part.key_values) END;
    EXECUTE format(
        'SELECT ARRAY[%s] FROM (SELECT %s FROM ONLY %s c WHERE %s ORDER BY %2$s LIMIT $2) c '
        'ORDER BY (%2$s) DESC LIMIT 1',
        part.key_texts, part.key_columns, relation.name, range
    ) INTO bound USING captured.eql_snapshot_after, most;
    IF bound IS NULL THEN
        UPDATE {schema}.capture SET eql_snapshot = 'done', eql_snapshot_after = NULL WHERE eql_id = of_capture;
        RETURN NULL;
    END IF;
    range := format('%s AND (%s) <= (%s)', range, part.key_columns, replace(part.key_values, '$1[', '$2['));
    IF waiting THEN
        EXECUTE format('SELECT FROM ONLY %s c WHERE %s FOR SHARE', relation.name, range)
        USING captured.eql_snapshot_after, bound;
    END IF;
    place := {schema}.capture_destination(captured);
    source := {schema}.capture_source(captured, relation.oid, 'true');
    EXECUTE format(
        'WITH locked AS MATERIALIZED (SELECT %s AS key, %s AS after FROM ONLY %s c WHERE %s FOR SHARE NOWAIT), '
        'written AS (INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata) '
        'SELECT $3, CASE WHEN $4 < 0 THEN -1 ELSE {schema}.partition_of_key(key, $4) END, key, '
        'convert_to(''{"before":null,"after":'' || after || '',"op":"r"'' || $5, ''UTF8''), $6 '
        'FROM locked RETURNING octet_length(eql_value) AS size) SELECT count(*), max(size) FROM written',
        part.current_key, part.current_image, relation.name, range
    ) INTO events, largest
    USING captured.eql_snapshot_after, bound, captured.eql_topic, place::integer, source.tail,
          json_build_object('op', 'r', 'table', source.name);
    IF largest > 67108864 THEN
        RAISE EXCEPTION 'a row of table % has % bytes as an event, and an event has at most 67108864', source.name,
            largest USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Capture the table again with the columns that are needed.';
    END IF;
    UPDATE {schema}.capture SET eql_snapshot_after = bound, eql_snapshot_rows = eql_snapshot_rows + events
    WHERE eql_id = of_capture;
    RETURN events;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_page(bigint, integer, boolean) FROM PUBLIC;
