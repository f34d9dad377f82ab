-- record_publication -- Record a writer's batch; no row if the batch has a record.
INSERT INTO {schema}.spark_publication (eql_writer, eql_batch, eql_events, eql_topics, eql_id, eql_query, eql_checksum)
VALUES (%(writer)s, %(batch)s, %(events)s, %(topics)s, %(id)s, %(query)s, %(checksum)s)
ON CONFLICT DO NOTHING;

-- published -- The record of a writer's batch: its events and their topics, the streaming query, and the checksum of
-- its rows. A record from before revision 0072 has no topics.
SELECT eql_events, coalesce(eql_topics, '{{}}'), eql_query, eql_checksum
FROM {schema}.spark_publication
WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- is_forgotten -- Whether records of the writer after this batch were deleted. Run after `record_publication`: a
-- deletion marks the last one.
SELECT EXISTS (
    SELECT FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch > %(batch)s AND eql_oldest
);

-- has_later_batch -- Whether a later batch of the writer and the streaming query was published.
SELECT EXISTS (
    SELECT FROM {schema}.spark_publication
    WHERE eql_writer = %(writer)s AND eql_batch > %(batch)s AND coalesce(eql_query, '') = coalesce(%(query)s, '')
);

-- prune_batches -- Delete a writer's old records, except its newest, from a limited number. The last old record stays
-- as a mark.
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

-- prune_writers -- Delete old records of writers with matching names, among a limited number of records on each side of one
-- name. With one side only, records at the end of the order would stay long.
DELETE FROM {schema}.spark_publication
WHERE (eql_writer, eql_batch) = ANY (
    SELECT eql_writer, eql_batch
    FROM (
        (
            SELECT eql_writer, eql_batch, eql_created_at FROM {schema}.spark_publication
            WHERE eql_writer >= %(from)s
            ORDER BY eql_writer, eql_batch
            LIMIT %(limit)s
        )
        UNION ALL
        (
            SELECT eql_writer, eql_batch, eql_created_at FROM {schema}.spark_publication
            WHERE eql_writer < %(from)s
            ORDER BY eql_writer DESC, eql_batch DESC
            LIMIT %(limit)s
        )
    ) looked_at
    WHERE eql_writer ~ %(names)s AND eql_created_at < (now() - make_interval(secs => %(seconds)s))
);

-- known_topics -- The given topics that exist.
SELECT eql_name FROM {schema}.topic WHERE eql_name = ANY (%(topics)s);

-- staged_blocks -- The unpublished blocks of attempts, by attempt and position: topic, number of events, size.
SELECT eql_attempt, eql_position, eql_topic, (eql_metadata ->> 'events')::bigint,
       pg_column_size(eql_values) + coalesce(pg_column_size(eql_keys), 0)
           + coalesce(pg_column_size(eql_event_metadata), 0)
FROM {schema}.spark_staged_event
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
ORDER BY eql_attempt, eql_position;

-- part is_prepared -- Whether a block belongs to a prepared part of a publication.
EXISTS (
    SELECT FROM {schema}.spark_part part
    WHERE part.eql_published_at IS NULL AND block.eql_attempt = ANY (part.eql_attempts)
)

-- delete_attempts -- Delete the blocks of attempts, except published blocks and blocks of a prepared part.
DELETE FROM {schema}.spark_staged_event block
WHERE eql_attempt = ANY (%(attempts)s) AND eql_buffer_id IS NULL
  AND NOT {is_prepared};

-- delete_orphans -- Delete blocks of attempts that stopped long ago and that nobody published or gave up. The newest
-- block of an attempt tells its age. Reads no values, and skips rows that a concurrent sweep has locked.
DELETE FROM {schema}.spark_staged_event
WHERE (eql_attempt, eql_position) = ANY (
    SELECT eql_attempt, eql_position
    FROM {schema}.spark_staged_event block
    WHERE eql_buffer_id IS NULL AND eql_attempt = ANY (
        SELECT eql_attempt
        FROM {schema}.spark_staged_event
        WHERE eql_buffer_id IS NULL
        GROUP BY eql_attempt
        HAVING max(eql_created_at) < (now() - make_interval(hours => %(hours)s))
    ) AND NOT {is_prepared}
    FOR UPDATE SKIP LOCKED
);
