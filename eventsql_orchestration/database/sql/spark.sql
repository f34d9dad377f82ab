-- offset_of_nth -- The offset of the n-th event after an offset, if there are as many; `skip` is n - 1.
SELECT eql_id
FROM {schema}.{event_table}
WHERE eql_id > %(after)s AND eql_id <= %(upto)s
ORDER BY eql_id
OFFSET %(skip)s
LIMIT 1;

-- offset_of_nth_in_partition -- The same in one partition.
SELECT eql_id
FROM {schema}.{event_table}
WHERE eql_partition = %(partition)s AND eql_id > %(after)s AND eql_id <= %(upto)s
ORDER BY eql_id
OFFSET %(skip)s
LIMIT 1;

-- occupied -- The first and the last offset within each of the given ranges that holds an event.
SELECT first.eql_id, last.eql_id
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id
    LIMIT 1
) first
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id DESC
    LIMIT 1
) last
ORDER BY first.eql_id;

-- occupied_in_partition -- The same in one partition.
SELECT first.eql_id, last.eql_id
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE eql_partition = %(partition)s AND eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id
    LIMIT 1
) first
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE eql_partition = %(partition)s AND eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id DESC
    LIMIT 1
) last
ORDER BY first.eql_id;

-- record_publication -- Becomes the one publication of a writer's batch, or finds that there was one.
INSERT INTO {schema}.spark_publication (eql_writer, eql_batch, eql_events)
VALUES (%(writer)s, %(batch)s, %(events)s)
ON CONFLICT DO NOTHING;

-- known_topics -- Those of the given topics that exist.
SELECT eql_name FROM {schema}.topic WHERE eql_name = ANY (%(topics)s);

-- publish_attempt -- The staged events of one attempt into the buffer, in their order.
INSERT INTO {schema}.event_buffer (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
SELECT eql_topic, eql_partition, eql_key, eql_value, eql_metadata
FROM {schema}.spark_staged_event
WHERE eql_attempt = %(attempt)s
ORDER BY eql_position;

-- delete_attempts -- The staged events of attempts that were published or given up.
DELETE FROM {schema}.spark_staged_event WHERE eql_attempt = ANY (%(attempts)s);

-- delete_orphans -- The staged events of attempts that nobody published or gave up.
-- By the newest event of each: an attempt that takes longer than that goes on staging. A concurrent sweep that has them
-- already is left alone.
DELETE FROM {schema}.spark_staged_event
WHERE (eql_attempt, eql_position) IN (
    SELECT eql_attempt, eql_position
    FROM {schema}.spark_staged_event
    WHERE eql_attempt IN (
        SELECT eql_attempt
        FROM {schema}.spark_staged_event
        GROUP BY eql_attempt
        HAVING max(eql_created_at) < now() - make_interval(hours => %(hours)s)
    )
    FOR UPDATE SKIP LOCKED
);
