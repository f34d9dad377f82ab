"""Captured tables: less work for each row of a statement that changes many."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0035"
down_revision = "0034"

# As in revision 0018.
_SETTINGS = """SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 SET lc_monetary = 'C'
SET row_security = off"""

# Of revision 0031. The texts of keys are compared only where equal values of the type may have different texts.
_COLUMNS = """
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
    -- With a star: a column may have the name of the row.
    old_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || old_image || ') i)';
    current_image := '(SELECT row_to_json(i.*)::text FROM (SELECT ' || current_image || ') i)';
END
$$;
"""

# Of revision 0031. New keys are looked for before their rows are read, and the partitions of many rows are computed by
# an expression: a call of `partition_of_key` for each takes twice as long.
_CHANGES = """
CREATE OR REPLACE FUNCTION {schema}.capture_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER {settings} AS $$
DECLARE
    captured {schema}.capture;
    place smallint;
    changes integer;
    weight integer := 1;
    to_partition text := '-1';
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
            BEGIN
                PERFORM pg_xact_status(TG_ARGV[1]::xid8);
            EXCEPTION WHEN invalid_parameter_value THEN
                -- A number of another server's, from which this table was restored.
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
            'LEFT JOIN ONLY %4$I.%5$I c ON %6$s OFFSET 0'
            ') images WHERE before IS DISTINCT FROM after',
            part.old_key, part.old_image, part.current_image, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.old_is_current
        );
    END IF;
    IF TG_OP = 'UPDATE' THEN
        -- Rows whose key is new.
        changed := changed || format(
            ' UNION ALL SELECT %s, NULL, %s, ''c'' FROM ('
            'SELECT * FROM new_rows n WHERE NOT EXISTS (SELECT FROM old_rows o WHERE %s) OFFSET 0'
            ') n JOIN ONLY %I.%I c ON %s',
            part.current_key, part.current_image, part.old_is_new, TG_TABLE_SCHEMA, TG_TABLE_NAME, part.new_is_current
        );
    END IF;
    IF place >= 0 AND changes < 1000 THEN
        to_partition := format('{schema}.partition_of_key(key, %s)', place);
    ELSIF place >= 0 THEN
        -- The same, with the remainder of each byte's place.
        to_partition := 'get_byte(hash, 31)';
        FOR byte IN REVERSE 30..0 LOOP
            weight := weight * 256 % place;
            to_partition := to_partition || format(' + get_byte(hash, %s) * %s', byte, weight);
        END LOOP;
        to_partition := format('(%s) %% %s', to_partition, place);
        changed := 'SELECT *, sha256(convert_to(key, ''UTF8'')) AS hash FROM (' || changed || ') keyed OFFSET 0';
    END IF;
    EXECUTE 'WITH written AS (INSERT INTO {schema}.event_buffer '
        '(eql_topic, eql_partition, eql_key, eql_value, eql_metadata) '
        'SELECT $1, ' || to_partition || ', key, '
        'convert_to(''{"before":'' || coalesce(before, ''null'') || '',"after":'' || coalesce(after, ''null'') '
        '|| '',"op":"'' || op || ''"'' || $2, ''UTF8''), '
        'CASE op WHEN ''c'' THEN $3 WHEN ''u'' THEN $4 ELSE $5 END '
        'FROM (' || changed || ') changed RETURNING octet_length(eql_value) AS size) SELECT max(size) FROM written'
    INTO largest
    USING captured.eql_topic, source.tail, json_build_object('op', 'c', 'table', source.name),
          json_build_object('op', 'u', 'table', source.name), json_build_object('op', 'd', 'table', source.name);
    IF largest > 67108864 THEN
        RAISE EXCEPTION 'a change of table % has % bytes, and an event of topic % takes 67108864', source.name, largest,
            captured.eql_topic USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Capture the table again with the columns that are needed.';
    END IF;
    RETURN NULL;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements in (_COLUMNS, _CHANGES):
        run(statements.replace("{settings}", _SETTINGS).replace("{schema}", f'"{name}"'))
