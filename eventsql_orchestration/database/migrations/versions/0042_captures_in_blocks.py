"""Captured tables: a statement that changes many rows writes their changes to the buffer in blocks."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0042"
down_revision = "0041"

# As in revision 0018.
_SETTINGS = """SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO, YMD'
SET intervalstyle = 'postgres' SET bytea_output = 'hex' SET extra_float_digits = 1 SET lc_monetary = 'C'
SET row_security = off"""

# Of revision 0035. A row of the buffer that has a block has the partition -3. Few changes for each partition stay rows.
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
    in_blocks boolean := false;
    content text;
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
    content := 'convert_to(''{"before":'' || coalesce(before, ''null'') || '',"after":'' || coalesce(after, ''null'') '
        '|| '',"op":"'' || op || ''"'' || $2, ''UTF8'')';
    changed := format(
        'SELECT %s AS partition, key, %s AS value, '
        'CASE op WHEN ''c'' THEN $3 WHEN ''u'' THEN $4 ELSE $5 END AS metadata FROM (%s) changed',
        to_partition, content, changed
    );
    IF changes = 1000 AND place <= 100 THEN
        SELECT t.eql_storage = 'blocks' INTO in_blocks FROM {schema}.topic t WHERE t.eql_name = captured.eql_topic;
    END IF;
    IF in_blocks THEN
        -- As a publisher's: a block has less than a mebibyte besides its first change, and at most 10,000 changes. All
        -- changes may be of one partition. A key has one change.
        changed := format(
            'INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata, eql_events, '
            'eql_block_partition, eql_keys, eql_values, eql_event_metadata) '
            'SELECT $1, -3, '''', ''{}'', count(*), partition, array_agg(key), array_agg(value), array_agg(metadata) '
            'FROM (SELECT *, (row_number() OVER own - 1) / 10000 AS by_number, '
            'sum(octet_length(value)) OVER own / 1048576 AS by_size '
            'FROM (%s OFFSET 0) valued WINDOW own AS (PARTITION BY partition ROWS UNBOUNDED PRECEDING)) numbered '
            'GROUP BY partition, by_number, by_size '
            'RETURNING CASE WHEN pg_column_size(eql_values) > 67108864 '
            'THEN (SELECT max(octet_length(value)) FROM unnest(eql_values) AS value) END AS size',
            changed
        );
    ELSE
        changed := 'INSERT INTO {schema}.event_buffer (eql_partition, eql_key, eql_value, eql_metadata, eql_topic) '
            'SELECT *, $1 FROM (' || changed || ') valued RETURNING octet_length(eql_value) AS size';
    END IF;
    EXECUTE 'WITH written AS (' || changed || ') SELECT max(size) FROM written'
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
    run(_CHANGES.replace("{settings}", _SETTINGS).replace("{schema}", f'"{name}"'))
