"""Logs in both forms: new segments belong to the table that new events enter."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0032"
down_revision = "0031"

# Of a log in both forms, `{topic}_block` is a view. Both tables' segments share the ids.
_SEGMENTS = """
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
    WHILE ahead < kept OR past <= newest LOOP
        first := past;
        past := greatest(past, newest) + events;
        IF first > newest THEN
            ahead := ahead + 1;
        END IF;
        name := left(of_topic, 26) || '_' || left(encode(sha256(convert_to(of_topic, 'UTF8')), 'hex'), 8)
            || '_segment_' || first;
        segment := format('%I.%I', {literal}, name);
        -- Of a topic of this name that was deleted. A table without this mark is somebody's to keep.
        IF obj_description(to_regclass(segment), 'pg_class') = 'eventsql: dropped by retention' THEN
            EXECUTE 'DROP TABLE ' || segment;
        END IF;
        EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING ALL)', segment, log);
        -- The log gives the ids out; a segment that depended on its sequence would keep that from being deleted.
        EXECUTE format('ALTER TABLE %s ALTER COLUMN eql_id DROP DEFAULT', segment);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', log, segment, first, past);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_SEGMENTS.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
