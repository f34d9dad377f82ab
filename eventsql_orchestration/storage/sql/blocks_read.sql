-- parts of blocks_parts
-- parts of times

-- part after -- Where the range begins.
%(after)s::bigint

-- part upto -- Where the range ends.
%(upto)s::bigint

-- part most -- How many events are looked for.
%(most)s::bigint

-- part size -- The bytes of the values of a block, which the server knows without reading them. They may be compressed: a
-- block of several events has 1 MiB at most, but a value by itself may have 250 times as many bytes as are stored. A
-- broken block may have no first value, and has a size all the same: without a size, it would be left out.
greatest(
    pg_column_size(eql_values),
    CASE WHEN eql_events = 1 AND pg_column_size(eql_values) > 8192 AND pg_column_compression(eql_values) IS NOT NULL
        THEN octet_length(eql_values[1]) END
) AS size

-- part few -- How many blocks of a partition are looked at: each has an event of the range, but for the last one.
least(%(blocks)s::bigint, %(limit)s::bigint)

-- part taken of most -- The blocks `near`: the id before the first event, partition, numbers of the events before and in
-- the range, times, the arrays of the events in the range, the bytes of the blocks up to here, and whether there may be
-- more events before `upto`. At most `limit` events, up to the block that makes `most` bytes full. Only these blocks'
-- arrays are read.
SELECT {base}, eql_partition, nth, taken::int, eql_buffered_at, eql_created_at,
       CASE WHEN taken = eql_events THEN eql_keys ELSE eql_keys[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_values ELSE eql_values[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_metadata ELSE eql_metadata[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_times ELSE eql_times[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_places ELSE eql_places[nth + 1:nth + taken] END,
       CASE WHEN taken = eql_events THEN eql_entered ELSE eql_entered[nth + 1:nth + taken] END,
       filled, more
FROM (
    SELECT found.*, least(held, coalesce(%(limit)s::bigint - before, held))::int AS taken
    FROM (
        SELECT near.*, (sum(held) OVER (ORDER BY eql_id))::bigint - held AS before,
               sum(size) OVER (ORDER BY eql_id) AS filled
        FROM near
    ) found
) cut
WHERE taken > 0 AND filled - size < {most}
ORDER BY eql_id

-- read_partition -- The events of a range of one partition, in blocks, of at most `blocks` blocks. Planned as for rows.
WITH near AS (
    SELECT *, {up_to of {after}} AS nth, {held} AS held, {size}, false AS more
    FROM {schema}.{block_table}
    WHERE eql_partition = %(partition)s AND {in_range}
    ORDER BY eql_id
    LIMIT {few}
)
{taken of %(bytes)s::bigint};

-- read_window -- As `read_partition`, for the blocks with ids in a window. The ends of the window are constants, so a
-- generic plan reads the segments of the window alone, and the server keeps the plan. The row comparison leaves only
-- the index of partition and id. `more` is the last id of the log; NULL where the current role may not know it. psycopg
-- parses statements of more than 4,096 bytes at each execution.
WITH near AS (
    SELECT *, reach - nth AS held
    FROM (
        SELECT *, {up_to of {after}} AS nth, {up_to of {upto}} AS reach, {size}, (
            SELECT CASE WHEN has_sequence_privilege(own, 'SELECT, USAGE') THEN pg_sequence_last_value(own) END
            FROM (SELECT pg_get_serial_sequence('{schema}.{block_table}', 'eql_id')::regclass AS own OFFSET 0) log
        ) AS more
        FROM {schema}.{block_table}
        WHERE (eql_partition, eql_id) > (%(partition)s::smallint, {after})
          AND (eql_partition, eql_id) <= (%(partition)s::smallint, {farthest of {upto}})
          AND {base} < {upto} AND eql_id >= {begin} AND eql_id < {behind}
        ORDER BY eql_partition, eql_id
        LIMIT {few}
    ) block
)
{taken of %(bytes)s::bigint};

-- read -- As `read_partition`, for all partitions. `more` says that there are blocks with gaps: then the events may be
-- out of order. A block whose gap spans the whole range is left out: there may be one in each partition.
WITH own AS MATERIALIZED (
    SELECT *, reach - nth AS held
    FROM (
        SELECT *, {up_to of {after}} AS nth, {up_to of {upto}} AS reach, {size}
        FROM {schema}.{block_table}
        WHERE {in_range}
    ) block
    WHERE reach > nth
    ORDER BY eql_id
    LIMIT %(blocks)s
), near AS (
    SELECT *, EXISTS (
        SELECT FROM {schema}.{block_table}
        WHERE eql_id > {after} AND {base} < {upto} AND eql_span IS NOT NULL
          AND eql_id <= {farthest of (SELECT max(own.eql_id) FROM own)}
    ) AS more
    FROM own
)
{taken of %(bytes)s::bigint};

-- read_between -- As `read`, if blocks with gaps lie between blocks of other partitions: all blocks of a range of ids,
-- which has at most `limit` events. The first blocks end with the block that makes `bytes` full.
WITH first AS MATERIALIZED (
    SELECT *
    FROM (
        SELECT *, sum(size) OVER (ORDER BY eql_id) AS upto_here
        FROM (SELECT *, {size} FROM {schema}.{block_table} WHERE {in_range} ORDER BY eql_id LIMIT %(blocks)s) block
    ) block
    WHERE upto_here - size < %(bytes)s::bigint
), ends AS MATERIALIZED (
    SELECT max(eql_id) AS last, bool_or(eql_span IS NOT NULL) AS gaps FROM first
), late AS MATERIALIZED (
    SELECT *, {size}, NULL::bigint FROM {schema}.{block_table}
    WHERE {in_range} AND eql_span IS NOT NULL AND eql_id > (SELECT ends.last FROM ends)
      AND eql_id <= {farthest of (SELECT ends.last FROM ends)} AND {base} < (SELECT ends.last FROM ends)
), both_kinds AS (
    SELECT * FROM first UNION ALL SELECT * FROM late
), cut AS MATERIALIZED (
    SELECT CASE WHEN ends.gaps OR EXISTS (SELECT FROM late)
        THEN least({upto}, ends.last, least(
            (SELECT min({id_at of {up_to of {after}} + 1}) FROM both_kinds), 9223372036854775807 - %(limit)s::bigint
        ) + (%(limit)s::bigint - 1))
        ELSE {upto} END AS upto
    FROM ends
), near AS (
    SELECT *, {up_to of {after}} AS nth, {up_to of (SELECT cut.upto FROM cut)} - {up_to of {after}} AS held,
           (SELECT cut.upto < {upto} FROM cut) AS more
    FROM both_kinds
    WHERE {base} < (SELECT cut.upto FROM cut)
)
{taken of 9223372036854775807};

-- count -- How many events a range of offsets holds.
SELECT coalesce(sum({held}), 0)::bigint
FROM {schema}.{block_table}
WHERE {in_partition} {in_range};

-- extent -- How many events a range of offsets holds, and the first of them.
SELECT coalesce(sum({held}), 0)::bigint, min({id_at of {up_to of {after}} + 1})
FROM {schema}.{block_table}
WHERE {in_partition} {in_range} AND {held} > 0;

-- waiting -- Of the events of a range, at most `most`: number, last offset, seconds since the first was moved.
SELECT coalesce(sum(least(held, {most} - before)), 0)::bigint, max(start + least(held, {most} - before)),
       extract(epoch FROM clock_timestamp() - min(entered))::float8
FROM ({numbered of {most}}) numbered
WHERE before < {most};

-- oldest -- Seconds since the first event after an offset was published.
SELECT {seconds_since of published}
FROM ({next_runs of 1}) runs
ORDER BY start
LIMIT 1;

-- part oldest_block -- The block that ends first.
SELECT * FROM {schema}.{block_table} ORDER BY eql_id LIMIT 1

-- part first_offset -- The first offset of a log; NULL where it is empty. A block with gaps may begin first and end later.
SELECT min({base} + 1)
FROM (
    ({oldest_block})
    UNION ALL
    SELECT * FROM {schema}.{block_table}
    WHERE eql_span IS NOT NULL
      AND eql_id <= (least((SELECT oldest.eql_id FROM ({oldest_block}) oldest), 9223372036854755807) + 20000)
) block

-- bounds -- The ids of the oldest and the newest event of a topic; 1 and 0 where it is empty.
SELECT coalesce(({first_offset}), 1), coalesce((SELECT max(eql_id) FROM {schema}.{block_table}), 0);

-- before_time -- The id of the last event that entered the log before a time, or else one before the first id. Bisects
-- as for rows: blocks below `low` are older than the time. Then it looks into the blocks that the time may lie in.
WITH RECURSIVE search (low, high) AS (
    SELECT coalesce(({first_offset}), 1), coalesce((SELECT max(eql_id) FROM {schema}.{block_table}), 0) + 1
    UNION ALL
    SELECT CASE WHEN probe.older THEN probe.eql_id + 1 ELSE search.low END,
           CASE WHEN probe.older THEN search.high ELSE search.low + ((search.high - search.low) / 2) END
    FROM search
    CROSS JOIN LATERAL (
        SELECT eql_id, coalesce(eql_entered[eql_events], eql_created_at) < %(time)s::timestamptz AS older
        FROM {schema}.{block_table}
        WHERE eql_id >= (search.low + ((search.high - search.low) / 2))
        ORDER BY eql_id
        LIMIT 1
    ) probe
    WHERE search.low < search.high
), wholly AS (
    SELECT low FROM search WHERE low >= high
)
SELECT greatest(low - 1, (
    SELECT max({id_at of partly.older})
    FROM (
        SELECT block.*, width_bucket(%(time)s::timestamptz - '1 microsecond'::interval, eql_entered) AS older
        FROM {schema}.{block_table} block
        WHERE eql_entered IS NOT NULL AND eql_id >= wholly.low AND eql_id <= (least(
            (SELECT eql_id FROM {schema}.{block_table} WHERE eql_id >= wholly.low ORDER BY eql_id LIMIT 1),
            9223372036854755807
        ) + 20000)
    ) partly
    WHERE partly.older > 0
))
FROM wholly;

-- nth_before -- The offset of the n-th event from an offset backwards, if there are as many; `skip` is n - 1. The index
-- finds the last blocks with n events. Blocks that end earlier may have events between those of a block with gaps.
WITH last AS MATERIALIZED (
    SELECT min(eql_id) AS first, bool_or(eql_span IS NOT NULL) AS gaps
    FROM (
        SELECT eql_id, eql_span, (sum(held) OVER (ORDER BY eql_id DESC))::bigint - held AS before
        FROM (
            SELECT eql_id, eql_span, {up_to of %(offset)s::bigint} AS held
            FROM {schema}.{block_table}
            WHERE {in_partition} eql_id <= {farthest of %(offset)s::bigint}
              AND {base} < %(offset)s::bigint
            ORDER BY eql_id DESC
            LIMIT %(skip)s::bigint + 1
        ) block
    ) found
    WHERE before <= %(skip)s
)
SELECT upto - (%(skip)s - before)
FROM (
    SELECT upto, held, (sum(held) OVER (ORDER BY upto DESC))::bigint - held AS before
    FROM (
        SELECT least(run.last, %(offset)s::bigint) AS upto, least(run.last, %(offset)s::bigint) - run.before AS held
        FROM {schema}.{block_table}
        {runs}
        WHERE {in_partition} eql_id <= {farthest of %(offset)s::bigint}
          AND eql_id >= (SELECT CASE WHEN last.gaps THEN last.first - 20000 ELSE last.first END FROM last)
          AND {base} < %(offset)s::bigint AND run.before < %(offset)s::bigint
    ) runs
) found
WHERE before + held > %(skip)s
ORDER BY upto DESC
LIMIT 1;

-- count_upto -- How many events a range of offsets holds, at most `most`.
SELECT least(coalesce(sum(held), 0), {most})::bigint
FROM (
    SELECT {held} AS held FROM {schema}.{block_table}
    WHERE {in_partition} {in_range} AND {held} > 0
    ORDER BY eql_id
    LIMIT {most}
) found;

-- nth -- The offset of the n-th event after an offset, if there are as many; `most` is n.
SELECT start + ({most} - before)
FROM ({numbered of {most}}) numbered
WHERE before < {most} AND before + held >= {most};
