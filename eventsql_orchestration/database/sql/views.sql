-- lock_views -- Let one transaction at a time declare or drop views.
LOCK {schema}.view_definition IN SHARE ROW EXCLUSIVE MODE;

-- views -- The views, except views of rebuilds, or the view of one name: name, kind, definition, retention, seconds of a
-- period.
SELECT eql_name, eql_kind, eql_definition, eql_retention_seconds, eql_period_seconds
FROM {schema}.view_definition
WHERE eql_name = %(name)s::text OR (%(name)s::text IS NULL AND (eql_definition -> 'rebuilds') IS NULL)
ORDER BY eql_name;

-- rebuilds -- The views that rebuilds of a view have made.
SELECT eql_name FROM {schema}.view_definition WHERE (eql_definition ->> 'rebuilds') = %(name)s::text ORDER BY eql_name;

-- unfinished_rebuilds -- The rebuilds of views that have not ended: the view, and when the rebuild began.
SELECT eql_definition ->> 'rebuilds', eql_created_at FROM {schema}.view_definition
WHERE (eql_definition -> 'rebuilds') IS NOT NULL
ORDER BY eql_created_at;

-- add_view -- A declared view, whose table was made.
INSERT INTO {schema}.view_definition (eql_name, eql_kind, eql_definition, eql_retention_seconds, eql_period_seconds)
VALUES (%(name)s, %(kind)s, %(definition)s, %(retention)s, %(period)s);

-- change_view -- Change a view's definition and retention.
UPDATE {schema}.view_definition SET eql_definition = %(definition)s, eql_retention_seconds = %(retention)s
WHERE eql_name = %(name)s;

-- forget_view -- A view whose table was dropped.
DELETE FROM {schema}.view_definition WHERE eql_name = %(name)s;

-- make_view_periods -- Make the partitions of a view that begin at these times, where they are missing.
SELECT {schema}.make_view_periods(%(view)s, %(starts)s::timestamptz[]);

-- part partitions -- The tables of a view's partitions.
SELECT partition.relname
FROM pg_inherits inherits
JOIN pg_class partition ON partition.oid = inherits.inhrelid
WHERE inherits.inhparent = to_regclass(%(table)s) AND partition.relname ~ '_p[0-9]{{12}}$'

-- view_partitions -- The tables of a view's partitions, the oldest first.
{partitions}
ORDER BY partition.relname;

-- unsorted_partitions -- The tables of a log's partitions that were not sorted, the oldest first. A sorted table has the mark
-- of CLUSTER on an index.
{partitions}
  AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = partition.oid AND i.indisclustered)
ORDER BY partition.relname;

-- sorting_index -- The index of a log's partition by resource and time.
SELECT c.relname
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = to_regclass(%(table)s)
  AND ARRAY(
      SELECT a.attname::text
      FROM unnest(i.indkey) WITH ORDINALITY AS own (number, place)
      JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = own.number
      ORDER BY own.place
  ) = ARRAY['eql_tenant', 'eql_resource', 'eql_written_at', 'eql_id'];

-- try_sort -- Keep other programs from sorting a partition until the transaction ends; false if one does so now.
SELECT pg_try_advisory_xact_lock(hashtextextended(%(table)s, 6074606));

-- clock -- The server's time.
SELECT clock_timestamp();

-- append_to_timeline -- Entries of one timeline, in the order of the arrays.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_data, eql_occurred_at)
SELECT entry.tenant, entry.resource, entry.data::jsonb, entry.occurred_at
FROM unnest(%(tenants)s::text[], %(resources)s::text[], %(data)s::text[], %(occurred_at)s::timestamptz[])
    WITH ORDINALITY AS entry (tenant, resource, data, occurred_at, position)
ORDER BY entry.position;

-- read_timeline -- The entries of one resource, in the order in which they were appended.
SELECT eql_id AS id, eql_resource AS resource, eql_data AS data, eql_occurred_at AS occurred_at
FROM {schema}.{table}
WHERE eql_tenant = %(tenant)s AND eql_resource = %(resource)s AND eql_id > %(after)s
ORDER BY eql_id
LIMIT %(limit)s;

-- read_timeline_back -- The newest entries of one resource, the last appended first.
SELECT eql_id AS id, eql_resource AS resource, eql_data AS data, eql_occurred_at AS occurred_at
FROM {schema}.{table}
WHERE eql_tenant = %(tenant)s AND eql_resource = %(resource)s AND eql_id < %(before)s
ORDER BY eql_id DESC
LIMIT %(limit)s;

-- write_log -- Lines of one log, in the order of the arrays.
INSERT INTO {schema}.{table} (eql_tenant, eql_resource, eql_level, eql_line, eql_attributes, eql_written_at)
SELECT written.tenant, written.resource, written.level, written.line, written.attributes::jsonb, written.written_at
FROM unnest(
    %(tenants)s::text[], %(resources)s::text[], %(levels)s::text[], %(lines)s::text[], %(attributes)s::text[],
    %(written_at)s::timestamptz[]
) WITH ORDINALITY AS written (tenant, resource, level, line, attributes, written_at, position)
ORDER BY written.position;

-- newest_line -- The largest id of a log's lines, 0 without lines, and the log's table.
SELECT coalesce(max(eql_id), 0), %(relation)s::regclass::oid FROM {schema}.{table};

-- consumer_offsets -- The partitions of a consumer: number, offset, where its layout of partitions ends, the filter,
-- whether events after the offset were handed out, the topic's layout, and whether it was repartitioned.
SELECT c.eql_partition, coalesce(c.eql_last_event_id, 0), c.eql_until, c.eql_filter, EXISTS (
    SELECT FROM {schema}.consumer_cursor k
    WHERE k.eql_topic = c.eql_topic AND k.eql_consumer = c.eql_name AND k.eql_partition = c.eql_partition
      AND k.eql_offset = coalesce(c.eql_last_event_id, 0) AND k.eql_claimed_upto > k.eql_offset
), t.eql_layout, EXISTS (SELECT FROM {schema}.topic_layout l WHERE l.eql_topic = t.eql_name)
FROM {schema}.consumer c
JOIN {schema}.topic t ON t.eql_name = c.eql_topic
WHERE c.eql_topic = %(topic)s AND c.eql_name = %(consumer)s
ORDER BY c.eql_partition;

-- last_id -- The last id that a view's sequence gave; 0 if it gave none.
SELECT coalesce(pg_sequence_last_value(%(sequence)s::regclass), 0);

-- go_on_behind -- Let a view's sequence go on above one id and above all ids of its table.
SELECT setval(%(sequence)s::regclass, greatest((SELECT coalesce(max(eql_id), 1) FROM {schema}.{table}), %(after)s::bigint));

-- lost_indexes -- The indexes, constraints and statistics of a view's table that a new table lacks, each by its name.
-- Materialized, it would lock all tables with a constraint, and fail beside a DROP of one of them.
WITH belongings AS NOT MATERIALIZED (
    SELECT i.indrelid AS relation, 'index ' || c.relname AS what, concat_ws(
        ' ', c.relam, i.indisunique, i.indclass::text, i.indcollation::text, i.indoption::text,
        ARRAY(SELECT pg_get_indexdef(c.oid, place, true) FROM generate_series(1, i.indnatts) place ORDER BY place)::text,
        pg_get_expr(i.indpred, i.indrelid)
    ) AS form
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indexrelid
    UNION ALL
    SELECT k.conrelid, 'constraint ' || k.conname, pg_get_constraintdef(k.oid)
    FROM pg_constraint k
    WHERE k.contype = ANY (ARRAY['c', 'f']::"char"[])
    UNION ALL
    SELECT s.stxrelid, 'statistics ' || s.stxname, 'statistics' FROM pg_statistic_ext s
)
SELECT live.what
FROM belongings live
WHERE live.relation = to_regclass(%(live)s)
  AND NOT EXISTS (SELECT FROM belongings made WHERE made.relation = to_regclass(%(made)s) AND made.form = live.form)
ORDER BY live.what;

-- comments -- The comments on a view's table, without a column, and on its columns.
SELECT a.attname, d.description
FROM pg_class c
JOIN pg_description d ON d.objoid = c.oid AND d.classoid = c.tableoid
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.objsubid AND d.objsubid > 0
WHERE c.oid = to_regclass(%(table)s)
ORDER BY d.objsubid;
