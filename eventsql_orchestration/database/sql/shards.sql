-- identity -- The identity of this database, whatever its URL: the identifier of its cluster, and its oid.
SELECT (SELECT system_identifier FROM pg_control_system()) || ':' || oid
FROM pg_database WHERE datname = current_database();

-- state -- This database's view of its shards: set, own name, whether it takes events; the names of each generation,
-- oldest first; the number of topics.
SELECT (SELECT ARRAY[eql_set::text, eql_name, eql_active::text] FROM {schema}.shard),
       (SELECT json_agg(eql_shards ORDER BY eql_generation) FROM {schema}.shard_layout),
       (SELECT count(*) FROM {schema}.topic);

-- name -- The name of this shard.
SELECT eql_name FROM {schema}.shard;

-- has_topics -- Whether there is a table of topics; EventSQL's Java library makes one without this package.
SELECT to_regclass('{schema}.topic');

-- count_topics -- How many topics there are.
SELECT count(*) FROM {schema}.topic;

-- become -- Make this database a shard of a set.
INSERT INTO {schema}.shard (eql_name, eql_set, eql_active) VALUES (%(name)s, %(set)s, %(active)s);

-- add_generation -- Note which shards there are from a generation on.
INSERT INTO {schema}.shard_layout (eql_generation, eql_shards) VALUES (%(generation)s, %(shards)s)
ON CONFLICT DO NOTHING;

-- activate -- Let this shard take events.
UPDATE {schema}.shard SET eql_active = true;

-- topics -- The names of all topics, and their partitions.
SELECT eql_name, eql_partitions FROM {schema}.topic ORDER BY eql_name;

-- add_fence -- Note where a topic's log ends when a generation begins.
INSERT INTO {schema}.shard_fence (eql_generation, eql_topic, eql_fence) VALUES (%(generation)s, %(topic)s, %(fence)s);

-- redefine_all -- Have every publisher look its topics up again before it commits another event.
UPDATE {schema}.topic SET eql_layout = eql_layout + 1;

-- try_gate -- Take the lock for holding consumers of this shard back and releasing them; false if another transaction has
-- it.
SELECT pg_try_advisory_xact_lock(%(lock)s);

-- gate -- As `try_gate`; waits for another transaction that has the lock.
SELECT pg_advisory_xact_lock(%(lock)s);

-- may_release -- Whether this role may change how far consumers go.
SELECT has_column_privilege('{schema}.consumer', 'eql_until', 'UPDATE');

-- held -- The consumers that get no events here yet.
SELECT DISTINCT eql_topic, eql_name FROM {schema}.consumer WHERE eql_until = %(held)s ORDER BY eql_topic, eql_name;

-- hold_back -- Hand no events to a consumer here.
WITH locked AS MATERIALIZED (
    SELECT eql_partition FROM {schema}.consumer
    WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s
    ORDER BY eql_partition
    FOR UPDATE
)
UPDATE {schema}.consumer SET eql_until = %(held)s
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = ANY (SELECT eql_partition FROM locked);

-- lock_held -- The partitions of a consumer that is held back, for this transaction.
SELECT eql_partition, coalesce(eql_last_event_id, 0)
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_until = %(held)s
ORDER BY eql_partition
FOR UPDATE;

-- let_go -- Hand events to a consumer here, up to an offset or all.
UPDATE {schema}.consumer SET eql_until = %(until)s
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_until = %(held)s;
