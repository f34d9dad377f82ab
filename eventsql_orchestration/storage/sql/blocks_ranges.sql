-- parts of blocks_parts
-- parts of ranges

-- part after -- Where the range begins.
wanted.after

-- part upto -- Where the range ends.
wanted.upto

-- part one -- The given range.
(SELECT %(after)s::bigint AS after, %(upto)s::bigint AS upto) wanted

-- samples -- For each given range with events: first and last offset, the number of its first events, at most
-- `sample`, and the last offset of these.
SELECT sampled.first, last.id, sampled.events, sampled.upto
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT min(start) + 1 AS first, max(start + least(held, %(sample)s::bigint - before)) AS upto,
           sum(least(held, %(sample)s::bigint - before))::bigint AS events
    FROM ({numbered of %(sample)s::bigint}) numbered
    WHERE before < %(sample)s::bigint
) sampled
CROSS JOIN LATERAL (
    SELECT greatest((
        SELECT eql_id FROM {schema}.{block_table}
        WHERE {in_partition} eql_id > {after} AND eql_id <= {upto}
        ORDER BY eql_id DESC
        LIMIT 1
    ), (
        SELECT max({id_at of {up_to of {upto}}}) FROM {schema}.{block_table}
        WHERE {in_partition} eql_id > {upto} AND {near} AND {base} < {upto} AND {held} > 0
    )) AS id
) last
WHERE sampled.first IS NOT NULL
ORDER BY sampled.first;

-- firsts -- The first offset within each of the given ranges, in their order, NULL for a range without events.
SELECT (SELECT min(start) + 1 FROM ({next_runs of 1}) runs)
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) WITH ORDINALITY AS wanted (after, upto, number)
ORDER BY wanted.number;

-- occupied -- Which of these ranges of offsets, each in a partition, have events.
SELECT wanted.number
FROM unnest(%(numbers)s::int[], %(partitions)s::smallint[], %(after)s::bigint[], %(upto)s::bigint[])
    AS wanted (number, part, after, upto)
WHERE EXISTS (
    SELECT FROM {schema}.{block_table} WHERE eql_partition = wanted.part AND {in_range} AND {held} > 0
);

-- occupied_topic -- As `occupied`, over all partitions.
SELECT wanted.number
FROM unnest(%(numbers)s::int[], %(after)s::bigint[], %(upto)s::bigint[]) AS wanted (number, after, upto)
WHERE EXISTS (SELECT FROM {schema}.{block_table} WHERE {in_range} AND {held} > 0);

-- ends_of_events -- Cut a range of offsets into windows of `events` events: the last offset of each window.
WITH numbered AS (
    SELECT runs.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before
    FROM (
        SELECT {of_runs}
        FROM {one}
        JOIN {schema}.{block_table} ON {in_range}
        {runs}
        WHERE run.last > {after} AND run.before < {upto}
    ) runs
)
SELECT start + ((number * %(events)s) - before) AS ending
FROM numbered
CROSS JOIN LATERAL generate_series((before / %(events)s) + 1, (before + held) / %(events)s) AS number
UNION
SELECT max(start + held) FROM numbered HAVING count(*) > 0
ORDER BY ending;

-- ends_of_periods -- Cut a range of offsets into periods of `seconds` seconds, counted from 1970: the last offset of each.
SELECT max(each.id)
FROM {one}
JOIN {schema}.{block_table} ON {in_range}
CROSS JOIN LATERAL (
    SELECT {id_at of {up_to of {upto}}} AS id, eql_created_at AS entered WHERE eql_entered IS NULL AND {held} > 0
    UNION ALL
    SELECT {base} + coalesce(place, number), own.entered
    FROM unnest(eql_entered, eql_places) WITH ORDINALITY AS own (entered, place, number)
) each
WHERE each.id > {after} AND each.id <= {upto}
GROUP BY date_bin(make_interval(secs => %(seconds)s), each.entered, 'epoch'::timestamptz)
ORDER BY 1;

-- contents -- Of each window and partition that has events: their number, and when the first and the last were logged.
SELECT wanted.upto, eql_partition, sum({held})::bigint, min({entered_at of {up_to of {after}} + 1}),
       max({entered_at of {up_to of {upto}}})
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
JOIN {schema}.{block_table} ON {in_range} AND {held} > 0
GROUP BY wanted.upto, eql_partition
ORDER BY wanted.upto, eql_partition;

-- part described -- The events of blocks without their keys and values.
SELECT {base} + coalesce(own.place, own.number) AS id, coalesce(own.published, eql_buffered_at) AS published, own.metadata
FROM {schema}.{block_table}
CROSS JOIN LATERAL unnest(array_fill(NULL::boolean, ARRAY[eql_events]), eql_metadata, eql_times, eql_places)
    WITH ORDINALITY AS own (nothing, metadata, published, place, number)

-- publication -- The events of a publication in the log: number, first and last offset, run. They have the publication's
-- time, because one transaction published them; the asset excludes events of other transactions at the same time.
SELECT count(*), min(id), max(id), min(run)
FROM (
    SELECT id, {run of metadata} AS run
    FROM ({described} WHERE eql_id > %(after)s) logged
    WHERE id > %(after)s AND published = %(at)s::timestamptz AND {published_by of metadata}
    ORDER BY id
    LIMIT %(events)s
) found;

-- publishers -- The publishers of a range: for each run, and for events without a run, the number, offsets and times.
SELECT {run of metadata} AS run, {asset of metadata} AS asset, {run_partition of metadata} AS run_partition,
       count(*), min(id), max(id), {nearest of min(published)}, {nearest of max(published)}
FROM {one}
CROSS JOIN LATERAL ({described} WHERE {in_partition} {in_range}) logged
WHERE id > %(after)s AND id <= %(upto)s
GROUP BY run, asset, run_partition
ORDER BY min(id);

-- first -- The first event of a range of offsets, NULL if it has none.
SELECT (SELECT min(start) + 1 FROM ({next_runs of 1}) runs) FROM {one};
