-- part due -- Seconds until a partition may be consumed (its lease ends, its failed event is due); NULL if it is paused.
CASE WHEN NOT c.eql_paused THEN greatest(
    0,
    CASE WHEN c.eql_lease_owner IS NOT NULL
        THEN extract(epoch FROM c.eql_lease_expires_at - clock_timestamp()) END,
    CASE WHEN c.eql_failed_event_id > coalesce(c.eql_last_event_id, 0)
        THEN extract(epoch FROM c.eql_retry_at - clock_timestamp()) END
)::float8 END

-- part readiness -- What `ready` says of a partition. A join `waiting` finds out whether it has events.
SELECT c.eql_partition, {due}, waiting.some IS NOT NULL
FROM {schema}.consumer c
LEFT JOIN unnest(%(partitions)s::smallint[], %(least)s::bigint[]) AS asked (eql_partition, least)
  ON asked.eql_partition = c.eql_partition

-- part offset -- Where a partition of a consumer has come to.
coalesce(c.eql_last_event_id, 0)

-- part until -- Where a partition of a consumer waits.
coalesce(c.eql_until, 9223372036854775807)

-- part of_partition of last -- The events of a partition after its offset, up to `last`. The row comparison leaves only
-- the index of partition and id: one step in it for each partition under any plan, even if its events are rare. The
-- condition on the id alone excludes the segments before the offset.
FROM {schema}.{event_table} e
WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, {offset}) AND (e.eql_partition, e.eql_id) <= (c.eql_partition, {last})
  AND e.eql_id > {offset}

-- ready -- The partitions with at least `least` events after their offset (1 by default): partition, seconds until it may
-- be consumed, true. Also the partitions that have consumed all of their layout, and a consumer of the whole topic, with
-- false.
{readiness}
LEFT JOIN LATERAL (
    SELECT true AS some {of_partition of 9223372036854775807} AND e.eql_id <= {until}
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1 OFFSET CASE WHEN c.eql_until IS NULL THEN coalesce(asked.least, 1) ELSE 1 END - 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
  AND (waiting.some OR c.eql_until IS NOT NULL OR c.eql_partition < 0);

-- ready_topic -- As `ready`, for a consumer of the whole topic, which has no layout. Also the partitions of a partitioned
-- consumer, with false.
{readiness}
LEFT JOIN LATERAL (
    SELECT true AS some FROM {schema}.{event_table} e
    WHERE c.eql_partition < 0 AND e.eql_id > {offset}
    ORDER BY e.eql_id
    LIMIT 1 OFFSET coalesce(asked.least, 1) - 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND (waiting.some OR c.eql_partition >= 0);

-- part standing -- Where a partition has come to; whether events (or a layout) wait there; whether it is leased, and
-- paused; the owner of its latest claim, and the seconds since that claim ended (or began, if it is live); the live claim.
c.eql_partition, {offset}, waiting.some IS NOT NULL OR c.eql_until IS NOT NULL,
coalesce(c.eql_lease_expires_at > clock_timestamp(), false), c.eql_paused,
last.owner, last.seconds,
l.eql_id, l.eql_topic, l.eql_consumer, l.eql_partition, l.eql_after, l.eql_upto, l.eql_events, l.eql_epoch,
l.eql_owner, l.eql_state

-- part claimed_partitions -- The partitions of consumers, each with its live claim and its latest claim.
{schema}.consumer c
LEFT JOIN {schema}.consumer_claim l
  ON l.eql_topic = c.eql_topic AND l.eql_consumer = c.eql_name AND l.eql_partition = c.eql_partition
 AND l.eql_state = 'claimed'
LEFT JOIN LATERAL (
    SELECT f.eql_owner AS owner,
           extract(epoch FROM clock_timestamp() - coalesce(f.eql_finished_at, f.eql_created_at))::float8 AS seconds
    FROM {schema}.consumer_claim f
    WHERE f.eql_topic = c.eql_topic AND f.eql_consumer = c.eql_name AND f.eql_partition = c.eql_partition
    ORDER BY f.eql_upto DESC
    LIMIT 1
) last ON true

-- standings -- Every partition of a consumer, with its claims. Uses one index step for each partition, as `ready`.
SELECT {standing}
FROM {claimed_partitions}
LEFT JOIN LATERAL (
    SELECT true AS some {of_partition of 9223372036854775807} AND e.eql_id <= {until}
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- standings_topic -- As `standings`, for a consumer of the whole topic.
SELECT {standing}
FROM {claimed_partitions}
LEFT JOIN LATERAL (
    SELECT true AS some FROM {schema}.{log_table} e
    WHERE e.eql_id > {offset}
    ORDER BY e.eql_id
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- behind -- The partitions of a consumer with events before the offset where it waits, and that offset. Planned as
-- `ready`.
SELECT c.eql_partition, c.eql_until
FROM {schema}.consumer c
CROSS JOIN LATERAL (
    SELECT {of_partition of c.eql_until}
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) waiting
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- before_fence -- Whether a consumer has events left from before a generation. Planned as `ready`.
SELECT EXISTS (
    SELECT FROM {schema}.consumer c
    JOIN {schema}.shard_fence f ON f.eql_topic = c.eql_topic AND f.eql_generation = %(generation)s
    CROSS JOIN LATERAL (
        SELECT {of_partition of f.eql_fence}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT 1
    ) waiting
    WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition >= 0
) OR EXISTS (
    SELECT FROM {schema}.consumer c
    JOIN {schema}.shard_fence f ON f.eql_topic = c.eql_topic AND f.eql_generation = %(generation)s
    CROSS JOIN LATERAL (
        SELECT FROM {schema}.{event_table} e
        WHERE e.eql_id > {offset} AND e.eql_id <= f.eql_fence
        ORDER BY e.eql_id
        LIMIT 1
    ) waiting
    WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition < 0
);
