-- now -- The database's clock.
SELECT clock_timestamp();

-- release_claims -- End the live claims of a consumer's partitions without consuming them.
UPDATE {schema}.consumer_claim
SET eql_state = 'released', eql_finished_at = clock_timestamp()
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = ANY (%(partitions)s)
  AND eql_state = 'claimed';

-- seek -- Move locked partitions of a consumer, each to its offset, and clear leases and failures. The new epoch keeps
-- an earlier owner from continuing.
UPDATE {schema}.consumer c
SET eql_last_event_id = target.id,
    eql_epoch = c.eql_epoch + 1,
    eql_lease_owner = NULL,
    eql_lease_expires_at = NULL,
    eql_failed_event_id = NULL,
    eql_attempts = 0,
    eql_failure = NULL,
    eql_retry_at = NULL
FROM unnest(%(partitions)s::smallint[], %(offsets)s::bigint[]) AS target (partition, id)
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition = target.partition;
