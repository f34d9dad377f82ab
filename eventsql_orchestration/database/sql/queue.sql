-- send -- Write one message, visible after its delay. Uses the clock: the transaction may have begun long before.
INSERT INTO {schema}.queue_message (eql_queue, eql_key, eql_body, eql_metadata, eql_visible_at)
VALUES (
    %(queue)s, %(key)s, %(body)s, %(metadata)s::json,
    clock_timestamp() + make_interval(secs => %(delay)s)
)
RETURNING eql_id;

-- receive -- Take the messages that have been due longest, hidden under a new receipt until their timeout ends. With an
-- array of ids, the planner cannot read the whole queue for a few rows.
WITH received AS (
    UPDATE {schema}.queue_message
    SET eql_visible_at = clock_timestamp() + make_interval(secs => %(visibility_timeout)s),
        eql_receives = eql_receives + 1,
        eql_receipt = gen_random_uuid()
    WHERE eql_id = ANY (ARRAY(
        SELECT eql_id
        FROM {schema}.queue_message
        WHERE eql_queue = %(queue)s AND eql_visible_at <= now()
        ORDER BY eql_visible_at, eql_id
        LIMIT %(max_messages)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING eql_id, eql_body, eql_key, eql_metadata, eql_receives, eql_receipt
)
SELECT
    eql_id AS id, eql_body AS body, eql_key AS key, eql_metadata AS metadata, eql_receives AS receives,
    eql_receipt AS receipt
FROM received
ORDER BY eql_id;

-- acknowledge -- Deletes a message that is still held under this receipt.
DELETE FROM {schema}.queue_message
WHERE eql_id = %(id)s AND eql_queue = %(queue)s AND eql_receipt = %(receipt)s;

-- release -- Makes a message that is still held under this receipt visible at once.
UPDATE {schema}.queue_message
SET eql_visible_at = clock_timestamp(), eql_receipt = NULL
WHERE eql_id = %(id)s AND eql_queue = %(queue)s AND eql_receipt = %(receipt)s;

-- depth -- How many messages are visible, and how many are delayed or held by a receiver.
SELECT
    count(*) FILTER (WHERE eql_visible_at <= now()) AS visible,
    count(*) FILTER (WHERE eql_visible_at > now()) AS invisible
FROM {schema}.queue_message
WHERE eql_queue = %(queue)s;
