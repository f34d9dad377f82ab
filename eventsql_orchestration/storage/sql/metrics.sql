-- parts of forms
-- parts of erasing
-- parts of times

-- readable -- The given topics whose logs exist, if the current role may read the logs.
SELECT known.topic
FROM unnest(%(topics)s::text[], %(logs)s::text[]) AS known (topic, log)
WHERE has_table_privilege(to_regclass(known.log), 'SELECT')
ORDER BY known.topic;

-- log -- A log's identity; the newest offset that it has, or has given out if it is empty; the seconds since its oldest
-- event entered it; its bytes.
SELECT log.tables[1]::bigint,
       coalesce((SELECT max(eql_id) FROM {schema}.{log_table}), pg_sequence_last_value({ids}), 0),
       (SELECT extract(epoch FROM clock_timestamp() - eql_created_at::timestamptz)::float8
        FROM {schema}.{log_table} ORDER BY eql_id LIMIT 1),
       (SELECT coalesce(sum(pg_total_relation_size(own.id)), 0) FROM (
            SELECT unnest(log.tables) UNION ALL SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (log.tables)
        ) AS own (id))::bigint
FROM (SELECT {stores}) AS log (tables);

-- part next_of_partition -- The events after a place in their partition. The conditions are those of `ready`.
WHERE (e.eql_partition, e.eql_id) > (c.partition, c.after)
  AND (e.eql_partition, e.eql_id) <= (c.partition, 9223372036854775807)
  AND e.eql_id > c.after
ORDER BY e.eql_partition, e.eql_id

-- part next_of_log -- The events after a place in the whole log.
WHERE e.eql_id > c.after
ORDER BY e.eql_id

-- part places of next -- What `waiting` says of places. The subquery hides `most` from the planner: where it expects to
-- read all of a small log, it would sort the log for each place.
SELECT c.partition, c.after, counted.events, counted.total, counted.furthest, first.id, first.seconds
FROM unnest(%(partitions)s::smallint[], %(offsets)s::bigint[]) AS c (partition, after)
CROSS JOIN LATERAL (
    SELECT count(*) AS events, CASE WHEN count(*) < %(most)s THEN count(*) END AS total, max(eql_id) AS furthest
    FROM (SELECT e.eql_id FROM {schema}.{event_table} e {next} LIMIT (SELECT %(most)s::bigint)) next
) counted
LEFT JOIN LATERAL (
    SELECT e.eql_id AS id, {seconds_since of e.eql_buffered_at} AS seconds
    FROM {schema}.{event_table} e {next} LIMIT 1
) first ON true

-- waiting -- The events of a log after places. A place is a partition (-1 for all of them) and an offset. Gives the
-- place, number of at most `most` events, the number of all (NULL from `most` rows or blocks on), the last offset of
-- the counted events, the offset of the first, and seconds since the first was published: an index step for each place,
-- and one for each counted event.
{places of {next_of_partition}}
WHERE c.partition >= 0
UNION ALL
{places of {next_of_log}}
WHERE c.partition < 0;

-- ends -- The newest offset of each of these partitions, and with -1 that of the whole log; 0 without events.
SELECT own.partition, coalesce(
    CASE WHEN own.partition < 0 THEN (SELECT max(eql_id) FROM {schema}.{log_table}) ELSE (
        SELECT e.eql_id FROM {schema}.{log_table} e
        WHERE (e.eql_partition, e.eql_id) >= (own.partition, 0)
          AND (e.eql_partition, e.eql_id) <= (own.partition, 9223372036854775807)
        ORDER BY e.eql_partition DESC, e.eql_id DESC
        LIMIT 1
    ) END, 0
)
FROM unnest(%(partitions)s::smallint[]) AS own (partition);

-- open_letters -- How many of the newest `most` dead letters are open: not redriven, dismissed or erased.
SELECT count(*)
FROM (
    SELECT eql_id, eql_value, eql_metadata FROM {schema}.{event_table} ORDER BY eql_id DESC LIMIT %(most)s
) letter
WHERE NOT {erased} AND NOT EXISTS (
    SELECT FROM {schema}.redriven_dead_letter r WHERE r.eql_topic = %(topic)s AND r.eql_letter_id = letter.eql_id
);
