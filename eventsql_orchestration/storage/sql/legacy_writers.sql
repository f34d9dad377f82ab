-- is_guarded -- Whether a trigger moves events for partitions that a topic does not have.
SELECT EXISTS (
    SELECT FROM pg_trigger
    WHERE tgrelid = to_regclass(%(log)s) AND tgname = 'eql_place_in_layout' AND NOT tgisinternal
);

-- has_partition_index -- Whether a log has the index of partition and id. A log that another program created may lack it.
SELECT EXISTS (
    SELECT FROM pg_index WHERE indrelid = to_regclass(%(log)s) AND pg_get_indexdef(indexrelid) ~~ '%%(eql_partition, eql_id)'
);

-- stranded -- Events in partitions that no consumer gets, because the topic no longer had them: partition, number,
-- first, last. A consumer has the partitions of its layout and of all later layouts.
SELECT gone.partition, sum(found.events)::bigint, min(found.first), max(found.last)
FROM (
    SELECT eql_after AS after, lead(eql_after, 1, 9223372036854775807) OVER (ORDER BY eql_layout) AS upto,
           max(eql_partitions) OVER (ORDER BY eql_layout DESC) AS kept, max(eql_partitions) OVER () AS most
    FROM {schema}.topic_layout
    WHERE eql_topic = %(topic)s
) layout
CROSS JOIN LATERAL generate_series(layout.kept, layout.most - 1) AS gone (partition)
CROSS JOIN LATERAL (
    SELECT count(*) AS events, min(eql_id) AS first, max(eql_id) AS last
    FROM {schema}.{event_table} e
    WHERE e.eql_partition = gone.partition AND e.eql_id > layout.after AND e.eql_id <= layout.upto
) found
WHERE found.events > 0
GROUP BY gone.partition
ORDER BY gone.partition;

-- beyond -- As `stranded`, for a topic without layouts: events in partitions that it does not have.
SELECT e.eql_partition, count(*), min(e.eql_id), max(e.eql_id)
FROM {schema}.{event_table} e
WHERE e.eql_partition >= (SELECT eql_partitions FROM {schema}.topic WHERE eql_name = %(topic)s)
GROUP BY e.eql_partition
ORDER BY e.eql_partition;

-- java_order -- Of the newest events of a topic, at most `limit`: how many EventSQL's Java library published (its
-- metadata has line breaks), how many are behind a later event of their key that moved with them; and whether that
-- library may be connected. Times are times of transactions: of two concurrent transactions, either may have begun first.
WITH newest AS (
    SELECT eql_id, eql_key, eql_buffered_at, eql_created_at, eql_metadata::text AS metadata
    FROM {schema}.{event_table}
    ORDER BY eql_id DESC
    LIMIT %(limit)s
), ordered AS (
    SELECT metadata, eql_key IS NOT NULL AND eql_buffered_at < max(eql_buffered_at) OVER (
        PARTITION BY eql_key, eql_created_at ORDER BY eql_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS behind
    FROM newest
)
SELECT count(*) FILTER (WHERE starts_with(metadata, E'{{\n')), count(*) FILTER (WHERE behind),
       EXISTS (
           SELECT FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = 'PostgreSQL JDBC Driver'
       )
FROM ordered;

-- partitions -- How many partitions a topic has.
SELECT eql_partitions FROM {schema}.topic WHERE eql_name = %(topic)s;
