-- part due -- Seconds until a partition may be consumed (its lease ends, its failed event is due); NULL if it is paused.
CASE WHEN NOT c.eql_paused THEN greatest(
    0,
    CASE WHEN c.eql_lease_owner IS NOT NULL
        THEN extract(epoch FROM c.eql_lease_expires_at - clock_timestamp()) END,
    CASE WHEN c.eql_failed_event_id > coalesce(c.eql_last_event_id, 0)
        THEN extract(epoch FROM c.eql_retry_at - clock_timestamp()) END
)::float8 END

-- ready -- Partitions with at least `least` events after their offset (1 if none is asked), the seconds until each may
-- be consumed, and true; and with false, partitions that have consumed all of their layout. The row comparison leaves
-- only the index of partition and id: one step in it for each partition under any plan, even if its events are rare.
-- The condition on the id alone excludes the segments before the offset.
SELECT c.eql_partition, {due}, waiting.some IS NOT NULL
FROM {schema}.consumer c
LEFT JOIN unnest(%(partitions)s::smallint[], %(least)s::bigint[]) AS asked (eql_partition, least)
  ON asked.eql_partition = c.eql_partition
LEFT JOIN LATERAL (
    SELECT true AS some FROM {schema}.{event_table} e
    WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0))
      AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
      AND e.eql_id > coalesce(c.eql_last_event_id, 0) AND e.eql_id <= coalesce(c.eql_until, 9223372036854775807)
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1 OFFSET CASE WHEN c.eql_until IS NULL THEN coalesce(asked.least, 1) ELSE 1 END - 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND (waiting.some OR c.eql_until IS NOT NULL);

-- ready_topic -- The same of a consumer of the whole topic, which is in no layout.
SELECT c.eql_partition, {due}, true
FROM unnest(%(partitions)s::smallint[], %(least)s::bigint[]) AS asked (eql_partition, least)
JOIN {schema}.consumer c
  ON c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition = asked.eql_partition
CROSS JOIN LATERAL (
    SELECT FROM {schema}.{event_table} e
    WHERE e.eql_id > coalesce(c.eql_last_event_id, 0)
    ORDER BY e.eql_id
    LIMIT 1 OFFSET asked.least - 1
) waiting;
