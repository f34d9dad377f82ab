-- window_ends -- The last offset of each of the windows of so many events that a range of offsets is cut into.
SELECT max(eql_id)
FROM (
    SELECT eql_id, (row_number() OVER (ORDER BY eql_id) - 1) / %(events)s AS number
    FROM {schema}.{event_table}
    WHERE eql_id > %(after)s AND eql_id <= %(upto)s
) numbered
GROUP BY number
ORDER BY 1;

-- period_ends -- The last offset of each period of so many seconds, counted from 1970, that a range has events of.
SELECT max(eql_id)
FROM {schema}.{event_table}
WHERE eql_id > %(after)s AND eql_id <= %(upto)s
GROUP BY date_bin(make_interval(secs => %(seconds)s), eql_created_at::timestamptz, 'epoch'::timestamptz)
ORDER BY 1;

-- contents -- Of each window and partition that has events: their number, and when the first and the last were logged.
SELECT w.upto, e.eql_partition, count(*), min(e.eql_created_at)::timestamptz, max(e.eql_created_at)::timestamptz
FROM unnest(%(afters)s::bigint[], %(uptos)s::bigint[]) AS w (after, upto)
JOIN {schema}.{event_table} e ON e.eql_id > w.after AND e.eql_id <= w.upto
GROUP BY w.upto, e.eql_partition
ORDER BY w.upto, e.eql_partition;

-- first_after -- The first event of a range of offsets, NULL where it has none.
SELECT min(eql_id) FROM {schema}.{event_table} WHERE eql_id > %(after)s AND eql_id <= %(upto)s;

-- register -- One side consumer for each window, with the form, the attempts and the filter of the consumer itself.
INSERT INTO {schema}.consumer
    (eql_topic, eql_name, eql_partition, eql_last_event_id, eql_consumed_events, eql_max_attempts, eql_filter)
SELECT c.eql_topic, w.name, p.partition, w.after, 0, c.eql_max_attempts, c.eql_filter
FROM {schema}.consumer c
CROSS JOIN unnest(%(names)s::text[], %(afters)s::bigint[]) AS w (name, after)
CROSS JOIN unnest(%(partitions)s::smallint[]) AS p (partition)
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition = ANY (ARRAY[-1, 0]);

-- keep_side_consumer -- The side consumer of a backfill that is done, at its end, in the form of its windows.
INSERT INTO {schema}.consumer
    (eql_topic, eql_name, eql_partition, eql_last_event_id, eql_consumed_events, eql_max_attempts, eql_filter)
SELECT DISTINCT ON (eql_partition) eql_topic, %(into)s, eql_partition, %(upto)s, 0, eql_max_attempts, eql_filter
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = ANY (%(names)s)
ORDER BY eql_partition, eql_name
ON CONFLICT DO NOTHING;

-- delete_windows -- The side consumers of these names. A trigger deletes their claims.
DELETE FROM {schema}.consumer WHERE eql_topic = %(topic)s AND eql_name = ANY (%(names)s);

-- note_finished -- Record that a backfill is done.
INSERT INTO {schema}.finished_backfill (eql_topic, eql_consumer, eql_id)
VALUES (%(topic)s, %(consumer)s, %(id)s)
ON CONFLICT DO NOTHING;

-- finished -- Whether a backfill is done.
SELECT EXISTS (
    SELECT FROM {schema}.finished_backfill
    WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_id = %(id)s
);

-- forget_finished -- Delete the record of an earlier backfill with this id, and all records that are older than 30 days.
DELETE FROM {schema}.finished_backfill
WHERE (eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_id = %(id)s)
   OR eql_finished_at < (now() - make_interval(days => 30));

-- windows -- Every partition of the side consumers whose name has the mark of a backfill.
SELECT eql_topic, eql_name, eql_partition, coalesce(eql_last_event_id, 0), eql_consumed_events, eql_paused,
       CASE WHEN eql_failed_event_id > coalesce(eql_last_event_id, 0) THEN eql_failed_event_id END,
       eql_attempts, eql_max_attempts, eql_failure,
       CASE WHEN eql_lease_expires_at > clock_timestamp() THEN eql_lease_owner END,
       eql_lease_expires_at, eql_created_at,
       greatest(0, extract(epoch FROM eql_retry_at - clock_timestamp()))::float8, eql_given_up
FROM {schema}.consumer
WHERE position(%(mark)s IN eql_name) > 0
  AND (%(topic)s::text IS NULL OR eql_topic = %(topic)s)
ORDER BY eql_topic, eql_name, eql_partition;

-- count_anew -- Count from 0 what the side consumers of these names give up.
UPDATE {schema}.consumer SET eql_given_up = 0
WHERE eql_topic = %(topic)s AND eql_name = ANY (%(names)s) AND eql_given_up > 0;

-- unfinished -- Which of these ranges of offsets, each in a partition, have events.
SELECT r.number
FROM unnest(%(numbers)s::int[], %(partitions)s::smallint[], %(offsets)s::bigint[], %(uptos)s::bigint[])
    AS r (number, part, after, upto)
WHERE EXISTS (
    SELECT FROM {schema}.{event_table} e
    WHERE e.eql_partition = r.part AND e.eql_id > r.after AND e.eql_id <= r.upto
);

-- unfinished_topic -- The same over all partitions.
SELECT r.number
FROM unnest(%(numbers)s::int[], %(offsets)s::bigint[], %(uptos)s::bigint[]) AS r (number, after, upto)
WHERE EXISTS (SELECT FROM {schema}.{event_table} e WHERE e.eql_id > r.after AND e.eql_id <= r.upto);

-- left_of -- How many events a range of offsets holds, counted up to a limit.
SELECT count(*)
FROM (
    SELECT FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
    ORDER BY eql_id
    LIMIT %(limit)s
) next;
