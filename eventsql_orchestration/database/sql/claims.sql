-- part standing -- Whether events (or a layout) wait after a partition's offset; whether it is leased; the owner of its
-- latest claim, and the seconds since that claim ended (or began, if it is live); the live claim.
c.eql_partition, waiting.some IS NOT NULL OR c.eql_until IS NOT NULL, coalesce(c.eql_lease_expires_at > clock_timestamp(), false),
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

-- standings -- Every partition of a consumer, with its claims. Uses one index step for each partition, as `ready` in
-- consumers.sql.
SELECT {standing}
FROM {claimed_partitions}
LEFT JOIN LATERAL (
    SELECT true AS some FROM {schema}.{event_table} e
    WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0))
      AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
      AND e.eql_id > coalesce(c.eql_last_event_id, 0) AND e.eql_id <= coalesce(c.eql_until, 9223372036854775807)
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- standings_topic -- The same of a consumer of the whole topic.
SELECT {standing}
FROM {claimed_partitions}
LEFT JOIN LATERAL (
    SELECT true AS some FROM {schema}.{event_table} e
    WHERE e.eql_id > coalesce(c.eql_last_event_id, 0)
    ORDER BY e.eql_id
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- last -- The owner of a partition's latest claim, and the seconds since that claim ended (or began, if it is live).
SELECT eql_owner, extract(epoch FROM clock_timestamp() - coalesce(eql_finished_at, eql_created_at))::float8
FROM {schema}.consumer_claim
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
ORDER BY eql_upto DESC
LIMIT 1;

-- first_of_owner -- The first claim of a partition that an owner committed.
SELECT min(eql_id)
FROM {schema}.consumer_claim
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
  AND eql_owner = %(owner)s AND eql_state = 'committed';

-- prune -- Delete ended claims among the first `limit` claims after an offset; gives the number of claims looked at,
-- the end of the last range, and the number of deleted claims. Keeps claims of runs, recent claims, and the partition's
-- latest claim. Concurrent calls skip each other's rows.
WITH looked_at AS MATERIALIZED (
    SELECT eql_id, eql_upto, eql_owner, eql_finished_at
    FROM {schema}.consumer_claim
    WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
      AND eql_upto > %(after)s
    ORDER BY eql_upto
    LIMIT %(limit)s
), over AS (
    SELECT c.eql_id
    FROM looked_at
    JOIN {schema}.consumer_claim c ON c.eql_id = looked_at.eql_id
    WHERE c.eql_state <> 'claimed'
      AND NOT starts_with(looked_at.eql_owner, %(runs)s)
      AND looked_at.eql_finished_at < (clock_timestamp() - make_interval(
          secs => CASE WHEN starts_with(looked_at.eql_owner, %(processes)s) THEN %(leased)s::float8 ELSE %(kept)s::float8 END
      ))
      AND c.eql_id <> (
          SELECT eql_id FROM {schema}.consumer_claim
          WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s
          ORDER BY eql_upto DESC, eql_id DESC
          LIMIT 1
      )
    FOR UPDATE OF c SKIP LOCKED
), deleted AS (
    DELETE FROM {schema}.consumer_claim WHERE eql_id = ANY (SELECT eql_id FROM over)
    RETURNING eql_id
)
SELECT (SELECT count(*) FROM looked_at), (SELECT max(eql_upto) FROM looked_at), (SELECT count(*) FROM deleted);
