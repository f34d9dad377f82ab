-- parts of times

-- samples -- For each given range with events: first and last offset, the number of its first events, at most
-- `sample`, and the last offset of these.
SELECT sampled.first, last.eql_id, sampled.events, sampled.upto
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS wanted (after, upto)
CROSS JOIN LATERAL (
    SELECT min(eql_id) AS first, max(eql_id) AS upto, count(*) AS events
    FROM (
        SELECT eql_id FROM {schema}.{event_table}
        WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
        ORDER BY eql_id
        LIMIT %(sample)s
    ) found
) sampled
CROSS JOIN LATERAL (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id DESC
    LIMIT 1
) last
ORDER BY sampled.first;

-- firsts -- The first offset within each of the given ranges, in their order, NULL for a range without events.
SELECT (
    SELECT eql_id FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > wanted.after AND eql_id <= wanted.upto
    ORDER BY eql_id
    LIMIT 1
)
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) WITH ORDINALITY AS wanted (after, upto, number)
ORDER BY wanted.number;

-- occupied -- Which of these ranges of offsets, each in a partition, have events.
SELECT r.number
FROM unnest(%(numbers)s::int[], %(partitions)s::smallint[], %(after)s::bigint[], %(upto)s::bigint[])
    AS r (number, part, after, upto)
WHERE EXISTS (
    SELECT FROM {schema}.{event_table} e
    WHERE e.eql_partition = r.part AND e.eql_id > r.after AND e.eql_id <= r.upto
);

-- occupied_topic -- As `occupied`, over all partitions.
SELECT r.number
FROM unnest(%(numbers)s::int[], %(after)s::bigint[], %(upto)s::bigint[]) AS r (number, after, upto)
WHERE EXISTS (SELECT FROM {schema}.{event_table} e WHERE e.eql_id > r.after AND e.eql_id <= r.upto);

-- ends_of_events -- Cut a range of offsets into windows of `events` events: the last offset of each window.
SELECT max(eql_id)
FROM (
    SELECT eql_id, (row_number() OVER (ORDER BY eql_id) - 1) / %(events)s AS number
    FROM {schema}.{event_table}
    WHERE eql_id > %(after)s AND eql_id <= %(upto)s
) numbered
GROUP BY number
ORDER BY 1;

-- ends_of_periods -- Cut a range of offsets into periods of `seconds` seconds, counted from 1970: the last offset of each.
SELECT max(eql_id)
FROM {schema}.{event_table}
WHERE eql_id > %(after)s AND eql_id <= %(upto)s
GROUP BY date_bin(make_interval(secs => %(seconds)s), eql_created_at::timestamptz, 'epoch'::timestamptz)
ORDER BY 1;

-- contents -- Of each window and partition that has events: their number, and when the first and the last were logged.
SELECT w.upto, e.eql_partition, count(*), min(e.eql_created_at)::timestamptz, max(e.eql_created_at)::timestamptz
FROM unnest(%(after)s::bigint[], %(upto)s::bigint[]) AS w (after, upto)
JOIN {schema}.{event_table} e ON e.eql_id > w.after AND e.eql_id <= w.upto
GROUP BY w.upto, e.eql_partition
ORDER BY w.upto, e.eql_partition;

-- part run of metadata -- The run of Dagster or Airflow that published an event.
coalesce({metadata} ->> 'dagster_run_id',
         ('airflow ' || ({metadata} ->> 'airflow_dag_id')) || ('/' || ({metadata} ->> 'airflow_run_id')))

-- part asset of metadata -- The asset or task that published an event.
coalesce({metadata} ->> 'dagster_asset_key', {metadata} ->> 'airflow_task_id')

-- part run_partition of metadata -- The partition or map index of that asset or task.
coalesce({metadata} ->> 'dagster_partition', {metadata} ->> 'airflow_map_index')

-- part published_by of metadata -- Whether the given asset and partition published an event; either may be NULL.
coalesce({asset of {metadata}} = %(asset)s::text, {asset of {metadata}} IS NULL AND %(asset)s::text IS NULL)
      AND coalesce({run_partition of {metadata}} = %(partition)s::text,
                   {run_partition of {metadata}} IS NULL AND %(partition)s::text IS NULL)

-- publication -- The events of a publication in the log: number, first and last offset, run. They have the publication's
-- time, because one transaction published them; the asset excludes events of other transactions at the same time.
SELECT count(*), min(eql_id), max(eql_id), min(run)
FROM (
    SELECT eql_id, {run of eql_metadata} AS run
    FROM {schema}.{event_table}
    WHERE eql_id > %(after)s AND eql_buffered_at::timestamptz = %(at)s::timestamptz AND {published_by of eql_metadata}
    ORDER BY eql_id
    LIMIT %(events)s
) found;

-- publishers -- The publishers of a range: for each run, and for events without a run, the number, offsets and times.
SELECT {run of eql_metadata} AS run, {asset of eql_metadata} AS asset, {run_partition of eql_metadata} AS run_partition,
       count(*), min(eql_id), max(eql_id),
       {nearest of min(eql_buffered_at)}, {nearest of max(eql_buffered_at)}
FROM {schema}.{event_table}
WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
GROUP BY run, asset, run_partition
ORDER BY min(eql_id);

-- first -- The first event of a range of offsets, NULL if it has none.
SELECT min(eql_id) FROM {schema}.{event_table} WHERE eql_id > %(after)s AND eql_id <= %(upto)s;
