-- parts of erasing

-- part about -- The metadata of a dead letter. Another program may have written any JSON.
{schema}.readable_metadata(l.eql_metadata)

-- matching -- The dead letters of a filter, oldest first: id, bytes of the value, time of the redrive or dismissal.
-- Planned for its values each time: omitted parts of the filter cost nothing. The id alone identifies a redrive,
-- because a clock may go back.
SELECT l.eql_id, octet_length(l.eql_value) AS eql_bytes, r.eql_redriven_at
FROM {schema}.{event_table} l
LEFT JOIN {schema}.redriven_dead_letter r
    ON r.eql_topic = %(letters)s AND r.eql_letter_id = l.eql_id
WHERE l.eql_id > %(after)s AND l.eql_id <= %(upto)s
  AND (%(ids)s::bigint[] IS NULL OR l.eql_id = ANY (%(ids)s::bigint[]))
  AND (%(consumer)s::text IS NULL OR {about} ->> 'dlt_consumer' = %(consumer)s::text)
  AND CASE WHEN %(backfill)s::text IS NULL
          THEN %(ids)s::bigint[] IS NOT NULL OR {about} ->> 'dlt_backfill' IS NULL
          ELSE {about} ->> 'dlt_backfill' = %(backfill)s::text END
  AND (%(exception)s::text IS NULL OR {about} ->> 'dlt_exception' = %(exception)s::text)
  AND (%(key)s::text IS NULL OR l.eql_key = %(key)s::text)
  AND (%(names)s::text[] IS NULL OR NOT EXISTS (
      SELECT FROM unnest(%(names)s::text[], %(texts)s::text[]) AS wanted (name, value)
      WHERE ({about} ->> wanted.name) = wanted.value IS NOT TRUE
  ))
  AND (%(since)s::timestamptz IS NULL OR l.eql_buffered_at >= %(since)s::timestamptz)
  AND (%(until)s::timestamptz IS NULL OR l.eql_buffered_at < %(until)s::timestamptz)
  AND (%(erased)s OR NOT {erased})
  AND (%(redriven)s::boolean IS NULL OR (r.eql_letter_id IS NOT NULL) = %(redriven)s::boolean)
ORDER BY l.eql_id
LIMIT %(limit)s;

-- letters -- Dead letters by their ids, in order, each with the time of its redrive and of its dismissal.
SELECT l.eql_id, l.eql_partition, l.eql_key, CASE WHEN NOT {erased} THEN l.eql_value END, l.eql_buffered_at::timestamptz,
       l.eql_created_at::timestamptz, l.eql_metadata, CASE WHEN NOT r.eql_dismissed THEN r.eql_redriven_at END,
       CASE WHEN r.eql_dismissed THEN r.eql_redriven_at END
FROM {schema}.{event_table} l
LEFT JOIN {schema}.redriven_dead_letter r
    ON r.eql_topic = %(letters)s AND r.eql_letter_id = l.eql_id
WHERE l.eql_id = ANY (%(ids)s::bigint[])
ORDER BY l.eql_id;

-- of_backfills -- The backfills that have open dead letters, and how many each has.
SELECT {about} ->> 'dlt_backfill', count(*)
FROM {schema}.{event_table} l
WHERE {about} ->> 'dlt_backfill' IS NOT NULL AND NOT {erased}
  AND NOT EXISTS (
      SELECT FROM {schema}.redriven_dead_letter r
      WHERE r.eql_topic = %(letters)s AND r.eql_letter_id = l.eql_id
  )
GROUP BY 1
ORDER BY 1;

-- unknown -- At most `limit` of the given ids that no dead letter has.
SELECT wanted.id
FROM unnest(%(ids)s::bigint[]) AS wanted (id)
WHERE NOT EXISTS (SELECT FROM {schema}.{event_table} l WHERE l.eql_id = wanted.id)
ORDER BY wanted.id
LIMIT %(limit)s;

-- prune -- Forget redrives of letters before the oldest one in the log; all, if the log is empty.
DELETE FROM {schema}.redriven_dead_letter
WHERE eql_topic = %(letters)s
  AND eql_letter_id < (SELECT coalesce(min(eql_id), 9223372036854775807) FROM {schema}.{event_table});

-- prune_former -- Forget the redrives of a topic if one is of a letter that the log does not have yet: they belong to
-- an earlier log, which EventSQL's Java library deleted.
DELETE FROM {schema}.redriven_dead_letter
WHERE eql_topic = %(letters)s
  AND (SELECT max(eql_letter_id) FROM {schema}.redriven_dead_letter WHERE eql_topic = %(letters)s)
      > (SELECT coalesce(max(eql_id), 0) FROM {schema}.{event_table});
