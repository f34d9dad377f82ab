-- take_database -- Keep other benchmarks out of this database until the session ends; false if one is under way.
SELECT pg_try_advisory_lock(%(lock)s);

-- leftovers -- The tables, schemas and databases of benchmarks that were killed: the kind of each, and its name.
SELECT 'TABLE', ARRAY[n.nspname::text, c.relname::text]
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relkind = 'r' AND starts_with(c.relname, %(tables)s)
UNION ALL
SELECT 'SCHEMA', ARRAY[nspname::text] FROM pg_namespace WHERE obj_description(oid, 'pg_namespace') = %(mark)s
UNION ALL
SELECT 'DATABASE', ARRAY[datname::text] FROM pg_database WHERE shobj_description(oid, 'pg_database') = %(mark)s;

-- leftover_queues -- The queues of benchmarks that were killed.
SELECT eql_name FROM {schema}.queue WHERE starts_with(eql_name, %(prefix)s);

-- end_sessions -- End the sessions that processes of a benchmark have left on the server.
SELECT count(pg_terminate_backend(pid))
FROM pg_stat_activity
WHERE application_name = %(application)s AND pid <> pg_backend_pid();

-- vacuum_buffer -- Remove the dead rows of earlier figures.
VACUUM {schema}.event_buffer, {schema}.spark_staged_event;

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

-- index_raw -- The second index of the buffer.
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

-- create_orders -- A table as a service might have it, whose changes are captured.
CREATE TABLE {schema}.{table} (
    id bigint PRIMARY KEY,
    customer bigint NOT NULL,
    status pg_catalog.text NOT NULL,
    amount numeric(12, 2) NOT NULL,
    currency pg_catalog.text NOT NULL,
    placed_at pg_catalog.timestamptz NOT NULL,
    note pg_catalog.text NOT NULL
);

-- index_orders -- A second index, as such a table might have it.
CREATE INDEX ON {schema}.{table} (customer);

-- fill_orders -- Orders of 150 bytes each.
INSERT INTO {schema}.{table} (id, customer, status, amount, currency, placed_at, note)
SELECT number, mod(number, 1000), 'new', number / 7.0, 'EUR', now(), repeat('note', 15)
FROM generate_series(0, %(rows)s::bigint - 1) AS number;

-- vacuum_orders -- Remove what an earlier update has left.
VACUUM {schema}.{table};

-- update_orders -- Change all orders in one statement.
UPDATE {schema}.{table} SET status = status || 'x';

-- update_order -- Change one order.
UPDATE {schema}.{table} SET note = 'changed' || note WHERE id = %(id)s;
