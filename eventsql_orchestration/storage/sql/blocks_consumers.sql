-- parts of consumers
-- parts of blocks_parts

-- part left -- How many events of a block come after the offset.
(eql_events - {up_to of {offset}})

-- part blocks_of_partition -- The blocks of a partition after its offset. The conditions are those of `of_partition`.
FROM {schema}.{block_table} e
WHERE (e.eql_partition, e.eql_id) > (c.eql_partition, {offset})
  AND (e.eql_partition, e.eql_id) <= (c.eql_partition, 9223372036854775807)
  AND e.eql_id > {offset}

-- part next_block -- The first block of a partition after its offset, if the first event of it is before `until`. A block
-- with gaps lies on one side of each offset where consumers wait.
LEFT JOIN LATERAL (
    SELECT true AS some
    FROM (
        SELECT greatest({base}, {offset}) AS before
        {blocks_of_partition}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT 1
    ) first
    WHERE first.before < {until}
) waiting ON true

-- ready -- The partitions with at least `least` events after their offset (1 by default): partition, seconds until it may
-- be consumed, true. Also the partitions that have consumed all of their layout, and a consumer of the whole topic, with
-- false. One step in the index for each block that is needed.
{readiness}
LEFT JOIN LATERAL (
    SELECT true AS some
    FROM (
        SELECT least(eql_id, {until}) - greatest({base}, {offset}) AS held,
               sum({left}) OVER (ORDER BY e.eql_partition, e.eql_id) AS total
        {blocks_of_partition}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT CASE WHEN c.eql_until IS NULL THEN coalesce(asked.least, 1) ELSE 1 END
    ) next
    WHERE next.held > 0 AND next.total >= CASE WHEN c.eql_until IS NULL THEN coalesce(asked.least, 1) ELSE 1 END
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
  AND (waiting.some OR c.eql_until IS NOT NULL OR c.eql_partition < 0);

-- ready_topic -- As `ready`, for a consumer of the whole topic, which has no layout. Also the partitions of a partitioned
-- consumer, with false.
{readiness}
LEFT JOIN LATERAL (
    SELECT true AS some
    FROM (
        SELECT sum({left}) OVER (ORDER BY e.eql_id) AS total
        FROM {schema}.{block_table} e
        WHERE c.eql_partition < 0 AND e.eql_id > {offset}
        ORDER BY e.eql_id
        LIMIT coalesce(asked.least, 1)
    ) next
    WHERE next.total >= coalesce(asked.least, 1)
    LIMIT 1
) waiting ON true
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND (waiting.some OR c.eql_partition >= 0);

-- standings -- Every partition of a consumer, with its claims. Uses one index step for each partition, as `ready`.
SELECT {standing}
FROM {claimed_partitions}
{next_block}
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- behind -- The partitions of a consumer with events before the offset where it waits, and that offset. Planned as
-- `ready`.
SELECT c.eql_partition, c.eql_until
FROM {schema}.consumer c
{next_block}
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_until IS NOT NULL AND waiting.some
ORDER BY c.eql_partition;

-- before_fence -- Whether a consumer has events left from before a generation. Planned as `ready`.
SELECT EXISTS (
    SELECT FROM {schema}.consumer c
    JOIN {schema}.shard_fence f ON f.eql_topic = c.eql_topic AND f.eql_generation = %(generation)s
    CROSS JOIN LATERAL (
        SELECT greatest({base}, {offset}) AS before
        {blocks_of_partition}
        ORDER BY e.eql_partition, e.eql_id
        LIMIT 1
    ) waiting
    WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition >= 0
      AND waiting.before < f.eql_fence
) OR EXISTS (
    SELECT FROM {schema}.consumer c
    JOIN {schema}.shard_fence f ON f.eql_topic = c.eql_topic AND f.eql_generation = %(generation)s
    CROSS JOIN LATERAL (
        SELECT greatest({base}, {offset}) AS before
        FROM {schema}.{block_table} e
        WHERE e.eql_id > {offset}
        ORDER BY e.eql_id
        LIMIT 1
    ) waiting
    WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s AND c.eql_partition < 0
      AND waiting.before < f.eql_fence
);
