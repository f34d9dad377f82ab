"""Roles with the least rights that each needs, and the functions that do for a role what it has no rights to do."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0012"
down_revision = "0011"

_ROLES = """
CREATE TABLE {schema}.access_role (
    eql_role text PRIMARY KEY,
    eql_kind text NOT NULL CONSTRAINT access_role_kind
        CHECK (eql_kind IN ('admin', 'transfer', 'publisher', 'stager', 'consumer', 'reader')),
    eql_topic text
);
"""

# Locking a row takes a right to change it, which a publisher must not have.
_HOLD_TOPICS = """
CREATE FUNCTION {schema}.hold_topics(names text[])
RETURNS TABLE (name text, partitions smallint, layout integer)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT t.eql_name, t.eql_partitions, t.eql_layout
    FROM {schema}.topic t
    WHERE t.eql_name = ANY (names)
    ORDER BY t.eql_name
    FOR SHARE
$$;
REVOKE EXECUTE ON FUNCTION {schema}.hold_topics(text[]) FROM PUBLIC;
"""

# Rights on the log stand for rights to publish: INSERT of an id alone can never succeed.
_CHECK_PUBLICATION = """
CREATE FUNCTION {schema}.publish_anywhere() RETURNS void LANGUAGE sql AS 'SELECT';
COMMENT ON FUNCTION {schema}.publish_anywhere() IS
    'Does nothing. A role that may execute this function may publish to every topic.';
REVOKE EXECUTE ON FUNCTION {schema}.publish_anywhere() FROM PUBLIC;

CREATE FUNCTION {schema}.check_publication() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.eql_partition OPERATOR(pg_catalog.<) -1 THEN
        IF NOT pg_catalog.has_table_privilege('{schema}.spark_staged_event'::pg_catalog.regclass, 'INSERT') THEN
            RAISE EXCEPTION 'permission denied for table spark_staged_event' USING ERRCODE = 'insufficient_privilege';
        END IF;
        IF pg_catalog.has_function_privilege('{schema}.publish_anywhere()'::pg_catalog.regprocedure, 'EXECUTE') THEN
            RETURN NULL;
        END IF;
    END IF;
    -- Whoever may publish to every topic does not come here.
    IF pg_catalog.has_column_privilege(
        pg_catalog.to_regclass(pg_catalog.format(
            '%I.%I_event', TG_TABLE_SCHEMA, pg_catalog.lower(NEW.eql_topic COLLATE pg_catalog."C")
        ))::pg_catalog.oid, 'eql_id', 'INSERT'
    ) IS NOT TRUE THEN
        RAISE EXCEPTION 'permission denied for topic %', NEW.eql_topic USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NULL;
END
$$;
"""

# A segment belongs to the owner of its log, so only that one can make it.
_SEGMENTS = """
CREATE FUNCTION {schema}.make_segments(of_topic text, events bigint, kept integer) RETURNS void
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

CREATE FUNCTION {schema}.ensure_segments(of_topic text, events bigint, kept integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF events NOT BETWEEN 1 AND 1000000000000 OR kept NOT BETWEEN 0 AND 10 THEN
        RAISE EXCEPTION 'segments of % events, % ahead, are refused', events, kept
            USING ERRCODE = 'invalid_parameter_value';
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
"""

# A consumer's rows come and go with its layouts; a consuming role must not delete any others.
_ENTER_LAYOUT = """
CREATE FUNCTION {schema}.enter_layout(of_topic text, of_consumer text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint;
    entered integer;
    partitions smallint;
    next_bound bigint;
    behind boolean;
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
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM {schema}.consumer c CROSS JOIN LATERAL (SELECT FROM {schema}.%I e '
        'WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0)) '
        'AND (e.eql_partition, e.eql_id) <= (c.eql_partition, $3) AND e.eql_id > coalesce(c.eql_last_event_id, 0) '
        'ORDER BY e.eql_partition, e.eql_id LIMIT 1) waiting WHERE c.eql_topic = $1 AND c.eql_name = $2)',
        lower(of_topic COLLATE "C") || '_event'
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
REVOKE EXECUTE ON FUNCTION {schema}.enter_layout(text, text) FROM PUBLIC;
"""


# Rights that were given by hand before there were roles go on to be enough: an outbox needed UPDATE on `topic`, a
# consumer DELETE on its rows.
_KEEP_RIGHTS = """
DO $$
DECLARE
    function text;
    grantee text;
BEGIN
    FOR function, grantee IN
        SELECT DISTINCT needed.function,
               CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM (VALUES ('{schema}.topic'::regclass, 'UPDATE', '{schema}.hold_topics(text[])'),
                     ('{schema}.consumer', 'DELETE', '{schema}.enter_layout(text, text)'))
             AS needed (tbl, had, function)
        JOIN pg_catalog.pg_class c ON c.oid = needed.tbl
        CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE acl.privilege_type = needed.had
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION ' || function || ' TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements in (_ROLES, _HOLD_TOPICS, _CHECK_PUBLICATION, _SEGMENTS, _ENTER_LAYOUT, _KEEP_RIGHTS):
        run(statements.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
