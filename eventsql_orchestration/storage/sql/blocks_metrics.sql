-- parts of blocks_parts
-- parts of times

-- part numbered_blocks -- Blocks, each with the numbers of its events before the offset and after it.
SELECT e.*, {up_to of c.after} AS passed, eql_events - {up_to of c.after} AS held
FROM {schema}.{block_table} e

-- part first_of_blocks -- The first event of a block that is left, and the seconds since it was published.
SELECT e.eql_id AS block, {id_at of {up_to of c.after} + 1} AS id,
       {seconds_since of coalesce(eql_times[{up_to of c.after} + 1], eql_buffered_at)} AS seconds
FROM {schema}.{block_table} e

-- part of_partition -- The conditions of `ready`.
WHERE (e.eql_partition, e.eql_id) > (c.partition, c.after)
  AND (e.eql_partition, e.eql_id) <= (c.partition, 9223372036854775807)
  AND e.eql_id > c.after

-- part counted -- How many events are left, at most `most`; the number of all; the last of the counted ones.
SELECT coalesce(sum(least(held, %(most)s - before)) FILTER (WHERE before < %(most)s), 0)::bigint AS events,
       CASE WHEN count(*) < %(most)s THEN coalesce(sum(held), 0)::bigint END AS total,
       max({id_at of passed + least(held, %(most)s - before)}) FILTER (WHERE before < %(most)s) AS furthest
FROM (SELECT block.*, (sum(held) OVER (ORDER BY eql_id))::bigint - held AS before FROM (

-- waiting -- The events of a log after places, as for rows; an index step for each block. A block with gaps may begin
-- first and end later than the first block of another partition.
SELECT c.partition, c.after, counted.events, counted.total, counted.furthest, first.id, first.seconds
FROM unnest(%(partitions)s::smallint[], %(offsets)s::bigint[]) AS c (partition, after)
CROSS JOIN LATERAL (
    {counted}
        {numbered_blocks}
        {of_partition}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT (SELECT %(most)s::bigint)
    ) block) next
) counted
LEFT JOIN LATERAL (
    {first_of_blocks}
    {of_partition}
    ORDER BY e.eql_partition, e.eql_id
    LIMIT 1
) first ON true
WHERE c.partition >= 0
UNION ALL
SELECT c.partition, c.after, counted.events, counted.total, counted.furthest, first.id, first.seconds
FROM unnest(%(partitions)s::smallint[], %(offsets)s::bigint[]) AS c (partition, after)
CROSS JOIN LATERAL (
    {counted}
        {numbered_blocks}
        WHERE e.eql_id > c.after
        ORDER BY e.eql_id
        LIMIT (SELECT %(most)s::bigint)
    ) block) next
) counted
LEFT JOIN LATERAL (
    WITH ending AS MATERIALIZED (
        {first_of_blocks}
        WHERE e.eql_id > c.after
        ORDER BY e.eql_id
        LIMIT 1
    )
    SELECT * FROM ending
    UNION ALL
    {first_of_blocks}
    WHERE e.eql_span IS NOT NULL AND e.eql_id > c.after AND e.eql_id <= {farthest of (SELECT ending.block FROM ending)}
    ORDER BY id
    LIMIT 1
) first ON true
WHERE c.partition < 0;
