-- parts of blocks_parts

-- part offset -- Where a partition of a consumer has come to.
coalesce(c.eql_last_event_id, 0)

-- part numbered_blocks -- Blocks, each with the numbers of its events before the offset and after it.
SELECT e.*, {up_to of {offset}} AS passed, eql_events - {up_to of {offset}} AS held
FROM {schema}.{block_table} e

-- part seconds -- The first event of a block that is left, and the seconds since it was published.
SELECT {id_at of {up_to of {offset}} + 1} AS id,
       extract(epoch FROM clock_timestamp() - coalesce(eql_times[{up_to of {offset}} + 1], eql_buffered_at))::float8
           AS seconds
FROM {schema}.{block_table} e

-- part of_partition -- The conditions of `ready`.
WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, {offset})
  AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
  AND e.eql_id > {offset}

-- part counted -- How many events are left, at most `most`, and the last of these.
SELECT coalesce(sum(least(held, %(most)s - before)), 0)::bigint AS events,
       max({id_at of passed + least(held, %(most)s - before)}) AS furthest
FROM (SELECT block.*, (sum(held) OVER (ORDER BY eql_id))::bigint - held AS before FROM (

-- waiting -- The events of a log that each consumer partition has left, as for rows; an index step for each block.
SELECT c.eql_name, c.eql_partition, counted.events, counted.furthest, first.seconds, first.id <= c.eql_until
FROM {schema}.consumer c
CROSS JOIN LATERAL (
    {counted}
        {numbered_blocks}
        {of_partition}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT %(most)s
    ) block) next
    WHERE before < %(most)s
) counted
LEFT JOIN LATERAL (
    {seconds}
    {of_partition}
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) first ON true
WHERE c.eql_topic = %(topic)s AND c.eql_partition >= 0
UNION ALL
SELECT c.eql_name, c.eql_partition, counted.events, counted.furthest, first.seconds, NULL
FROM {schema}.consumer c
CROSS JOIN LATERAL (
    {counted}
        {numbered_blocks}
        WHERE e.eql_id > {offset}
        ORDER BY e.eql_id
        LIMIT %(most)s
    ) block) next
    WHERE before < %(most)s
) counted
LEFT JOIN LATERAL (
    {seconds}
    WHERE e.eql_id > {offset}
    ORDER BY e.eql_id
    LIMIT 1
) first ON true
WHERE c.eql_topic = %(topic)s AND c.eql_partition < 0;
