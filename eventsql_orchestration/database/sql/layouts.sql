-- layouts -- The layouts of a topic, oldest first: its partitions after an offset. Empty if they never changed.
SELECT eql_layout, eql_partitions, eql_after, eql_created_at
FROM {schema}.topic_layout
WHERE eql_topic = %(topic)s
ORDER BY eql_layout;

-- unsettled -- Consumers that are not in a topic's newest layout yet, and the offset where they wait.
SELECT DISTINCT eql_name, eql_until
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_until IS NOT NULL
ORDER BY eql_name;

-- consumer_size -- How many partitions a consumer has.
SELECT count(*) FROM {schema}.consumer WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s;

-- lock_consumers -- Lock the partitions of a consumer that no other transaction has, and tell whether they are leased.
SELECT eql_partition, eql_until, coalesce(eql_lease_owner IS NOT NULL AND eql_lease_expires_at > clock_timestamp(), false)
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s
ORDER BY eql_partition
FOR UPDATE SKIP LOCKED;

-- enter -- Let a consumer with locked partitions enter the next layout, without partitions that no later layout has.
-- False if it cannot.
SELECT {schema}.enter_layout(%(topic)s, %(consumer)s);

-- release_beyond -- End the claims of partitions that a consumer is about to lose.
UPDATE {schema}.consumer_claim
SET eql_state = 'released', eql_finished_at = clock_timestamp()
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition >= %(partitions)s AND eql_state = 'claimed';

-- delete_beyond -- Delete a consumer's partitions that neither this layout nor a later one has.
DELETE FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition >= %(partitions)s;

-- add_partitions -- Give a consumer partitions up to a number, from an offset on, with the settings of its first
-- partition. A consumer with fewer than `least` partitions gets none: a backfill's window keeps the partitions that it
-- has.
INSERT INTO {schema}.consumer
    (eql_topic, eql_name, eql_partition, eql_last_event_id, eql_consumed_events, eql_paused, eql_max_attempts,
     eql_filter, eql_until)
SELECT c.eql_topic, c.eql_name, added.partition, %(after)s, 0, c.eql_paused, c.eql_max_attempts, c.eql_filter, c.eql_until
FROM (
    SELECT * FROM {schema}.consumer
    WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition >= 0
    ORDER BY eql_partition LIMIT 1
) c
CROSS JOIN generate_series(0, %(partitions)s - 1) AS added (partition)
WHERE %(least)s <= (
    SELECT count(*) FROM {schema}.consumer
    WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition >= 0
)
ON CONFLICT DO NOTHING;

-- hold_all -- Let no consumer of the newest layout consume beyond an offset.
UPDATE {schema}.consumer SET eql_until = %(after)s
WHERE eql_topic = %(topic)s AND eql_partition >= 0 AND eql_until IS NULL;

-- hold -- Let one consumer consume up to an offset; NULL for no bound. A consumer that a new shard holds back stays so.
UPDATE {schema}.consumer SET eql_until = %(until)s
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_until = -1 IS NOT TRUE;

-- add_layout -- Note that a topic has this number of partitions after an offset, since a time or from now on.
INSERT INTO {schema}.topic_layout (eql_topic, eql_layout, eql_partitions, eql_after, eql_created_at)
VALUES (%(topic)s, %(layout)s, %(partitions)s, %(after)s, coalesce(%(since)s, now()))
ON CONFLICT DO NOTHING;

-- lay_out -- Make a layout the definition of the topic.
UPDATE {schema}.topic SET eql_partitions = %(partitions)s, eql_layout = %(layout)s WHERE eql_name = %(topic)s;

-- count_buffered -- The number and the bytes of the events in at most `limit` rows of a topic in the buffer. A staged
-- block counts as `limit` events.
SELECT coalesce(sum(CASE WHEN eql_partition < -1 THEN coalesce(eql_events, %(limit)s) ELSE 1 END), 0)::bigint,
       coalesce(sum(octet_length(eql_value) + coalesce(pg_column_size(eql_values), 0)), 0)
FROM (
    SELECT eql_partition, eql_events, eql_value, eql_values FROM {schema}.event_buffer
    WHERE (eql_topic, eql_id) > (%(topic)s, 0) AND (eql_topic, eql_id) <= (%(topic)s, 9223372036854775807)
    LIMIT %(limit)s
) buffered;

-- buffered_parts -- Cut a topic's events in the buffer into parts by their bytes: the last id of each part.
SELECT max(eql_id)
FROM (
    SELECT eql_id, (sum(octet_length(eql_value) + coalesce(pg_column_size(eql_values), 0)) OVER (ORDER BY eql_id))
               / %(bytes)s AS part
    FROM {schema}.event_buffer
    WHERE (eql_topic, eql_id) > (%(topic)s, 0) AND (eql_topic, eql_id) <= (%(topic)s, 9223372036854775807)
) buffered
GROUP BY part
ORDER BY 1;

-- lock_buffer -- Wait for the publishers' transactions under way, and keep later ones waiting until this transaction ends.
LOCK TABLE {schema}.event_buffer IN SHARE ROW EXCLUSIVE MODE;
