-- lock_views -- Let one transaction at a time declare or drop views.
LOCK {schema}.view_definition IN SHARE ROW EXCLUSIVE MODE;

-- views -- The views, or the view of one name: name, kind, definition, retention, seconds of a period.
SELECT eql_name, eql_kind, eql_definition, eql_retention_seconds, eql_period_seconds
FROM {schema}.view_definition
WHERE eql_name = %(name)s::text OR %(name)s::text IS NULL
ORDER BY eql_name;

-- add_view -- A declared view, whose table was made.
INSERT INTO {schema}.view_definition (eql_name, eql_kind, eql_definition, eql_retention_seconds, eql_period_seconds)
VALUES (%(name)s, %(kind)s, %(definition)s, %(retention)s, %(period)s);

-- change_view -- What a declaration may change.
UPDATE {schema}.view_definition SET eql_definition = %(definition)s, eql_retention_seconds = %(retention)s
WHERE eql_name = %(name)s;

-- forget_view -- A view whose table was dropped.
DELETE FROM {schema}.view_definition WHERE eql_name = %(name)s;

-- make_view_periods -- Make the partitions of a view that begin at these times, where they are missing.
SELECT {schema}.make_view_periods(%(view)s, %(starts)s::timestamptz[]);

-- view_partitions -- The tables of a view's partitions, the oldest first.
SELECT partition.relname
FROM pg_inherits inherits
JOIN pg_class partition ON partition.oid = inherits.inhrelid
WHERE inherits.inhparent = to_regclass(%(table)s) AND partition.relname ~ '_p[0-9]{{12}}$'
ORDER BY partition.relname;

-- clock -- The server's time.
SELECT clock_timestamp();

-- append_to_timeline -- Entries of one timeline, in the order of the arrays.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_data, eql_occurred_at)
SELECT %(tenant)s, entry.resource, entry.data::jsonb, entry.occurred_at
FROM unnest(%(resources)s::text[], %(data)s::text[], %(occurred_at)s::timestamptz[])
    WITH ORDINALITY AS entry (resource, data, occurred_at, position)
ORDER BY entry.position;

-- read_timeline -- What happened to one resource, in the order in which it was appended.
SELECT eql_id AS id, eql_resource AS resource, eql_data AS data, eql_occurred_at AS occurred_at
FROM {schema}.{table}
WHERE eql_tenant = %(tenant)s AND eql_resource = %(resource)s AND eql_id > %(after)s
ORDER BY eql_id
LIMIT %(limit)s;

-- write_log -- Lines of one log, in the order of the arrays.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_level, eql_line, eql_attributes, eql_written_at)
SELECT %(tenant)s, written.resource, written.level, written.line, written.attributes::jsonb, written.written_at
FROM unnest(
    %(resources)s::text[], %(levels)s::text[], %(lines)s::text[], %(attributes)s::text[], %(written_at)s::timestamptz[]
) WITH ORDINALITY AS written (resource, level, line, attributes, written_at, position)
ORDER BY written.position;

-- newest_line -- The largest id of a log's lines; 0 without one.
SELECT coalesce(max(eql_id), 0) FROM {schema}.{table};

-- log_writers -- The open transactions that may have written to a log.
SELECT DISTINCT l.virtualtransaction
FROM pg_locks l
WHERE l.locktype = 'relation'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.relation = %(relation)s::regclass
  AND l.mode = 'RowExclusiveLock'
  AND l.granted;
