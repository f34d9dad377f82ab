-- part base -- The id before the first event of a block.
(eql_id - eql_events)

-- part near -- Excludes the blocks after a range by their ids, so that an index and the segments serve: a block has at
-- most 20,000 events.
eql_id <= (least(%(upto)s::bigint, 9223372036854755807) + 20000)

-- part held -- How many events of a block a range holds.
greatest(least(eql_id, %(upto)s::bigint) - greatest({base}, %(after)s::bigint), 0)

-- read -- The blocks of a range of offsets, in order: first id, partition, number of events, times, and the arrays of
-- the events in the range, at most `limit` events of at most `blocks` blocks. Only these blocks' arrays are read.
SELECT start + 1, eql_partition, taken::int, eql_buffered_at, eql_created_at,
       CASE WHEN taken = eql_events THEN eql_keys ELSE eql_keys[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_values ELSE eql_values[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_metadata ELSE eql_metadata[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_times ELSE eql_times[nth + 1:nth + taken] END
FROM (
    SELECT found.*, (start - {base})::int AS nth,
           least(held, coalesce(%(limit)s::bigint - before, held))::int AS taken
    FROM (
        SELECT block.*, (sum(held) OVER (ORDER BY eql_id))::bigint - held AS before
        FROM (
            SELECT *, greatest({base}, %(after)s::bigint) AS start, {held} AS held
            FROM {schema}.{block_table}
            WHERE {in_partition} eql_id > %(after)s AND {near} AND {held} > 0
            ORDER BY eql_id
            LIMIT %(blocks)s
        ) block
    ) found
) cut
WHERE taken > 0
ORDER BY eql_id;

-- count -- How many events a range of offsets holds.
SELECT coalesce(sum({held}), 0)::bigint
FROM {schema}.{block_table}
WHERE {in_partition} eql_id > %(after)s AND {near};

-- extent -- How many events a range of offsets holds, and the first of them.
SELECT coalesce(sum({held}), 0)::bigint, min(greatest({base}, %(after)s::bigint) + 1)
FROM {schema}.{block_table}
WHERE {in_partition} eql_id > %(after)s AND {near} AND {held} > 0;

-- part numbered -- The blocks of a range in order, each with the offset before its part of the range, the events of this
-- part, and those of the blocks before it.
SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before
FROM (
    SELECT eql_created_at, greatest({base}, %(after)s::bigint) AS start, {held} AS held
    FROM {schema}.{block_table}

-- waiting -- Of the events of a range, at most `limit`: number, last offset, seconds since the first was moved.
SELECT coalesce(sum(least(held, %(limit)s - before)), 0)::bigint, max(start + least(held, %(limit)s - before)),
       extract(epoch FROM clock_timestamp() - min(eql_created_at))::float8
FROM (
    {numbered}
        WHERE {in_partition} eql_id > %(after)s AND {near} AND {held} > 0
        ORDER BY eql_id
        LIMIT %(limit)s
    ) block
) next
WHERE before < %(limit)s;

-- oldest -- Seconds since the first event after an offset was published.
SELECT extract(epoch FROM clock_timestamp()
    - coalesce(eql_times[greatest(%(after)s::bigint - {base}, 0)::int + 1], eql_buffered_at))::float8
FROM {schema}.{block_table}
WHERE {in_partition} eql_id > %(after)s
ORDER BY eql_id
LIMIT 1;

-- bounds -- The ids of the oldest and the newest event of a topic; 1 and 0 where it is empty.
SELECT coalesce((SELECT {base} + 1 FROM {schema}.{block_table} ORDER BY eql_id LIMIT 1), 1),
       coalesce((SELECT max(eql_id) FROM {schema}.{block_table}), 0);

-- before_time -- The id of the last event that entered the log before a time, or else one before the first id. Bisects
-- as for rows: the events of a block entered the log together. Blocks below `low` are older than the time.
WITH RECURSIVE search (low, high) AS (
    SELECT coalesce((SELECT {base} + 1 FROM {schema}.{block_table} ORDER BY eql_id LIMIT 1), 1),
           coalesce((SELECT max(eql_id) FROM {schema}.{block_table}), 0) + 1
    UNION ALL
    SELECT CASE WHEN probe.older THEN probe.eql_id + 1 ELSE search.low END,
           CASE WHEN probe.older THEN search.high ELSE search.low + ((search.high - search.low) / 2) END
    FROM search
    CROSS JOIN LATERAL (
        SELECT eql_id, eql_created_at < %(time)s::timestamptz AS older
        FROM {schema}.{block_table}
        WHERE eql_id >= (search.low + ((search.high - search.low) / 2))
        ORDER BY eql_id
        LIMIT 1
    ) probe
    WHERE search.low < search.high
)
SELECT low - 1 FROM search WHERE low >= high;

-- nth_before -- The offset of the n-th event from an offset backwards, if there are as many; `skip` is n - 1.
SELECT upto - (%(skip)s - before)
FROM (
    SELECT block.*, (sum(held) OVER (ORDER BY upto DESC))::bigint - held AS before
    FROM (
        SELECT least(eql_id, %(offset)s::bigint) AS upto, least(eql_id, %(offset)s::bigint) - {base} AS held
        FROM {schema}.{block_table}
        WHERE {in_partition} eql_id <= (least(%(offset)s::bigint, 9223372036854755807) + 20000)
          AND {base} < %(offset)s::bigint
        ORDER BY eql_id DESC
        LIMIT %(skip)s::bigint + 1
    ) block
) found
WHERE before + held > %(skip)s
ORDER BY upto DESC
LIMIT 1;

-- count_upto -- How many events a range of offsets holds, at most `most`.
SELECT least(coalesce(sum(held), 0), %(most)s)::bigint
FROM (
    SELECT {held} AS held FROM {schema}.{block_table}
    WHERE {in_partition} eql_id > %(after)s AND {near} AND {held} > 0
    ORDER BY eql_id
    LIMIT %(most)s
) found;

-- nth -- The offset of the n-th event after an offset, if there are as many; `skip` is n - 1.
SELECT start + %(skip)s - before + 1
FROM (
    {numbered}
        WHERE {in_partition} eql_id > %(after)s AND {near} AND {held} > 0
        ORDER BY eql_id
        LIMIT %(skip)s::bigint + 1
    ) block
) found
WHERE before + held > %(skip)s
ORDER BY start
LIMIT 1;
