"""Logs in blocks: the table `{topic}_block` has them, and the view `{topic}_event` shows their events."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0022"
down_revision = "0021"

_STORAGE = """
ALTER TABLE {schema}.topic ADD COLUMN eql_storage text NOT NULL DEFAULT 'rows'
    CONSTRAINT topic_storage CHECK (eql_storage IN ('rows', 'blocks'));
"""

# Of the view: EventSQL's Java library and earlier versions of this package insert rows.
_REFUSE_ROWS = """
CREATE FUNCTION {schema}.refuse_rows() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the log % is in blocks and takes no rows', quote_ident(TG_TABLE_NAME)
        USING ERRCODE = 'feature_not_supported',
              HINT = 'Only this version of EventSQL Orchestration or a later one writes to it. '
                     'A topic that other programs share must be stored in rows.';
END
$$;
"""

_SEGMENTS = """
CREATE OR REPLACE FUNCTION {schema}.make_segments(of_topic text, events bigint, kept integer) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    log text := format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_event');
    newest bigint;
    ahead integer;
    first bigint;
    past bigint;
    name text;
    segment text;
BEGIN
    IF EXISTS (SELECT FROM pg_class WHERE oid = to_regclass(log) AND relkind = 'v') THEN
        log := format('%I.%I', {literal}, lower(of_topic COLLATE "C") || '_block');
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
    WHERE inherits.inhparent = to_regclass(log);
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

_ENTER_LAYOUT = """
CREATE OR REPLACE FUNCTION {schema}.enter_layout(of_topic text, of_consumer text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint;
    entered integer;
    partitions smallint;
    next_bound bigint;
    behind boolean;
    log text := lower(of_topic COLLATE "C") || '_event';
    -- An event is in a block that ends with it or later.
    first text := 'e.eql_id';
BEGIN
    -- Before anything is locked: a consumer that does not wait for a layout is left alone.
    SELECT min(c.eql_until) INTO bound FROM {schema}.consumer c
    WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
    HAVING count(*) = count(c.eql_until) AND min(c.eql_until) = max(c.eql_until) AND min(c.eql_partition) >= 0;
    SELECT max(l.eql_layout) INTO entered FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_after = bound;
    IF bound IS NULL OR bound < 0 OR entered IS NULL THEN
        RETURN false;
    END IF;
    PERFORM FROM {schema}.consumer c WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
    ORDER BY c.eql_partition FOR UPDATE;
    IF EXISTS (
        SELECT FROM {schema}.consumer c WHERE c.eql_topic = of_topic AND c.eql_name = of_consumer
        AND (c.eql_until IS DISTINCT FROM bound
             OR c.eql_lease_owner IS NOT NULL AND c.eql_lease_expires_at > clock_timestamp())
    ) THEN
        RETURN false;
    END IF;
    IF EXISTS (
        SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', {literal}, log)) AND relkind = 'v'
    ) THEN
        log := lower(of_topic COLLATE "C") || '_block';
        first := 'greatest(e.eql_id - e.eql_events, coalesce(c.eql_last_event_id, 0)) + 1';
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM {schema}.consumer c CROSS JOIN LATERAL (SELECT %s AS first FROM {schema}.%I e '
        'WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0)) '
        'AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807) '
        'AND e.eql_id > coalesce(c.eql_last_event_id, 0) '
        'ORDER BY e.eql_partition, e.eql_id LIMIT 1) waiting '
        'WHERE c.eql_topic = $1 AND c.eql_name = $2 AND waiting.first <= $3)',
        first, log
    ) INTO behind USING of_topic, of_consumer, bound;
    IF behind THEN
        RETURN false;
    END IF;
    SELECT max(l.eql_partitions) INTO partitions FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_layout >= entered;
    SELECT l.eql_after INTO next_bound FROM {schema}.topic_layout l
    WHERE l.eql_topic = of_topic AND l.eql_layout > entered ORDER BY l.eql_layout LIMIT 1;
    UPDATE {schema}.consumer SET eql_last_event_id = greatest(eql_last_event_id, bound), eql_until = next_bound
    WHERE eql_topic = of_topic AND eql_name = of_consumer;
    UPDATE {schema}.consumer_claim SET eql_state = 'released', eql_finished_at = clock_timestamp()
    WHERE eql_topic = of_topic AND eql_consumer = of_consumer AND eql_partition >= partitions
      AND eql_state = 'claimed';
    DELETE FROM {schema}.consumer
    WHERE eql_topic = of_topic AND eql_name = of_consumer AND eql_partition >= partitions;
    RETURN true;
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
            'SELECT b.eql_id - b.eql_events + e.number, b.eql_partition, e.key, e.value, '
            'coalesce(e.published, b.eql_buffered_at), b.eql_created_at, coalesce(e.metadata, ''{}''::json) '
            'FROM (SELECT * FROM %I.%I WHERE eql_id > $1 AND eql_id <= least($2, 9223372036854755807) + 20000 '
            'AND eql_id - eql_events < $2 ORDER BY eql_id) b '
            'CROSS JOIN LATERAL unnest(b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times) '
            'WITH ORDINALITY AS e (value, key, metadata, published, number) '
            'WHERE b.eql_id - b.eql_events + e.number > $1 AND b.eql_id - b.eql_events + e.number <= $2 '
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


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements in (_STORAGE, _REFUSE_ROWS, _SEGMENTS, _ENTER_LAYOUT, _EVENTS):
        run(statements.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
