-- settings -- The sequences of the column eql_id of tables: names, table, settings, and last value (NULL if the role
-- may not read it).
SELECT namespace.nspname, sequence.relname, owner.relname, settings.seqcache, settings.seqincrement, settings.seqcycle,
       settings.seqmax,
       CASE WHEN has_sequence_privilege(sequence.oid, 'SELECT, USAGE')
            THEN coalesce(pg_sequence_last_value(sequence.oid), 0) END
FROM pg_class owner
JOIN pg_attribute id ON id.attrelid = owner.oid AND id.attname = 'eql_id'
JOIN pg_depend depend ON depend.refobjid = owner.oid AND depend.refobjsubid = id.attnum
    AND depend.refclassid = 'pg_catalog.pg_class'::regclass AND depend.classid = 'pg_catalog.pg_class'::regclass
    AND depend.deptype = ANY (ARRAY['a', 'i'])
JOIN pg_class sequence ON sequence.oid = depend.objid AND sequence.relkind = 'S'
JOIN pg_namespace namespace ON namespace.oid = sequence.relnamespace
JOIN pg_sequence settings ON settings.seqrelid = sequence.oid
WHERE owner.relnamespace = '{schema}'::regnamespace
  AND owner.relname = ANY (%(tables)s)
ORDER BY owner.relname;

-- readable -- Whether the current role may read the ids of a table.
SELECT has_column_privilege(to_regclass(%(table)s)::oid, 'eql_id', 'SELECT');

-- highest -- The largest id in a table.
SELECT max(eql_id) FROM {schema}.{table};

-- later_id -- A row if the table that new events enter has an id after this id, or if it lacks this id, and an offset
-- is after it: the events that had later ids were deleted.
SELECT true
WHERE EXISTS (SELECT FROM {schema}.{written_table} WHERE eql_id > %(last)s)
   OR NOT EXISTS (SELECT FROM {schema}.{written_table} WHERE eql_id = %(last)s) AND EXISTS (
          SELECT FROM {schema}.consumer
          WHERE eql_topic = %(topic)s AND eql_last_event_id > %(last)s AND eql_last_event_id < 4611686018427387904
      );

-- log_state -- Whether a log's times have time zones; its sequence and its last id; and the largest known id of an
-- event, offset or layout. Absurdly large offsets do not count.
SELECT (
           SELECT pg_typeof(eql_buffered_at) = 'pg_catalog.timestamptz'::regtype
                  AND pg_typeof(eql_created_at) = 'pg_catalog.timestamptz'::regtype
           FROM (SELECT) nothing LEFT JOIN {schema}.{written_table} ON false
       ),
       sequence.oid::bigint, coalesce(pg_sequence_last_value(sequence.oid), 0),
       greatest(
           (SELECT max(eql_id) FROM {schema}.{log_table}),
           (SELECT max(eql_last_event_id) FROM {schema}.consumer
            WHERE eql_topic = %(topic)s AND eql_last_event_id < 4611686018427387904),
           (SELECT max(eql_after) FROM {schema}.topic_layout WHERE eql_topic = %(topic)s),
           0
       )
FROM (SELECT pg_get_serial_sequence(%(log)s, 'eql_id')::regclass) AS sequence (oid);

-- advance -- Let a sequence go on after this value.
SELECT setval(%(sequence)s::oid::regclass, %(value)s);

-- advance_buffer -- Let the buffer's sequence go on after this value.
SELECT setval(tableoid::regclass, %(value)s) FROM {schema}.event_buffer_eql_id_seq;

-- buffer_highest -- The largest id in the buffer, where it is larger than any that its sequence has given out.
SELECT max(eql_id)
FROM {schema}.event_buffer
HAVING max(eql_id) > (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.event_buffer_eql_id_seq);
