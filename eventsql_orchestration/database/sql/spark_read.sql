-- count_upto -- How many events a range of offsets holds, at most `most`.
SELECT count(*) FROM (
    SELECT FROM {schema}.{event_table} WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s LIMIT %(most)s
) found;

-- offset_of_nth -- The offset of the n-th event after an offset, if there are as many; `skip` is n - 1.
SELECT eql_id
FROM {schema}.{event_table}
WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
ORDER BY eql_id
OFFSET %(skip)s
LIMIT 1;

-- occupied -- For each given range with events: first and last offset, the number of its first events, at most
-- `sample`, and the last offset of these.
SELECT sampled.first, last.eql_id, sampled.events, sampled.upto
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT min(eql_id) AS first, max(eql_id) AS upto, count(*) AS events
    FROM (
        SELECT eql_id FROM {schema}.{event_table}
        WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
        ORDER BY eql_id
        LIMIT %(sample)s
    ) found
) sampled
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id DESC
    LIMIT 1
) last
ORDER BY sampled.first;

-- firsts -- The first offset within each of the given ranges, in their order, NULL for one that holds no event.
SELECT (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id
    LIMIT 1
)
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) WITH ORDINALITY AS wanted (after, upto, number)
ORDER BY wanted.number;

-- fence -- The end of a topic's log when a generation of shards began here; 0 for a newer topic, no row if it has not
-- begun.
SELECT coalesce(fence.eql_fence, 0)
FROM {schema}.shard_layout layout
LEFT JOIN {schema}.shard_fence fence ON fence.eql_generation = layout.eql_generation AND fence.eql_topic = %(topic)s
WHERE layout.eql_generation = %(generation)s;

-- claim -- A claim's consumer and range, whether it is live, its partition's offset, and the consumer's filter.
SELECT claim.eql_topic, claim.eql_consumer, claim.eql_partition, claim.eql_after, claim.eql_upto,
       claim.eql_state = 'claimed', coalesce(consumer.eql_last_event_id, 0), consumer.eql_filter
FROM {schema}.consumer_claim claim
JOIN {schema}.consumer consumer
  ON consumer.eql_topic = claim.eql_topic AND consumer.eql_name = claim.eql_consumer
 AND consumer.eql_partition = claim.eql_partition
WHERE claim.eql_id = %(claim)s;

-- lock_partitions -- Lock the partitions of a consumer, or one of them, in order: number, offset, lease owner, whether
-- it waits for a layout.
SELECT eql_partition, coalesce(eql_last_event_id, 0),
       CASE WHEN eql_lease_expires_at > clock_timestamp() THEN eql_lease_owner END,
       eql_until IS NOT NULL
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s
  AND (%(partition)s::smallint IS NULL OR eql_partition = %(partition)s)
ORDER BY eql_partition
FOR UPDATE;

-- advance -- Move the offset of a locked partition of a consumer forward over what a stream has processed.
UPDATE {schema}.consumer
SET eql_last_event_id = %(upto)s,
    eql_first_event_id = coalesce(eql_first_event_id, %(first)s),
    eql_consumed_events = eql_consumed_events + %(events)s,
    eql_last_consumption_at = clock_timestamp(),
    eql_failed_event_id = NULL,
    eql_attempts = 0,
    eql_failure = NULL,
    eql_retry_at = NULL
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s;
