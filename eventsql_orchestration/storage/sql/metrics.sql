-- parts of forms

-- readable -- The given topics whose logs exist, if the current role may read the logs.
SELECT known.topic
FROM unnest(%(topics)s::text[], %(logs)s::text[]) AS known (topic, log)
WHERE has_table_privilege(to_regclass(known.log), 'SELECT')
ORDER BY known.topic;

-- log -- A log's identity; the newest offset that it has, or has given out if it is empty; the seconds since its oldest
-- event entered it; its bytes.
SELECT log.tables[1]::bigint,
       coalesce((SELECT max(eql_id) FROM {schema}.{log_table}), pg_sequence_last_value({ids}::regclass), 0),
       (SELECT extract(epoch FROM clock_timestamp() - eql_created_at::timestamptz)::float8
        FROM {schema}.{log_table} ORDER BY eql_id LIMIT 1),
       (SELECT coalesce(sum(pg_total_relation_size(own.id)), 0) FROM (
            SELECT unnest(log.tables) UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (log.tables)
        ) AS own (id))::bigint
FROM (SELECT {stores}) AS log (tables);

-- waiting -- The events of a log that each consumer partition has left: consumer, partition, number of at most `most`,
-- the last offset of these, seconds since the first was published, and whether a partition with a bound may go on below
-- it. The conditions are those of `ready`: an index step for each partition, and one for each counted event.
SELECT c.eql_name, c.eql_partition, counted.events, counted.furthest, first.seconds, first.id <= c.eql_until
FROM {schema}.consumer c
CROSS JOIN LATERAL (
    SELECT count(*) AS events, max(eql_id) AS furthest
    FROM (
        SELECT e.eql_id FROM {schema}.{event_table} e
        WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0))
          AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
          AND e.eql_id > coalesce(c.eql_last_event_id, 0)
        ORDER BY e.eql_partition, e.eql_id
        LIMIT %(most)s
    ) next
) counted
LEFT JOIN LATERAL (
    SELECT e.eql_id AS id, extract(epoch FROM clock_timestamp() - e.eql_buffered_at::timestamptz)::float8 AS seconds
    FROM {schema}.{event_table} e
    WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, coalesce(c.eql_last_event_id, 0))
      AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
      AND e.eql_id > coalesce(c.eql_last_event_id, 0)
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) first ON true
WHERE c.eql_topic = %(topic)s AND c.eql_partition >= 0
UNION ALL
SELECT c.eql_name, c.eql_partition, counted.events, counted.furthest, first.seconds, NULL
FROM {schema}.consumer c
CROSS JOIN LATERAL (
    SELECT count(*) AS events, max(eql_id) AS furthest
    FROM (
        SELECT e.eql_id FROM {schema}.{event_table} e
        WHERE e.eql_id > coalesce(c.eql_last_event_id, 0)
        ORDER BY e.eql_id
        LIMIT %(most)s
    ) next
) counted
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM clock_timestamp() - e.eql_buffered_at::timestamptz)::float8 AS seconds
    FROM {schema}.{event_table} e
    WHERE e.eql_id > coalesce(c.eql_last_event_id, 0)
    ORDER BY e.eql_id
    LIMIT 1
) first ON true
WHERE c.eql_topic = %(topic)s AND c.eql_partition < 0;

-- open_letters -- How many of the newest `most` dead letters were not redriven.
SELECT count(*)
FROM (SELECT eql_id FROM {schema}.{event_table} ORDER BY eql_id DESC LIMIT %(most)s) letter
WHERE NOT EXISTS (
    SELECT FROM {schema}.redriven_dead_letter r WHERE r.eql_topic = %(topic)s AND r.eql_letter_id = letter.eql_id
);
