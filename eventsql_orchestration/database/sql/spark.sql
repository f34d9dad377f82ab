-- record_publication -- Becomes the one publication of a writer's batch, or finds that there was one.
INSERT INTO {schema}.spark_publication (eql_writer, eql_batch, eql_events, eql_id)
VALUES (%(writer)s, %(batch)s, %(events)s, %(id)s)
ON CONFLICT DO NOTHING;

-- published -- How many events a writer published as a batch.
SELECT eql_events FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- is_forgotten -- Whether records of a writer were deleted up to a batch after this one.
-- After the record of this batch was written: whoever deletes records marks the last of them in the same transaction.
SELECT EXISTS (
    SELECT FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch > %(batch)s AND eql_oldest
);

-- prune_batches -- Delete the records of a writer from before a time, of so many at once, but for its newest batches. The
-- last one that would go stays, and says that those before it went.
WITH first AS MATERIALIZED (
    SELECT eql_batch, eql_created_at FROM {schema}.spark_publication
    WHERE eql_writer = %(writer)s
    ORDER BY eql_batch
    LIMIT %(limit)s
), old AS MATERIALIZED (
    SELECT eql_batch FROM first
    WHERE eql_created_at < (now() - make_interval(secs => %(seconds)s))
      AND eql_batch < (
          SELECT eql_batch FROM {schema}.spark_publication
          WHERE eql_writer = %(writer)s
          ORDER BY eql_batch DESC
          LIMIT 1 OFFSET %(newest)s - 1
      )
), marked AS (
    UPDATE {schema}.spark_publication SET eql_oldest = true
    WHERE eql_writer = %(writer)s AND eql_batch = (SELECT max(eql_batch) FROM old) AND NOT eql_oldest
      AND (SELECT count(*) FROM old) > 1
)
DELETE FROM {schema}.spark_publication
WHERE eql_writer = %(writer)s AND eql_batch = ANY (SELECT eql_batch FROM old) AND eql_batch < (SELECT max(eql_batch) FROM old);

-- prune_writers -- Delete the records from before a time of writers with such names, of so many from one name on.
DELETE FROM {schema}.spark_publication
WHERE (eql_writer, eql_batch) = ANY (
    SELECT eql_writer, eql_batch
    FROM (
        SELECT eql_writer, eql_batch, eql_created_at FROM {schema}.spark_publication
        WHERE eql_writer >= %(from)s
        ORDER BY eql_writer, eql_batch
        LIMIT %(limit)s
    ) looked_at
    WHERE eql_writer ~ %(names)s AND eql_created_at < (now() - make_interval(secs => %(seconds)s))
);

-- known_topics -- Those of the given topics that exist.
SELECT eql_name FROM {schema}.topic WHERE eql_name = ANY (%(topics)s);

-- staged_blocks -- The blocks of attempts that are not published, each attempt's in their order: the position of the
-- first event, the topic, the number of events, and the size.
SELECT eql_attempt, eql_position, eql_topic, (eql_metadata ->> 'events')::bigint, octet_length(eql_value)
FROM {schema}.spark_staged_event
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
ORDER BY eql_attempt, eql_position;

-- staged_content -- The blocks of attempts.
SELECT eql_attempt, eql_position, eql_value FROM {schema}.spark_staged_event WHERE eql_attempt = ANY (%(attempts)s);

-- delete_attempts -- The blocks of attempts that are not published, and will not be, as a part of a publication may.
DELETE FROM {schema}.spark_staged_event block
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
  AND NOT EXISTS (
      SELECT FROM {schema}.spark_part part
      WHERE part.eql_published_at IS NULL AND block.eql_attempt = ANY (part.eql_attempts)
  );

-- delete_orphans -- The staged blocks of attempts that nobody published or gave up.
-- Reads the table without its values, one row for some megabytes of events.
-- By the newest block of each: an attempt that takes longer than that goes on staging. A concurrent sweep that has them
-- already is left alone.
DELETE FROM {schema}.spark_staged_event
WHERE (eql_attempt, eql_position) = ANY (
    SELECT eql_attempt, eql_position
    FROM {schema}.spark_staged_event orphan
    WHERE eql_buffer_id IS NULL AND eql_attempt = ANY (
        SELECT eql_attempt
        FROM {schema}.spark_staged_event
        WHERE eql_buffer_id IS NULL
        GROUP BY eql_attempt
        HAVING max(eql_created_at) < (now() - make_interval(hours => %(hours)s))
    ) AND NOT EXISTS (
        SELECT FROM {schema}.spark_part part
        WHERE part.eql_published_at IS NULL AND orphan.eql_attempt = ANY (part.eql_attempts)
    )
    FOR UPDATE SKIP LOCKED
);
