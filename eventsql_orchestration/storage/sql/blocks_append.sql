-- parts of append

-- append -- Any number of encoded blocks to the end of the topic's log.
COPY {schema}.{block_store} (
    eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_times, eql_keys, eql_values, eql_metadata
) FROM STDIN (FORMAT binary);

-- part own -- The sequence of the log's ids.
own AS MATERIALIZED (
    SELECT pg_get_serial_sequence('{schema}.{block_store}', 'eql_id')::regclass AS sequence
)

-- draw -- Take ids of the log for `events` events: the last one, and whether they are usable.
WITH wanted AS (SELECT %(events)s::bigint AS events, %(after)s::bigint AS after), {own}, {drawn}
SELECT last, usable FROM ids;

-- part packed -- Write the events `moved` to the topic's log as blocks, each of one partition and in the order of the
-- buffer ids. A block has at most 10,000 events, and less than 1 MiB besides its first event. If the ids are not
-- usable, the block gets no id, and the table refuses it.
numbered AS (
    SELECT *, (row_number() OVER own - 1) / 10000 AS by_number,
           sum(octet_length(eql_value) + coalesce(octet_length(eql_key), 0) + octet_length(eql_metadata::text)) OVER own
               / 1048576 AS by_size
    FROM moved
    WINDOW own AS (PARTITION BY eql_partition ORDER BY eql_id)
), packed AS (
    SELECT min(eql_id) AS first, eql_partition, count(*)::int AS events, min(eql_created_at) AS published,
           CASE WHEN min(eql_created_at) < max(eql_created_at) THEN array_agg(eql_created_at ORDER BY eql_id) END AS times,
           CASE WHEN count(eql_key) > 0 THEN array_agg(eql_key ORDER BY eql_id) END AS keys,
           array_agg(eql_value ORDER BY eql_id) AS vals,
           CASE WHEN bool_or(eql_metadata::text <> '{{}}') THEN array_agg(eql_metadata ORDER BY eql_id) END AS metadata
    FROM numbered
    GROUP BY eql_partition, by_number, trunc(by_size)
), wanted AS (SELECT count(*) AS events, %(after)s::bigint AS after FROM moved), {own}, {drawn}
INSERT INTO {schema}.{block_store} (
    eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_times, eql_keys, eql_values, eql_metadata
)
SELECT CASE WHEN ids.usable THEN ids.before + (sum(packed.events) OVER (ORDER BY packed.first))::bigint END,
       packed.eql_partition, packed.events, packed.published, statement_timestamp(), packed.times, packed.keys,
       packed.vals, packed.metadata
FROM packed CROSS JOIN ids
ORDER BY packed.first
RETURNING eql_events

-- move -- Move buffered events to the end of the topic's log, in the order of their buffer ids.
{moved}, {packed};

-- move_blocks -- Move the next blocks of the buffer to the end of the topic's log, as for rows. If the ids are not
-- usable, or a block claims more events than a block may have, the blocks get no id, and the table refuses them.
-- `||` reads an array from the buffer once; otherwise each check of the log's table would read it.
{taken}, sound AS (SELECT FROM block WHERE at_home),
wanted AS (SELECT sum(events) AS events, %(after)s::bigint AS after FROM block HAVING max(events) <= 20000), {own}, {drawn},
entered AS (
    INSERT INTO {schema}.{block_store} (
        eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_keys, eql_values, eql_metadata
    )
    SELECT CASE WHEN ids.usable
               THEN ids.before + (sum(block.events) OVER (ORDER BY block.eql_id))::bigint END,
           block.eql_partition, block.events, block.eql_created_at, statement_timestamp(),
           CASE WHEN block.eql_keys IS NOT NULL THEN block.eql_keys || '{{}}'::text[] END,
           block.eql_values || '{{}}'::bytea[],
           CASE WHEN block.eql_event_metadata IS NOT NULL THEN block.eql_event_metadata || '{{}}'::json[] END
    FROM block CROSS JOIN ids
    ORDER BY block.eql_id
    RETURNING eql_events
)
{outcome}, (SELECT coalesce(sum(eql_events), 0) FROM entered)::bigint;
