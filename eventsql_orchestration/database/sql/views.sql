-- append_to_timeline -- Entries of one timeline, in the order of the arrays.
INSERT INTO {schema}.timeline_entry (eql_timeline, eql_resource, eql_data, eql_occurred_at)
SELECT %(timeline)s, entry.resource, entry.data::jsonb, entry.occurred_at
FROM unnest(%(resources)s::text[], %(data)s::text[], %(occurred_at)s::timestamptz[])
    WITH ORDINALITY AS entry (resource, data, occurred_at, position)
ORDER BY entry.position;

-- read_timeline -- What happened to one resource, in the order in which it was appended.
SELECT eql_id AS id, eql_resource AS resource, eql_data AS data, eql_occurred_at AS occurred_at
FROM {schema}.timeline_entry
WHERE eql_timeline = %(timeline)s AND eql_resource = %(resource)s AND eql_id > %(after)s
ORDER BY eql_id
LIMIT %(limit)s;

-- add_to_rollup -- Adds counts and sums to buckets; the arrays name each bucket once, in the order of the key.
INSERT INTO {schema}.rollup_bucket (eql_rollup, eql_bucket, eql_dimension, eql_count, eql_sum)
SELECT %(rollup)s, added.bucket, added.dimension, added.count, added.sum
FROM unnest(%(buckets)s::timestamptz[], %(dimensions)s::text[], %(counts)s::bigint[], %(sums)s::bigint[])
    WITH ORDINALITY AS added (bucket, dimension, count, sum, position)
ORDER BY added.position
ON CONFLICT (eql_rollup, eql_bucket, eql_dimension) DO UPDATE
SET eql_count = rollup_bucket.eql_count + EXCLUDED.eql_count,
    eql_sum = rollup_bucket.eql_sum + EXCLUDED.eql_sum;

-- read_rollup -- The buckets of a rollup from a time on and before another one.
SELECT eql_bucket AS bucket, eql_dimension AS dimension, eql_count AS count, eql_sum AS sum
FROM {schema}.rollup_bucket
WHERE eql_rollup = %(rollup)s
  AND eql_bucket >= coalesce(%(since)s::timestamptz, '-infinity')
  AND eql_bucket < coalesce(%(until)s::timestamptz, 'infinity')
  AND (%(dimension)s::text IS NULL OR eql_dimension = %(dimension)s)
ORDER BY eql_bucket, eql_dimension;

-- write_log -- Lines of one log, in the order of the arrays.
INSERT INTO {schema}.log_line (eql_log, eql_resource, eql_line, eql_written_at)
SELECT %(log)s, written.resource, written.line, written.written_at
FROM unnest(%(resources)s::text[], %(lines)s::text[], %(written_at)s::timestamptz[])
    WITH ORDINALITY AS written (resource, line, written_at, position)
ORDER BY written.position;

-- part lines -- The lines of a log in a range of time that hold a text.
SELECT eql_id AS id, eql_resource AS resource, eql_line AS line, eql_written_at AS written_at
FROM {schema}.log_line
WHERE eql_log = %(log)s
  AND eql_written_at >= coalesce(%(since)s::timestamptz, '-infinity')
  AND eql_written_at < coalesce(%(until)s::timestamptz, 'infinity')
  AND (%(pattern)s::text IS NULL OR eql_line ~~* %(pattern)s)

-- search_log -- The newest lines of every resource in a range of time that hold a text.
{lines}
ORDER BY eql_written_at DESC, eql_id DESC
LIMIT %(limit)s;

-- search_log_of_resource -- The newest lines of one resource in a range of time that hold a text.
{lines} AND eql_resource = %(resource)s
ORDER BY eql_written_at DESC, eql_id DESC
LIMIT %(limit)s;
