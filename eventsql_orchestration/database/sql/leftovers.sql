-- topics -- Names in a table that no topic has, found by its index in one step for each name.
WITH RECURSIVE named (topic) AS (
    (SELECT eql_topic FROM {schema}.{table} ORDER BY eql_topic LIMIT 1)
    UNION ALL
    SELECT (SELECT eql_topic FROM {schema}.{table} WHERE eql_topic > named.topic ORDER BY eql_topic LIMIT 1)
    FROM named WHERE named.topic IS NOT NULL
)
SELECT topic FROM named
WHERE topic IS NOT NULL AND NOT EXISTS (SELECT FROM {schema}.topic WHERE eql_name = topic)
ORDER BY topic;

-- bound -- Whether row security binds this role in the tables of topics and consumers.
SELECT row_security_active('{schema}.topic') OR row_security_active('{schema}.consumer');

-- consumers -- The consumers that claims name and that do not exist, found in the same way.
WITH RECURSIVE named (topic, consumer) AS (
    (SELECT eql_topic, eql_consumer FROM {schema}.consumer_claim ORDER BY eql_topic, eql_consumer LIMIT 1)
    UNION ALL
    SELECT next.eql_topic, next.eql_consumer
    FROM named CROSS JOIN LATERAL (
        SELECT eql_topic, eql_consumer FROM {schema}.consumer_claim
        WHERE (eql_topic, eql_consumer) > (named.topic, named.consumer)
        ORDER BY eql_topic, eql_consumer
        LIMIT 1
    ) next
)
SELECT topic, consumer FROM named
WHERE NOT EXISTS (SELECT FROM {schema}.consumer WHERE eql_topic = topic AND eql_name = consumer)
ORDER BY topic, consumer;

-- layouts -- Topics whose newest layout differs from their definition: it is left from a deleted topic of this name.
-- Adding a shard changes a topic's layout and not its partitions.
SELECT t.eql_name
FROM {schema}.topic t
CROSS JOIN LATERAL (
    SELECT eql_layout, eql_partitions FROM {schema}.topic_layout
    WHERE eql_topic = t.eql_name
    ORDER BY eql_layout DESC
    LIMIT 1
) newest
WHERE newest.eql_layout > t.eql_layout OR newest.eql_partitions <> t.eql_partitions
ORDER BY t.eql_name;

-- delete -- Delete at most `batch` rows of a table that name a topic which does not exist.
DELETE FROM {schema}.{table}
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {schema}.{table}
    WHERE eql_topic = %(topic)s AND NOT EXISTS (SELECT FROM {schema}.topic WHERE eql_name = %(topic)s)
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
));

-- delete_claims -- Delete at most `batch` claims of a consumer that does not exist.
DELETE FROM {schema}.consumer_claim
WHERE eql_id = ANY (ARRAY(
    SELECT eql_id FROM {schema}.consumer_claim
    WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s
      AND NOT EXISTS (SELECT FROM {schema}.consumer WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s)
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
));

-- delete_layouts -- Delete the layouts of a topic.
DELETE FROM {schema}.topic_layout WHERE eql_topic = %(topic)s;

-- let_on -- Release the consumers of a topic that wait for a layout that does not exist.
UPDATE {schema}.consumer c SET eql_until = NULL
WHERE eql_topic = %(topic)s AND eql_partition >= 0 AND eql_until >= 0 AND NOT EXISTS (
    SELECT FROM {schema}.topic_layout l WHERE l.eql_topic = c.eql_topic AND l.eql_after = c.eql_until
);

-- passed_layouts -- Delete the layouts of a topic whose events were dropped and that every consumer has left, except
-- the newest.
DELETE FROM {schema}.topic_layout past
WHERE eql_topic = %(topic)s AND EXISTS (
    SELECT FROM {schema}.topic_layout next
    WHERE next.eql_topic = past.eql_topic AND next.eql_layout > past.eql_layout AND next.eql_after <= %(dropped)s
      AND NOT EXISTS (
          SELECT FROM {schema}.consumer c
          WHERE c.eql_topic = past.eql_topic AND c.eql_partition >= 0
            AND (coalesce(c.eql_last_event_id, 0) < next.eql_after OR c.eql_until <= next.eql_after)
      )
);

-- lacking -- Partitioned consumers of a topic that lack partitions, with both numbers. A consumer that waits at the end
-- of a layout needs the partitions of that layout and of all later ones. Windows of backfills do not count.
SELECT c.eql_name, count(*), needed.partitions
FROM {schema}.consumer c
JOIN {schema}.topic t ON t.eql_name = c.eql_topic
CROSS JOIN LATERAL (
    SELECT greatest(t.eql_partitions, max(layout.eql_partitions)) AS partitions
    FROM (
        SELECT eql_partitions, lead(eql_after, 1, 9223372036854775807) OVER (ORDER BY eql_layout) AS upto
        FROM {schema}.topic_layout
        WHERE eql_topic = c.eql_topic
    ) layout
    WHERE c.eql_until >= 0 AND layout.upto >= c.eql_until
) needed
WHERE c.eql_topic = %(topic)s AND c.eql_partition >= 0 AND position(%(window)s IN c.eql_name) = 0
GROUP BY c.eql_name, needed.partitions
HAVING count(*) < needed.partitions
ORDER BY c.eql_name;
