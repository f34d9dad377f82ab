-- publication -- What a writer published with one batch: how many events, and when.
SELECT eql_events, eql_created_at FROM {schema}.spark_publication WHERE eql_writer = %(writer)s AND eql_batch = %(batch)s;

-- published -- The events of a publication in the log: number, first and last offset, run. They have the publication's
-- time, because they are of its transaction; the asset excludes others of the same time.
SELECT count(*), min(eql_id), max(eql_id), min(run)
FROM (
    SELECT eql_id, eql_metadata ->> 'dagster_run_id' AS run
    FROM {schema}.{event_table}
    WHERE eql_id > %(after)s
      AND eql_buffered_at::timestamptz = %(at)s::timestamptz
      AND coalesce(eql_metadata ->> 'dagster_asset_key' = %(asset)s::text,
                   eql_metadata ->> 'dagster_asset_key' IS NULL AND %(asset)s::text IS NULL)
      AND coalesce(eql_metadata ->> 'dagster_partition' = %(partition)s::text,
                   eql_metadata ->> 'dagster_partition' IS NULL AND %(partition)s::text IS NULL)
    ORDER BY eql_id
    LIMIT %(events)s
) found;

-- claims_of_run -- The claims that an owner had within a span of time, in the order in which it made them.
SELECT eql_id, eql_topic, eql_consumer, eql_partition, eql_after, eql_upto, eql_events, eql_state
FROM {schema}.consumer_claim
WHERE eql_owner = %(owner)s
  AND eql_created_at <= %(last)s
  AND (eql_finished_at IS NULL OR eql_finished_at >= %(first)s)
ORDER BY eql_id;

-- origins -- Who published the events of a range: the number, the offsets and the times of each run's, and of the rest.
SELECT eql_metadata ->> 'dagster_run_id' AS run,
       eql_metadata ->> 'dagster_asset_key' AS asset,
       eql_metadata ->> 'dagster_partition' AS run_partition,
       count(*), min(eql_id), max(eql_id),
       min(eql_buffered_at)::timestamptz, max(eql_buffered_at)::timestamptz
FROM {schema}.{event_table}
WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
GROUP BY run, asset, run_partition
ORDER BY min(eql_id);

-- writers_between -- Who published within a span of time.
SELECT eql_writer FROM {schema}.spark_publication WHERE eql_created_at >= %(first)s AND eql_created_at <= %(last)s;
