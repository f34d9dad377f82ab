"""Change capture: the changes of a table as events of a topic, written by the transaction that makes them."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0018"
down_revision = "0017"

# Columns are known by their numbers, which a change of a name leaves alone. After a dump and a restore the table has
# another oid, and its columns may have other numbers: then the names count, and the old oid may be another table's.
_CAPTURE = """
CREATE TABLE capture (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_topic text NOT NULL,
    eql_relation oid NOT NULL,
    eql_table text NOT NULL,
    eql_key_names text[] NOT NULL,
    eql_key_numbers smallint[] NOT NULL,
    eql_column_names text[],
    eql_column_numbers smallint[],
    eql_snapshot text NOT NULL
        CONSTRAINT capture_snapshot CHECK (eql_snapshot IN ('none', 'running', 'done')),
    eql_snapshot_after text[],
    eql_snapshot_rows bigint NOT NULL DEFAULT 0,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX capture_topic ON capture (eql_topic);
"""

# The same partitions as ever, from eight parts of 32 bits instead of 32 bytes: a fifth of the time.
_PARTITION_OF_KEY = """
CREATE OR REPLACE FUNCTION partition_of_key(key text, partitions integer) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    bits pg_catalog.bit(256) := ('x' OPERATOR(pg_catalog.||) pg_catalog.encode(
        pg_catalog.sha256(pg_catalog.convert_to(key, 'UTF8')), 'hex'))::pg_catalog.bit(256);
BEGIN
    RETURN {rest};
END
$$;
"""
_REST = "pg_catalog.substring(bits, 1, 32)::bigint OPERATOR(pg_catalog.%) partitions"
for _first in range(33, 257, 32):
    _REST = (
        f"(({_REST}) OPERATOR(pg_catalog.*) 4294967296 OPERATOR(pg_catalog.+)\n        "
        f"pg_catalog.substring(bits, {_first}, 32)::bigint) OPERATOR(pg_catalog.%) partitions"
    )

# The text of a value must not depend on the settings of the session that changes the table.
_SETTINGS = """SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 SET lc_monetary = 'C'
SET row_security = off"""

# Expressions on rows of a captured table, of which `o` is one before the change, `n` one after it, and `c` the row as
# it stands. They run with the rights of the platform's owner, so a value of a type that is not the system's goes
# through its output function alone, never through a cast that somebody has defined. Keys of such types are refused when
# a capture is made.
_COLUMNS = """
CREATE FUNCTION {schema}.capture_columns(
    captured {schema}.capture, of_table oid,
    OUT old_key text, OUT new_key text, OUT current_key text, OUT old_image text, OUT current_image text,
    OUT old_is_current text, OUT new_is_current text, OUT old_is_new text, OUT key_columns text, OUT key_texts text,
    OUT key_values text, OUT missing text
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    same_table boolean := captured.eql_relation = of_table;
    key_numbers smallint[];
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
               FILTER (WHERE place IS NOT NULL)
    INTO old_key, new_key, current_key, old_image, current_image, old_is_current, new_is_current, old_is_new,
         key_columns, key_texts, key_values
    FROM (
        SELECT a.attnum, a.attname, base, array_position(key_numbers, a.attnum) AS place,
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
    -- With a star: a column may have the name of the row.
    old_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || old_image || ') i)';
    current_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || current_image || ') i)';
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_columns({schema}.capture, oid) FROM PUBLIC;
"""

# The partitions of a topic for a transaction that is about to write to the buffer, which no redefinition can change
# afterwards until the transaction ends.
_DESTINATION = """
CREATE FUNCTION {schema}.capture_destination(captured {schema}.capture, OUT partitions smallint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE {schema}.event_buffer IN ROW EXCLUSIVE MODE;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- The snapshot may be older than the definition: then this fails, as a write to a changed row does.
        PERFORM FROM {schema}.hold_topics(ARRAY[captured.eql_topic]);
    END IF;
    IF EXISTS (SELECT FROM {schema}.shard) THEN
        RAISE EXCEPTION 'table % is captured, and its database has become a shard', captured.eql_table
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Run: eventsql capture drop %s %s', captured.eql_table, captured.eql_topic);
    END IF;
    -- Under the lock: the capture may have gone with its topic, and another topic have come.
    SELECT t.eql_partitions INTO partitions
    FROM {schema}.topic t JOIN {schema}.capture c ON c.eql_topic = t.eql_name
    WHERE c.eql_id = captured.eql_id;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_destination({schema}.capture) FROM PUBLIC;
"""

# The last parts of Debezium's envelope.
_SOURCE = """
CREATE FUNCTION {schema}.capture_source(captured {schema}.capture, of_table oid, snapshot text, OUT tail text,
    OUT name text)
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
"""

# Triggers of other names may change the same rows again within a statement, and their changes come first. So `after` is
# the row as it stands, not as this statement left it: the last event of a key always tells its state.
#
# The table's owner must be able to become the platform's owner, because planning a query of a table runs functions that
# its owner can choose, such as those of an index's expression. A writer of the table needs no right on the platform.
_CHANGES = """
CREATE FUNCTION {schema}.capture_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER {settings} AS $$
DECLARE
    captured {schema}.capture;
    place smallint;
    has_rows boolean;
    part record;
    source record;
    changed text;
    largest bigint;
BEGIN
    SELECT * INTO captured FROM {schema}.capture c WHERE c.eql_id = TG_ARGV[0]::bigint;
    IF NOT FOUND THEN
        -- A dropped capture. A transaction that began before the capture was made must begin anew.
        IF current_setting('transaction_isolation') <> 'read committed'
           AND NOT pg_visible_in_snapshot(TG_ARGV[1]::xid8, pg_current_snapshot()) THEN
            RAISE EXCEPTION 'could not serialize access: table % was captured after this transaction began',
                TG_TABLE_NAME USING ERRCODE = 'serialization_failure', HINT = 'Try the transaction again.';
        END IF;
        RETURN NULL;
    END IF;
    IF TG_OP = 'INSERT' THEN
        SELECT EXISTS (SELECT FROM new_rows) INTO has_rows;
    ELSIF TG_OP <> 'TRUNCATE' THEN
        SELECT EXISTS (SELECT FROM old_rows) INTO has_rows;
    END IF;
    IF NOT has_rows THEN
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
               json_build_object('op', 't', 'table', source.name)
        FROM generate_series(CASE WHEN place < 0 THEN -1 ELSE 0 END, CASE WHEN place < 0 THEN -1 ELSE place - 1 END)
            AS partition;
        RETURN NULL;
    END IF;

    part := {schema}.capture_columns(captured, TG_RELID);
    IF NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = TG_RELID), current_user, 'MEMBER') THEN
        part.missing := format('its owner is not a member of role %I', current_user);
    END IF;
    IF part.missing IS NOT NULL THEN
        RAISE EXCEPTION 'table % is captured to topic %, and %', source.name, captured.eql_topic, part.missing
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Run: eventsql capture drop %s %s', captured.eql_table, captured.eql_topic);
    END IF;
    IF TG_OP = 'INSERT' THEN
        changed := format(
            'SELECT %s AS key, NULL::text AS before, %s AS after, ''c'' AS op FROM new_rows n JOIN ONLY %I.%I c ON %s',
            part.current_key, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.new_is_current
        );
    ELSE
        changed := format(
            'SELECT key, before, after, CASE WHEN after IS NULL THEN ''d'' ELSE ''u'' END AS op FROM ('
            'SELECT %1$s AS key, %2$s AS before, CASE WHEN c.ctid IS NOT NULL THEN %3$s END AS after FROM old_rows o '
            'LEFT JOIN ONLY %4$I.%5$I c ON %6$s AND (%7$s) COLLATE "C" = (%1$s) COLLATE "C" OFFSET 0'
            ') images WHERE before IS DISTINCT FROM after',
            part.old_key, part.old_image, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.old_is_current,
            part.current_key
        );
    END IF;
    IF TG_OP = 'UPDATE' THEN
        -- Rows whose key is new.
        changed := changed || format(
            ' UNION ALL SELECT %s, NULL, %s, ''c'' FROM new_rows n JOIN ONLY %I.%I c ON %s WHERE NOT EXISTS '
            '(SELECT FROM old_rows o WHERE %s AND (%s) COLLATE "C" = (%s) COLLATE "C")',
            part.current_key, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.new_is_current,
            part.old_is_new, part.old_key, part.new_key
        );
    END IF;
    EXECUTE 'WITH written AS (INSERT INTO {schema}.event_buffer '
        '(eql_topic, eql_partition, eql_key, eql_value, eql_metadata) '
        'SELECT $1, CASE WHEN $2 < 0 THEN -1 ELSE {schema}.partition_of_key(key, $2) END, key, '
        'convert_to(''{"before":'' || coalesce(before, ''null'') || '',"after":'' || coalesce(after, ''null'') '
        '|| '',"op":"'' || op || ''"'' || $3, ''UTF8''), '
        'CASE op WHEN ''c'' THEN $4 WHEN ''u'' THEN $5 ELSE $6 END '
        'FROM (' || changed || ') changed RETURNING octet_length(eql_value) AS size) SELECT max(size) FROM written'
    INTO largest
    USING captured.eql_topic, place::integer, source.tail, json_build_object('op', 'c', 'table', source.name),
          json_build_object('op', 'u', 'table', source.name), json_build_object('op', 'd', 'table', source.name);
    IF largest > 67108864 THEN
        RAISE EXCEPTION 'a change of table % has % bytes, and an event of topic % takes 67108864', source.name, largest,
            captured.eql_topic USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Capture the table again with the columns that are needed.';
    END IF;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_changes() FROM PUBLIC;
"""

# A row is read while it is locked, in the transaction that publishes it: its changes before have their places in the
# buffer, and its later changes wait. Without waiting for a lock while it holds others, a page cannot deadlock a writer.
_PAGE = """
CREATE FUNCTION {schema}.capture_page(of_capture bigint, most integer, waiting boolean) RETURNS integer
LANGUAGE plpgsql {settings} AS $$
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
        RAISE EXCEPTION 'a row of table % has % bytes as an event, and an event takes 67108864', source.name, largest
            USING ERRCODE = 'program_limit_exceeded',
                  HINT = 'Capture the table again with the columns that are needed.';
    END IF;
    UPDATE {schema}.capture SET eql_snapshot_after = bound, eql_snapshot_rows = eql_snapshot_rows + events
    WHERE eql_id = of_capture;
    RETURN events;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.capture_page(bigint, integer, boolean) FROM PUBLIC;
"""

# Without the row, the triggers on the table do nothing.
_FORGET_CAPTURES = """
CREATE FUNCTION {schema}.forget_captures() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {schema}.capture WHERE eql_topic = OLD.eql_name;
    RETURN NULL;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.forget_captures() FROM PUBLIC;
CREATE TRIGGER topic_captures_forgotten AFTER DELETE ON {schema}.topic
    FOR EACH ROW EXECUTE FUNCTION {schema}.forget_captures();
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_CAPTURE)
    run(_PARTITION_OF_KEY.replace("{rest}", _REST))
    for statements in (_COLUMNS, _DESTINATION, _SOURCE, _CHANGES, _PAGE, _FORGET_CAPTURES):
        run(statements.replace("{settings}", _SETTINGS).replace("{schema}", f'"{name}"'))
