-- parts of blocks_parts

-- first -- The first offset of a segment, and the seconds since it entered the log.
SELECT {base} + 1, extract(epoch FROM clock_timestamp() - eql_created_at)::float8
FROM {schema}.{table} ORDER BY eql_id LIMIT 1;

-- last -- The newest offset of a segment, and the seconds since it entered the log.
SELECT eql_id, extract(epoch FROM clock_timestamp() - {entered_at of eql_events})::float8
FROM {schema}.{table} ORDER BY eql_id DESC LIMIT 1;

-- size -- How many events a segment holds.
SELECT coalesce(sum(eql_events), 0)::bigint FROM {schema}.{table};

-- estimate -- How many events a segment holds: counting blocks is as cheap as any estimate.
SELECT coalesce(sum(eql_events), 0)::bigint FROM {schema}.{table};
