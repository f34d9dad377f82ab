-- log_extent -- The ids of the oldest and the newest event of a topic; 1 and 0 where it is empty.
SELECT coalesce(min(eql_id), 1), coalesce(max(eql_id), 0) FROM {schema}.{event_table};

-- now -- The database's clock.
SELECT clock_timestamp();

-- before_time -- The id of the last event that entered the log before a time, or else one before the first id. Times
-- have no index but grow with ids: this bisects the ids, with at most 63 steps in the primary key. Events below `low`
-- are older than the time.
WITH RECURSIVE search (low, high) AS (
    SELECT coalesce(min(eql_id), 1), coalesce(max(eql_id), 0) + 1 FROM {schema}.{event_table}
    UNION ALL
    SELECT CASE WHEN probe.older THEN probe.eql_id + 1 ELSE search.low END,
           CASE WHEN probe.older THEN search.high ELSE search.low + ((search.high - search.low) / 2) END
    FROM search
    CROSS JOIN LATERAL (
        SELECT eql_id, eql_created_at::timestamptz < %(time)s::timestamptz AS older
        FROM {schema}.{event_table}
        WHERE eql_id >= (search.low + ((search.high - search.low) / 2))
        ORDER BY eql_id
        LIMIT 1
    ) probe
    WHERE search.low < search.high
)
SELECT low - 1 FROM search WHERE low >= high;

-- shift_forward -- The id of the event so many further events after the first after an offset, if there are that many.
SELECT (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > %(offset)s
    ORDER BY eql_id
    OFFSET %(further)s LIMIT 1
);

-- shift_back -- The id of the event so many further events before the last up to an offset, if there are that many.
SELECT (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id <= %(offset)s
    ORDER BY eql_id DESC
    OFFSET %(further)s LIMIT 1
);

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
