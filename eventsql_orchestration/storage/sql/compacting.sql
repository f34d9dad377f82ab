-- parts of blocks_parts

-- newest -- The last id of a log in blocks, 0 where it is empty.
SELECT coalesce(max(eql_id), 0) FROM {schema}.{block_store};

-- part border -- The first offset from which on consumers wait for a layout or for a shard: no block has events on both
-- sides of it.
SELECT min(each.border)
FROM (
    SELECT eql_after AS border FROM {schema}.topic_layout WHERE eql_topic = %(topic)s
    UNION ALL SELECT eql_fence FROM {schema}.shard_fence WHERE eql_topic = %(topic)s
    UNION ALL SELECT eql_until FROM {schema}.consumer WHERE eql_topic = %(topic)s
) each
WHERE each.border > %(after)s

-- part stored_bytes -- The bytes of a block's arrays as they are stored.
pg_column_size(eql_values) + coalesce(pg_column_size(eql_keys), 0) + coalesce(pg_column_size(eql_metadata), 0)

-- window -- The next blocks after an id: the id up to which they go, and the partitions that have many small blocks. For
-- each partition: the number of its blocks and events, their stored bytes, the stored bytes of its largest block, and the
-- id of this block. The blocks have at most `ids` ids and some 32 MiB, and end before `upto` and the next border. NULL if
-- no block is left. Blocks that begin before the window stay as they are.
WITH first AS MATERIALIZED (
    SELECT greatest(eql_id - %(ids)s, %(after)s::bigint) AS id FROM {schema}.{block_store}
    WHERE eql_id > %(after)s AND eql_id <= %(upto)s
    ORDER BY eql_id
    LIMIT 1
), ends AS MATERIALIZED (
    SELECT least(least(first.id, %(upto)s::bigint - %(ids)s) + %(ids)s, ({border})) AS id FROM first
), block AS MATERIALIZED (
    SELECT *, (sum(bytes) OVER (ORDER BY eql_id))::bigint AS total
    FROM (
        SELECT eql_id, eql_partition, eql_events, {stored_bytes} AS bytes
        FROM {schema}.{block_store}
        WHERE eql_id > %(after)s AND eql_id <= (SELECT ends.id FROM ends) AND {base} >= %(after)s
    ) own
)
SELECT whole.upto, small.*
FROM (
    SELECT CASE WHEN bool_or(total > 33554432)
        THEN greatest(max(eql_id) FILTER (WHERE total <= 33554432), min(eql_id))
        ELSE (SELECT ends.id FROM ends) END AS upto
    FROM block
) whole
LEFT JOIN (
    SELECT eql_partition, count(*), sum(eql_events), sum(bytes), max(bytes), (array_agg(eql_id ORDER BY bytes DESC))[1]
    FROM block
    WHERE total <= 33554432
    GROUP BY eql_partition
    HAVING count(*) >= (%(least)s * ((sum(bytes) / %(full)s) + 1))
) small ON true;

-- sizes -- The bytes of the events of blocks, which may be compressed.
SELECT eql_id,
       sum(octet_length(own.value) + coalesce(octet_length(own.key), 0) + coalesce(octet_length(own.metadata::text), 0))
FROM {schema}.{block_store}
CROSS JOIN LATERAL unnest(eql_values, eql_keys, eql_metadata) AS own (value, key, metadata)
WHERE eql_id = ANY (%(ids)s::bigint[])
GROUP BY eql_id;

-- merge -- Replace the blocks of these partitions in a window by larger ones. Returns the number of former blocks, of their
-- events, and of new blocks. A block has at most 10,000 events, and less than 1 MiB besides its first event.
WITH gone AS (
    DELETE FROM {schema}.{block_store}
    WHERE eql_id > %(after)s AND eql_id <= %(upto)s AND {base} >= %(after)s
      AND eql_partition = ANY (%(partitions)s::smallint[])
    RETURNING *
), event AS (
    SELECT {base} + coalesce(own.place, own.number) AS id, eql_partition, own.key, own.value,
           coalesce(own.published, eql_buffered_at) AS published, coalesce(own.entered, eql_created_at) AS entered,
           coalesce(own.metadata, '{{}}'::json) AS metadata
    FROM gone
    CROSS JOIN LATERAL unnest(eql_values, eql_keys, eql_metadata, eql_times, eql_places, eql_entered)
        WITH ORDINALITY AS own (value, key, metadata, published, place, entered, number)
), numbered AS (
    SELECT *, (row_number() OVER own - 1) / 10000 AS by_number,
           sum(octet_length(value) + coalesce(octet_length(key), 0) + octet_length(metadata::text)) OVER own
               / 1048576 AS by_size
    FROM event
    WINDOW own AS (PARTITION BY eql_partition ORDER BY id)
), packed AS (
    SELECT eql_partition, min(id) AS first, max(id) AS last, count(*)::int AS events, min(published) AS published,
           min(entered) AS entered,
           CASE WHEN min(published) < max(published) THEN array_agg(published ORDER BY id) END AS times,
           CASE WHEN min(entered) < max(entered) THEN array_agg(entered ORDER BY id) END AS entries,
           CASE WHEN count(key) > 0 THEN array_agg(key ORDER BY id) END AS keys,
           array_agg(value ORDER BY id) AS vals,
           CASE WHEN bool_or(metadata::text <> '{{}}') THEN array_agg(metadata ORDER BY id) END AS metadata,
           array_agg(id ORDER BY id) AS ids
    FROM numbered
    GROUP BY eql_partition, by_number, trunc(by_size)
), entered AS (
    INSERT INTO {schema}.{block_store} (
        eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_times, eql_keys, eql_values,
        eql_metadata, eql_span, eql_places, eql_entered
    )
    SELECT last, eql_partition, events, published, entered, times, keys, vals, metadata,
           CASE WHEN last - first >= events THEN (last - first) + 1 END,
           CASE WHEN last - first >= events
               THEN ARRAY(
                   SELECT ((own.id - first) + 1)::smallint
                   FROM unnest(ids) WITH ORDINALITY AS own (id, number)
                   ORDER BY own.number
               ) END,
           entries
    FROM packed
    RETURNING eql_events
)
SELECT (SELECT count(*) FROM gone), (SELECT coalesce(sum(eql_events), 0) FROM gone)::bigint,
       (SELECT count(*) FROM entered), (SELECT coalesce(sum(eql_events), 0) FROM entered)::bigint;

-- space -- The bytes that a segment takes, and about how many its blocks need.
SELECT pg_total_relation_size('{schema}.{table}'), (
    SELECT coalesce(sum(
        400 + pg_column_size(eql_values) + coalesce(pg_column_size(eql_keys), 0) + coalesce(pg_column_size(eql_metadata), 0)
        + coalesce(pg_column_size(eql_times), 0) + coalesce(pg_column_size(eql_places), 0)
        + coalesce(pg_column_size(eql_entered), 0)
    ), 0)::bigint
    FROM {schema}.{table}
);
