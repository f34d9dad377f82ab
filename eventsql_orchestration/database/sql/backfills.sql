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

-- count_anew -- Set the numbers of events that these side consumers have given up to 0.
UPDATE {schema}.consumer SET eql_given_up = 0
WHERE eql_topic = %(topic)s AND eql_name = ANY (%(names)s) AND eql_given_up > 0;
