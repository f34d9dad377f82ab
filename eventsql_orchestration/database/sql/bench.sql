-- take_database -- Keep other benchmarks out of this database until the session ends; false if one is under way.
SELECT pg_try_advisory_lock(%(lock)s);

-- leftover_tables -- The tables of benchmarks that were killed, beside the logs of their topics.
SELECT c.relname
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relkind = 'r' AND starts_with(c.relname, %(prefix)s);

-- end_sessions -- End the sessions that processes of a benchmark have left on the server.
SELECT count(pg_terminate_backend(pid))
FROM pg_stat_activity
WHERE application_name = %(application)s AND pid <> pg_backend_pid();

-- vacuum_buffer -- Remove the dead rows of earlier figures.
VACUUM {schema}.event_buffer;

-- create_raw -- A table like the buffer.
CREATE TABLE {schema}.{table} (
    eql_id bigserial PRIMARY KEY,
    eql_topic pg_catalog.text NOT NULL,
    eql_partition smallint NOT NULL,
    eql_key pg_catalog.text,
    eql_value pg_catalog.bytea NOT NULL,
    eql_created_at pg_catalog.timestamptz NOT NULL DEFAULT now(),
    eql_metadata pg_catalog.json NOT NULL
);

-- index_raw -- The other one of the buffer's two indexes.
CREATE INDEX ON {schema}.{table} (eql_topic, eql_id);

-- copy_raw -- Encoded events into a table like the buffer.
COPY {schema}.{table} (eql_topic, eql_key, eql_value, eql_metadata, eql_partition) FROM STDIN (FORMAT binary);

-- copy_buffer -- Encoded events into the buffer itself.
COPY {schema}.event_buffer (eql_topic, eql_key, eql_value, eql_metadata, eql_partition) FROM STDIN (FORMAT binary);

-- insert_raw -- One event into a table like the buffer.
INSERT INTO {schema}.{table} (eql_topic, eql_partition, eql_key, eql_value, eql_metadata)
VALUES (%(topic)s, %(partition)s, %(key)s, %(value)s, '{{}}');

-- consumed -- How many events a consumer has committed, over all its partitions.
SELECT coalesce(sum(eql_consumed_events), 0)::bigint
FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s;

-- keep_newest -- Let a topic of a benchmark keep its newest events only.
UPDATE {schema}.topic SET eql_retention_events = %(events)s WHERE eql_name = %(topic)s;

-- hold_snapshot -- Keep every row that is deleted from now on, as any transaction that stays open does.
SELECT pg_current_xact_id();

-- server_settings -- The server's settings that matter for speed or durability.
SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (%(names)s) ORDER BY name;

-- drop_raw -- Drop the raw table, before one of another shape is made.
DROP TABLE {schema}.{table};

-- create_plain -- A plain table with the columns that Spark writes, as its JDBC source would make it.
CREATE TABLE {schema}.{table} (key pg_catalog.text, value pg_catalog.bytea, topic pg_catalog.text, partition integer);

-- delete_changes -- The changes that a benchmark of the event store has appended.
DELETE FROM {schema}.aggregate_change WHERE eql_type = %(type)s;

-- delete_snapshots -- The snapshots that a benchmark of the event store has saved.
DELETE FROM {schema}.aggregate_snapshot WHERE eql_type = %(type)s;

-- delete_aggregates -- The aggregates of a benchmark of the event store.
DELETE FROM {schema}.aggregate WHERE eql_type = %(type)s;

-- fill_timeline -- An event of each resource at a time, in no order of the resources, as a service would append them.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_data, eql_occurred_at)
SELECT 'tenant-' || mod(placed.place, %(tenants)s::bigint), 'resource-' || (placed.place / %(tenants)s::bigint),
       jsonb_build_object('state', 'moved', 'number', placed.place, 'price', 12345, 'by', 'driver-17'),
       %(at)s::timestamptz
FROM (
    SELECT mod(2147483647 * number, %(resources)s::bigint) AS place
    FROM generate_series(%(first)s::bigint, %(upto)s::bigint) AS number
) placed;

-- fill_logs -- Lines of resources in turns, one for each step of time.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_level, eql_line, eql_attributes, eql_written_at)
SELECT 'tenant-' || mod(number, %(tenants)s::bigint),
       'resource-' || mod((number / %(tenants)s::bigint), %(resources)s::bigint), 'info',
       'step ' || number || ' of the run has ended after 12 ms', '{{"step": "load"}}',
       %(start)s::timestamptz + (number * %(step)s::interval)
FROM generate_series(%(first)s::bigint, %(upto)s::bigint) AS number;

-- vacuum_view -- Vacuum a view, as autovacuum does soon after the view was filled.
VACUUM (ANALYZE) {schema}.{table};
