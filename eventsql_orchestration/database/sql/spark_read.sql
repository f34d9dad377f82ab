-- parts of log
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
{advanced};
