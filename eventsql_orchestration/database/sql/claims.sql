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
          ORDER BY eql_upto DESC
          LIMIT 1
      )
    FOR UPDATE OF c SKIP LOCKED
), deleted AS (
    DELETE FROM {schema}.consumer_claim WHERE eql_id = ANY (SELECT eql_id FROM over)
    RETURNING eql_id
)
SELECT (SELECT count(*) FROM looked_at), (SELECT max(eql_upto) FROM looked_at), (SELECT count(*) FROM deleted);
