-- parts of forms

-- is_segmented -- Whether a topic's log is made of segments.
SELECT bool_and(relkind = 'p') FROM pg_class WHERE oid = ANY ({stores});

-- segments -- The segments of a log by their ids: table, first id, first id after it, bytes, whether it is being detached,
-- the log's table that it belongs to. A segment that is dropped meanwhile has no bounds any more.
SELECT segment.relname,
       coalesce(substring(bounds.text FROM 'FROM [(]''([0-9]+)''[)]')::bigint, 0),
       substring(bounds.text FROM 'TO [(]''([0-9]+)''[)]')::bigint,
       pg_total_relation_size(segment.oid),
       inherits.inhdetachpending, parent.relname
FROM pg_inherits inherits
JOIN pg_class segment ON segment.oid = inherits.inhrelid
JOIN pg_class parent ON parent.oid = inherits.inhparent
CROSS JOIN LATERAL (SELECT pg_get_expr(segment.relpartbound, segment.oid) AS text) bounds
WHERE inherits.inhparent = ANY ({stores}) AND bounds.text IS NOT NULL
ORDER BY 3;

-- newest_id -- The newest id that was given out in a log.
SELECT pg_sequence_last_value({ids});

-- skip_to -- Let the ids of a log go on after this one.
SELECT setval({ids}, %(newest)s);

-- sequence -- Schema and name of the sequence that a log's ids come from.
SELECT namespace.nspname, sequence.relname
FROM pg_class sequence
JOIN pg_namespace namespace ON namespace.oid = sequence.relnamespace
WHERE sequence.oid = {ids};

-- detached -- The tables that retention has detached to drop them, with names that begin with a text, and its note on each.
SELECT segment.relname, col_description(segment.oid, id.attnum)
FROM pg_class segment
JOIN pg_attribute id ON id.attrelid = segment.oid AND id.attname = 'eql_id'
WHERE segment.relnamespace = '{schema}'::regnamespace
  AND starts_with(segment.relname, %(names)s)
  AND segment.relkind = 'r'
  AND NOT segment.relispartition
  AND obj_description(segment.oid, 'pg_class') = %(mark)s;

-- begun -- The tables that retention has begun to drop.
SELECT segment.relname
FROM pg_description mark
JOIN pg_class segment ON segment.oid = mark.objoid
WHERE mark.classoid = 'pg_catalog.pg_class'::regclass AND mark.objsubid = 0 AND mark.description = %(mark)s
  AND segment.relnamespace = '{schema}'::regnamespace
  AND segment.relkind = 'r'
ORDER BY segment.relname;

-- estimate -- How many events a segment holds by the planner's statistics, -1 where there are none yet.
SELECT reltuples::bigint FROM pg_class WHERE oid = %(table)s::regclass;

-- first -- The first offset of a segment, and the seconds since it entered the log.
SELECT eql_id, extract(epoch FROM clock_timestamp() - eql_created_at)::float8
FROM {schema}.{table} ORDER BY eql_id LIMIT 1;

-- last -- The newest offset of a segment, and the seconds since it entered the log.
SELECT eql_id, extract(epoch FROM clock_timestamp() - eql_created_at)::float8
FROM {schema}.{table} ORDER BY eql_id DESC LIMIT 1;

-- size -- How many events a segment holds.
SELECT count(*) FROM {schema}.{table};

-- unpassed -- A consumer partition that has events of a segment to consume yet.
SELECT c.eql_name, c.eql_partition
FROM {schema}.consumer c
WHERE c.eql_topic = %(topic)s
  AND coalesce(c.eql_last_event_id, 0) < %(newest)s
  AND CASE WHEN c.eql_partition = -1
      THEN EXISTS (SELECT FROM {schema}.{table} e WHERE e.eql_id > coalesce(c.eql_last_event_id, 0))
      ELSE EXISTS (
          SELECT FROM {schema}.{table} e
          WHERE e.eql_partition = c.eql_partition AND e.eql_id > coalesce(c.eql_last_event_id, 0)
      )
  END
ORDER BY c.eql_name, c.eql_partition
LIMIT 1;

-- try_retain -- Keep other programs from retaining a topic until the transaction ends; false if one does so now.
SELECT pg_try_advisory_xact_lock(hashtextextended(%(topic)s, 6074602));

-- makes_segments -- Whether the current role makes a log's segments itself: it owns the log, or is a member of an owner
-- that does not own `ensure_segments`. A segment that a member of the owner makes would belong to the member.
SELECT pg_get_userbyid(log.relowner) = current_user
       OR (pg_has_role(log.relowner, 'USAGE') AND log.relowner <> function.proowner)
FROM pg_class log
JOIN pg_proc function ON function.oid = '{schema}.ensure_segments(pg_catalog.text, bigint, integer)'::regprocedure
WHERE log.oid = ANY ({stores})
LIMIT 1;

-- make_segments -- Make the segments that a log lacks after its newest id, as its owner.
SELECT {schema}.make_segments(%(topic)s, %(events)s, %(ahead)s);

-- ensure_segments -- As `make_segments`, as their owner, for another role that holds the topic.
SELECT {schema}.ensure_segments(%(topic)s, %(events)s, %(ahead)s);

-- owner -- The owner of a table.
SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = %(table)s::regclass;

-- dependents -- Objects that depend on a table and would stay with it when another takes its place, by kind and name.
-- The package's own views and triggers do not count.
SELECT 'view ' || rewrite.ev_class::regclass
FROM pg_depend depend JOIN pg_rewrite rewrite ON rewrite.oid = depend.objid
WHERE depend.classid = 'pg_catalog.pg_rewrite'::regclass AND depend.refobjid = %(table)s::regclass
  AND rewrite.ev_class <> ALL (ARRAY(
      SELECT to_regclass(own.name)::oid FROM unnest(%(own)s::text[]) AS own (name) WHERE to_regclass(own.name) IS NOT NULL
  ))
UNION
SELECT 'function ' || depend.objid::regprocedure
FROM pg_depend depend
WHERE depend.classid = 'pg_catalog.pg_proc'::regclass AND depend.refobjid = %(table)s::regclass AND depend.deptype = 'n'
UNION
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = %(table)s::regclass AND NOT tgisinternal
  AND tgname <> ALL (ARRAY['eql_place_in_layout', 'eql_refuse_rows'])
UNION
SELECT 'policy ' || polname FROM pg_policy WHERE polrelid = %(table)s::regclass
UNION
SELECT 'row security' FROM pg_class WHERE oid = %(table)s::regclass AND (relrowsecurity OR relforcerowsecurity)
UNION
SELECT 'publication ' || pubname
FROM pg_publication_rel published JOIN pg_publication publication ON publication.oid = published.prpubid
WHERE published.prrelid = %(table)s::regclass
UNION
SELECT 'foreign key ' || conname FROM pg_constraint
WHERE contype = 'f' AND %(table)s::regclass = ANY (ARRAY[conrelid, confrelid])
UNION
SELECT 'child table ' || child.oid::regclass
FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = %(table)s::regclass AND NOT child.relispartition
ORDER BY 1;

-- has_columns -- Whether a table has these columns.
SELECT %(columns)s::text[] <@ ARRAY(
    SELECT a.attname::text FROM pg_attribute a
    WHERE a.attrelid = %(log)s::regclass AND a.attnum > 0 AND NOT a.attisdropped
);

-- has_index -- Whether a table has an index of all its rows by these columns.
SELECT EXISTS (
    SELECT FROM pg_index i
    WHERE i.indrelid = %(log)s::regclass AND i.indpred IS NULL AND %(columns)s::text[] = ARRAY(
        SELECT a.attname::text
        FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS part (number, place)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = part.number
        ORDER BY part.place
    )
);

-- orphans -- The logs, and the detached segments of logs, that no topic has, with names that begin with a text; and
-- whether each is a view. Views come before the tables that they read.
SELECT c.relname, c.relkind = 'v'
FROM pg_class c
WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = ANY (ARRAY['r', 'p', 'v']) AND NOT c.relispartition
  AND starts_with(c.relname, %(prefix)s) AND c.relname ~ '_(event|block|rows|array|segment_[0-9]+)$'
  AND NOT EXISTS (
      SELECT FROM {schema}.topic t WHERE c.relname = ANY (ARRAY[
          lower(t.eql_name COLLATE "C") || '_event', lower(t.eql_name COLLATE "C") || '_block',
          lower(t.eql_name COLLATE "C") || '_rows', lower(t.eql_name COLLATE "C") || '_array'
      ])
  )
ORDER BY c.relkind DESC;
