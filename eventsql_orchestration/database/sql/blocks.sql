-- part published -- The unpublished blocks of attempts, in the order of the array.
unnest(%(attempts)s::uuid[]) WITH ORDINALITY AS published (attempt, number)
    JOIN {schema}.spark_staged_event block ON block.eql_attempt = published.attempt AND block.eql_buffer_id IS NULL

-- to_buffer -- Write the events of the blocks of attempts to the buffer. An erasure of a block that is under way ends first:
-- the block is read as it is then.
WITH block AS MATERIALIZED (
    SELECT published.number, block.eql_position, block.eql_topic, block.eql_partition, block.eql_keys, block.eql_values,
           block.eql_event_metadata
    FROM {published}
    FOR UPDATE OF block
)
INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
SELECT block.eql_topic, block.eql_partition, event.key, event.value, coalesce(event.metadata, '{{}}')
FROM block
    CROSS JOIN LATERAL unnest(block.eql_keys, block.eql_values, block.eql_event_metadata)
        WITH ORDINALITY AS event (key, value, metadata, number)
ORDER BY block.number, block.eql_position, event.number;

-- place -- Publish the blocks of attempts, in the order of the array: a row of the buffer for each, in its place.
WITH ordered AS MATERIALIZED (
    SELECT block.eql_attempt, block.eql_position, block.eql_topic,
           row_number() OVER (ORDER BY published.number, block.eql_position) AS number
    FROM {published}
), referenced AS (
    INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_value, eql_metadata)
    SELECT eql_topic, %(reference)s::smallint, '', '{{}}' FROM ordered ORDER BY number
    RETURNING eql_id
), placed AS (
    SELECT eql_id, row_number() OVER (ORDER BY eql_id) AS number FROM referenced
)
UPDATE {schema}.spark_staged_event block
SET eql_buffer_id = placed.eql_id
FROM ordered JOIN placed ON placed.number = ordered.number
WHERE block.eql_attempt = ordered.eql_attempt AND block.eql_position = ordered.eql_position;

-- drop_of_topic -- Delete the blocks of a topic whose buffer will be emptied: published blocks, and blocks of prepared
-- parts.
DELETE FROM {schema}.spark_staged_event block
WHERE eql_topic = %(topic)s AND (
    eql_buffer_id IS NOT NULL
    OR EXISTS (
        SELECT FROM {schema}.spark_part part
        WHERE part.eql_published_at IS NULL AND block.eql_attempt = ANY (part.eql_attempts)
    )
);

-- empty_buffer -- Delete a topic's rows in the buffer. The setting tells the buffer's trigger that blocks may be deleted.
DELETE FROM {schema}.event_buffer
WHERE eql_topic = %(topic)s AND set_config('eventsql.takes_blocks', 'on', true) = 'on';

-- of_topic -- The staged blocks of a topic: attempt and position.
SELECT eql_attempt, eql_position FROM {schema}.spark_staged_event
WHERE eql_topic = %(topic)s ORDER BY eql_attempt, eql_position;

-- content -- The content of a staged block.
SELECT eql_partition, eql_keys, eql_values, eql_event_metadata::text[]
FROM {schema}.spark_staged_event WHERE eql_attempt = %(attempt)s AND eql_position = %(position)s;

-- hold -- The content of a staged block, held until the transaction ends.
SELECT eql_partition, eql_keys, eql_values, eql_event_metadata::text[]
FROM {schema}.spark_staged_event WHERE eql_attempt = %(attempt)s AND eql_position = %(position)s FOR UPDATE;

-- replace -- Give a staged block another content.
UPDATE {schema}.spark_staged_event
SET eql_values = %(values)b::bytea[], eql_event_metadata = %(metadata)s::text[]::json[]
WHERE eql_attempt = %(attempt)s AND eql_position = %(position)s;
