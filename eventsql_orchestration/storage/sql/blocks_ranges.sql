-- part base -- The id before the first event of a block.
(eql_id - eql_events)

-- part wanted_held -- How many events of a block one of the wanted ranges holds.
greatest(least(eql_id, wanted.upto) - greatest({base}, wanted.after), 0)

-- part in_wanted -- The blocks that one of the wanted ranges has events of. A block has at most 20,000 events.
eql_id > wanted.after AND eql_id <= (least(wanted.upto, 9223372036854755807) + 20000) AND {wanted_held} > 0

-- part held -- How many events of a block a range holds.
greatest(least(eql_id, %(upto)s::bigint) - greatest({base}, %(after)s::bigint), 0)

-- part in_range -- The blocks that a range has events of.
eql_id > %(after)s AND eql_id <= (least(%(upto)s::bigint, 9223372036854755807) + 20000) AND {held} > 0

-- samples -- For each given range with events: first and last offset, the number of its first events, at most
-- `sample`, and the last offset of these.
SELECT sampled.first, last.eql_id, sampled.events, sampled.upto
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT min(start) + 1 AS first, max(start + least(held, %(sample)s - before)) AS upto,
           sum(least(held, %(sample)s - before))::bigint AS events
    FROM (
        SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before
        FROM (
            SELECT greatest({base}, wanted.after) AS start, {wanted_held} AS held
            FROM {schema}.{block_table}
            WHERE {in_partition} {in_wanted}
            ORDER BY eql_id
            LIMIT %(sample)s
        ) block
    ) found
    WHERE before < %(sample)s
) sampled
CROSS JOIN LATERAL (
    SELECT least(eql_id, wanted.upto) AS eql_id FROM {schema}.{block_table}
    WHERE {in_partition} {in_wanted}
    ORDER BY {block_table}.eql_id DESC
    LIMIT 1
) last
ORDER BY sampled.first;

-- firsts -- The first offset within each of the given ranges, in their order, NULL for one that holds no event.
SELECT (
    SELECT greatest({base}, wanted.after) + 1 FROM {schema}.{block_table}
    WHERE {in_partition} {in_wanted}
    ORDER BY eql_id
    LIMIT 1
)
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) WITH ORDINALITY AS wanted (after, upto, number)
ORDER BY wanted.number;

-- occupied -- Which of these ranges of offsets, each in a partition, have events.
SELECT wanted.number
FROM unnest(%(numbers)s::int[], %(partitions)s::smallint[], %(after)s::bigint[], %(upto)s::bigint[])
    AS wanted (number, part, after, upto)
WHERE EXISTS (
    SELECT FROM {schema}.{block_table} WHERE eql_partition = wanted.part AND {in_wanted}
);

-- occupied_topic -- The same over all partitions.
SELECT wanted.number
FROM unnest(%(numbers)s::int[], %(after)s::bigint[], %(upto)s::bigint[]) AS wanted (number, after, upto)
WHERE EXISTS (SELECT FROM {schema}.{block_table} WHERE {in_wanted});

-- ends_of_events -- The last offset of each of the windows of so many events that a range of offsets is cut into.
WITH numbered AS (
    SELECT block.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before
    FROM (
        SELECT greatest({base}, %(after)s::bigint) AS start, {held} AS held
        FROM {schema}.{block_table}
        WHERE {in_range}
    ) block
)
SELECT start + ((number * %(events)s) - before) AS ending
FROM numbered
CROSS JOIN LATERAL generate_series((before / %(events)s) + 1, (before + held) / %(events)s) AS number
UNION
SELECT max(start + held) FROM numbered HAVING count(*) > 0
ORDER BY ending;

-- ends_of_periods -- The last offset of each period of so many seconds, counted from 1970, that a range has events of.
SELECT max(least(eql_id, %(upto)s::bigint))
FROM {schema}.{block_table}
WHERE {in_range}
GROUP BY date_bin(make_interval(secs => %(seconds)s), eql_created_at, 'epoch'::timestamptz)
ORDER BY 1;

-- contents -- Of each window and partition that has events: their number, and when the first and the last were logged.
SELECT wanted.upto, eql_partition, sum({wanted_held})::bigint, min(eql_created_at), max(eql_created_at)
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
JOIN {schema}.{block_table} ON {in_wanted}
GROUP BY wanted.upto, eql_partition
ORDER BY wanted.upto, eql_partition;

-- part described -- The events of blocks without their keys and values.
SELECT {base} + e.number AS id, coalesce(e.published, eql_buffered_at) AS published, e.metadata
FROM {schema}.{block_table}
CROSS JOIN LATERAL unnest(array_fill(NULL::boolean, ARRAY[eql_events]), eql_metadata, eql_times)
    WITH ORDINALITY AS e (nothing, metadata, published, number)

-- publication -- The events of a publication in the log: number, first and last offset, run. They have the publication's
-- time, because they are of its transaction; the asset excludes others of the same time.
SELECT count(*), min(id), max(id), min(run)
FROM (
    SELECT id,
           coalesce(metadata ->> 'dagster_run_id',
                    ('airflow ' || (metadata ->> 'airflow_dag_id')) || ('/' || (metadata ->> 'airflow_run_id'))) AS run
    FROM ({described} WHERE eql_id > %(after)s) logged
    WHERE id > %(after)s
      AND published = %(at)s::timestamptz
      AND coalesce(coalesce(metadata ->> 'dagster_asset_key', metadata ->> 'airflow_task_id') = %(asset)s::text,
                   metadata ->> 'dagster_asset_key' IS NULL AND metadata ->> 'airflow_task_id' IS NULL AND %(asset)s::text IS NULL)
      AND coalesce(coalesce(metadata ->> 'dagster_partition', metadata ->> 'airflow_map_index') = %(partition)s::text,
                   metadata ->> 'dagster_partition' IS NULL AND metadata ->> 'airflow_map_index' IS NULL AND %(partition)s::text IS NULL)
    ORDER BY id
    LIMIT %(events)s
) found;

-- publishers -- Who published the events of a range: the number, the offsets and the times of each run's, and of the rest.
SELECT coalesce(metadata ->> 'dagster_run_id',
                ('airflow ' || (metadata ->> 'airflow_dag_id')) || ('/' || (metadata ->> 'airflow_run_id'))) AS run,
       coalesce(metadata ->> 'dagster_asset_key', metadata ->> 'airflow_task_id') AS asset,
       coalesce(metadata ->> 'dagster_partition', metadata ->> 'airflow_map_index') AS run_partition,
       count(*), min(id), max(id), min(published), max(published)
FROM ({described} WHERE {in_partition} {in_range}) logged
WHERE id > %(after)s AND id <= %(upto)s
GROUP BY run, asset, run_partition
ORDER BY min(id);

-- first -- The first event of a range of offsets, NULL where it has none.
SELECT min(greatest({base}, %(after)s::bigint) + 1) FROM {schema}.{block_table} WHERE {in_range};
