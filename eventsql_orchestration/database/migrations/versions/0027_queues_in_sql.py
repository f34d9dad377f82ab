"""Queues in SQL: `SELECT * FROM eventsql.queue_receive('thumbnails')`, for programs of any language."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0027"
down_revision = "0026"

# They have their caller's rights, as the library's statements have. The rules are those of `queue.NewMessage`.
_NUMBER = """
CREATE FUNCTION {schema}.queue_number(
    queue text, OUT number integer, OUT in_order boolean, OUT timeout double precision
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT q.eql_id, q.eql_ordered, q.eql_visibility_timeout INTO number, in_order, timeout
    FROM {schema}.queue q WHERE q.eql_name = queue;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'queue % does not exist', quote_nullable(queue)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Create it with `eventsql queue create`, or by the first use in Python.';
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_number(text) IS 'A queue''s number and options, for the functions of queues.';
"""

_SEND = """
CREATE FUNCTION {schema}.queue_send_all(
    queue text, bodies bytea[], keys text[] DEFAULT NULL, metadata json[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL, priorities integer[] DEFAULT NULL, deduplication_ids text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    wrong bigint;
    own text;
    active boolean;
    elsewhere text;
BEGIN
    known := {schema}.queue_number(queue);
    IF bodies IS NULL OR cardinality(bodies) > 10000
       OR cardinality(bodies) <> ANY (ARRAY[cardinality(keys), cardinality(metadata), cardinality(delays),
                                            cardinality(priorities), cardinality(deduplication_ids)]) THEN
        RAISE EXCEPTION 'bodies and the other arrays must have the same number of elements, up to 10000'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For messages without keys, delays and so on, give NULL.';
    END IF;
    SELECT min(each.position) INTO wrong
    FROM unnest(bodies, keys, metadata, delays, priorities, deduplication_ids)
        WITH ORDINALITY AS each (body, key, metadata, delay, priority, deduplication_id, position)
    WHERE each.body IS NULL OR octet_length(each.body) > 67108864 OR octet_length(each.key) > 65536
       OR NOT (each.delay >= 0 AND each.delay <= 31536000) OR NOT (each.priority >= 0 AND each.priority <= 9)
       OR octet_length(each.deduplication_id) > 1024
       OR json_typeof(each.metadata) <> 'object'
       OR octet_length(each.metadata::text) > 2 AND EXISTS (
           SELECT FROM json_each(each.metadata) field
           HAVING coalesce(bool_or(json_typeof(field.value) <> 'string'), false)
               OR count(*) <> count(DISTINCT field.key)
               OR sum(octet_length(field.key) + octet_length(field.value #>> '{}')) > 16777216
       );
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'message % for queue % cannot be stored', wrong, quote_nullable(queue)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A body has up to 67108864 bytes and is not NULL, a key up to 65536 bytes, a deduplication id '
                         'up to 1024 bytes; metadata is a JSON object of strings, each name once, up to 16777216 '
                         'bytes; a delay is 0 to 31536000 seconds; a priority is 0 to 9.';
    END IF;

    SELECT s.eql_name, s.eql_active INTO own, active FROM {schema}.shard s;
    IF own IS NOT NULL THEN
        IF known.in_order THEN
            SELECT each.key INTO elsewhere
            FROM (SELECT l.eql_shards FROM {schema}.shard_layout l ORDER BY l.eql_generation DESC LIMIT 1) layout
            CROSS JOIN unnest(keys) AS each (key)
            WHERE own <> (
                SELECT name FROM unnest(layout.eql_shards) AS name
                ORDER BY sha256(convert_to(name, 'UTF8') || decode('00', 'hex') || convert_to(each.key, 'UTF8')) DESC
                LIMIT 1
            ) AND each.key IS NOT NULL
            LIMIT 1;
        END IF;
        IF elsewhere IS NOT NULL OR NOT active THEN
            RAISE EXCEPTION 'shard % takes no message of key % for queue %',
                own, quote_nullable(elsewhere), quote_nullable(queue)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      HINT = 'Send it on the shard of its key, or finish the addition of this shard.';
        END IF;
    END IF;
    IF cardinality(bodies) = 0 THEN
        RETURN '{}';
    END IF;
    RETURN {schema}.put_messages(
        known.number, bodies, keys, metadata::text[], priorities, NULL, delays,
        -- Its elements are found by their places from 1 on.
        CASE WHEN deduplication_ids IS NOT NULL THEN ARRAY(SELECT unnest(deduplication_ids)) END
    );
END
$$;
COMMENT ON FUNCTION {schema}.queue_send_all(
    text, bytea[], text[], json[], double precision[], integer[], text[]
) IS 'Send messages to a queue in the order of the arrays, as part of this transaction. Gives their ids.';

CREATE FUNCTION {schema}.queue_send(
    queue text, body bytea, key text DEFAULT NULL, metadata json DEFAULT NULL, delay double precision DEFAULT 0,
    priority integer DEFAULT 0, deduplication_id text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ids bigint[];
BEGIN
    -- Without deduplication ids, a queue without order takes the shorter way.
    ids := {schema}.queue_send_all(
        queue, ARRAY[body], ARRAY[key], ARRAY[metadata], ARRAY[coalesce(delay, 0)], ARRAY[coalesce(priority, 0)],
        CASE WHEN deduplication_id IS NOT NULL THEN ARRAY[deduplication_id] END
    );
    RETURN ids[1];
END
$$;
COMMENT ON FUNCTION {schema}.queue_send(text, bytea, text, json, double precision, integer, text) IS
    'Send one message to a queue, as part of this transaction. Gives its id.';
"""

_RECEIVE = """
CREATE FUNCTION {schema}.queue_receive(
    queue text, max_messages integer DEFAULT 1, visibility_timeout double precision DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata json, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb
)
LANGUAGE plpgsql VOLATILE ROWS 100 SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    seconds double precision;
BEGIN
    known := {schema}.queue_number(queue);
    seconds := coalesce(visibility_timeout, known.timeout);
    IF NOT (seconds > 0 AND seconds <= 31536000) OR (max_messages >= 1 AND max_messages <= 10000) IS NOT TRUE THEN
        RAISE EXCEPTION 'max_messages must be 1 to 10000, and visibility_timeout up to 31536000 seconds'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF known.in_order THEN
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_in_order(known.number, least(max_messages, 1000), seconds) t;
    ELSE
        RETURN QUERY
        SELECT t.id, t.body, t.key, t.metadata::json, t.receives, t.receipt, t.priority, t.sent_at, t.history
        FROM {schema}.take_messages(known.number, max_messages, seconds) t;
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_receive(text, integer, double precision) IS
    'Receive visible messages of a queue. Commit at once: they are this receiver''s for the visibility timeout.';
"""

_NOT_HELD = """
        RAISE EXCEPTION 'queue % has no message % with this receipt',
            quote_nullable(queue), array_to_string(missing, ', ')
            USING ERRCODE = 'no_data_found',
                  HINT = 'It was acknowledged or released before, or the visibility timeout ended and another receiver '
                         'took it. Roll the effects back.';
"""

_SETTLE = """
CREATE FUNCTION {schema}.queue_acknowledge_all(queue text, ids bigint[], receipts integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    missing bigint[];
BEGIN
    known := {schema}.queue_number(queue);
    IF ids IS NULL OR cardinality(ids) IS DISTINCT FROM cardinality(receipts)
       OR cardinality(ids) <> (SELECT count(DISTINCT given) FROM unnest(ids) AS given)
       OR array_position(receipts, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'ids and receipts must have one element for each message, each message once'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(ids) = 0 THEN
        RETURN;
    END IF;
    missing := {schema}.acknowledge_messages(known.number, ids, receipts);
    IF missing IS NULL THEN
        RAISE EXCEPTION 'queue % is ordered, and this transaction is not READ COMMITTED', quote_nullable(queue)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'It may miss the message that comes next. Take READ COMMITTED.';
    END IF;
    IF missing <> '{}' THEN
{not_held}
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_acknowledge_all(text, bigint[], integer[]) IS
    'Delete messages whose work is done, all or none, as part of this transaction.';

CREATE FUNCTION {schema}.queue_acknowledge(queue text, id bigint, receipt integer) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.queue_acknowledge_all(queue, ARRAY[id], ARRAY[receipt]);
END
$$;
COMMENT ON FUNCTION {schema}.queue_acknowledge(text, bigint, integer) IS
    'Delete a message whose work is done, as part of this transaction.';

CREATE FUNCTION {schema}.queue_release(
    queue text, id bigint, receipt integer, delay double precision DEFAULT 0, reason text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    known record;
    missing bigint[] := ARRAY[id];
BEGIN
    known := {schema}.queue_number(queue);
    IF (delay >= 0 AND delay <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'delay must be 0 to 31536000 seconds' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE {schema}.queue_message m
    SET eql_visible_at = clock_timestamp() + make_interval(secs => delay), eql_receipt = NULL,
        eql_history = CASE WHEN reason IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
            m.eql_history, m.eql_receives, clock_timestamp(), left(reason, 1000)) END
    WHERE m.eql_id = queue_release.id AND m.eql_queue = known.number AND m.eql_receipt = queue_release.receipt;
    IF NOT FOUND THEN
{not_held}
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_release(text, bigint, integer, double precision, text) IS
    'Give a message back, visible again after a delay in seconds. The reason goes into its history.';

CREATE FUNCTION {schema}.queue_extend(queue text, id bigint, receipt integer, seconds double precision) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    known record;
    missing bigint[] := ARRAY[id];
BEGIN
    known := {schema}.queue_number(queue);
    IF (seconds > 0 AND seconds <= 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'seconds must be more than 0, up to 31536000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    UPDATE {schema}.queue_message m SET eql_visible_at = clock_timestamp() + make_interval(secs => seconds)
    WHERE m.eql_id = queue_extend.id AND m.eql_queue = known.number AND m.eql_receipt = queue_extend.receipt;
    IF NOT FOUND THEN
{not_held}
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_extend(text, bigint, integer, double precision) IS
    'Hold a message for so many seconds from now on.';
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    for statements in (_NUMBER, _SEND, _RECEIVE, _SETTLE):
        run(statements.replace("{not_held}", _NOT_HELD.strip("\n")).replace("{schema}", f'"{name}"'))
