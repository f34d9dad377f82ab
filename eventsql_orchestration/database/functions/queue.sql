-- The functions that the functions of queues call.

CREATE OR REPLACE FUNCTION {schema}.queue_number(
    queue text, OUT number integer, OUT in_order boolean, OUT timeout double precision
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT q.eql_id, q.eql_ordered, q.eql_visibility_timeout INTO number, in_order, timeout
    FROM {schema}.queue q WHERE q.eql_name = queue;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'queue % does not exist', quote_nullable(queue)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Create the queue with `eventsql queue create`, or by its first use in Python.';
    END IF;
END
$$;
COMMENT ON FUNCTION {schema}.queue_number(text) IS 'A queue''s number and options, for the functions of queues.';

-- The history of a message with one more entry, at most the last 20 entries. A message that nobody holds has no
-- receipt: with NULL for `receive`, the history stays as it is. PostgreSQL parses the body when the function is made,
-- so no session's settings change it, and the planner inlines it.
CREATE OR REPLACE FUNCTION {schema}.note_of_message(
    history jsonb, receive integer, at timestamptz, reason text DEFAULT 'the visibility timeout ended'
) RETURNS jsonb LANGUAGE sql STABLE
RETURN CASE
    WHEN receive IS NULL THEN history
    ELSE CASE WHEN pg_catalog.jsonb_array_length(history) >= 20 THEN history - 0 ELSE coalesce(history, '[]') END
        || pg_catalog.jsonb_build_array(
            pg_catalog.jsonb_build_object('receive', receive, 'at', at, 'reason', reason)
        )
END;

-- The error for messages that the receiver does not hold any more.
CREATE OR REPLACE FUNCTION {schema}.refuse_messages(queue text, ids bigint[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'queue % has no message % with this receipt', quote_nullable(queue), array_to_string(ids, ', ')
        USING ERRCODE = 'no_data_found',
              HINT = 'The message was acknowledged or released before, or its visibility timeout ended and another '
                     'receiver took it. Roll the effects back.';
END
$$;
