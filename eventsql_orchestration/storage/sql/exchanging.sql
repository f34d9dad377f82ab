-- may_vacuum -- Whether the current role may vacuum a table.
SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(%(table)s);

-- lock_to_vacuum -- Wait for other sessions that vacuum a table, analyze it or build an index.
LOCK TABLE ONLY {schema}.{table} IN SHARE UPDATE EXCLUSIVE MODE;

-- vacuum -- Free the space of rows that were deleted, and mark the pages that are all-visible.
VACUUM {schema}.{table};

-- vacuum_and_analyze -- As `vacuum`; then the statistics of the planner come from the rows as they are now.
VACUUM (ANALYZE) {schema}.{table};

-- options -- The properties of a table that a copy made by LIKE lacks, as actions of ALTER TABLE: its tablespace, its
-- options, and how much ANALYZE looks at its columns.
SELECT 'SET TABLESPACE ' || quote_ident(coalesce(space.spcname, own.spcname))
FROM pg_class old
JOIN pg_class new ON new.oid = %(new)s::regclass
JOIN pg_database base ON base.datname = current_database()
JOIN pg_tablespace own ON own.oid = base.dattablespace
LEFT JOIN pg_tablespace space ON space.oid = old.reltablespace
WHERE old.oid = %(old)s::regclass AND old.reltablespace <> new.reltablespace
UNION ALL
SELECT format('SET (%%s%%I = %%L)', own.prefix, each.option_name, each.option_value)
FROM pg_class old
LEFT JOIN pg_class toast ON toast.oid = old.reltoastrelid
CROSS JOIN LATERAL (VALUES ('', old.reloptions), ('toast.', toast.reloptions)) AS own (prefix, options)
CROSS JOIN LATERAL pg_options_to_table(own.options) each
WHERE old.oid = %(old)s::regclass
UNION ALL
SELECT format('ALTER COLUMN %%I SET STATISTICS %%s', attname, attstattarget)
FROM pg_attribute
WHERE attrelid = %(old)s::regclass AND attnum > 0 AND NOT attisdropped AND attstattarget >= 0;

-- is_published -- Whether a subscriber might get rows of the tables of a schema. Some programs read a slot without a
-- publication.
SELECT EXISTS (SELECT FROM pg_publication_tables WHERE schemaname = %(schema)s)
    OR EXISTS (SELECT FROM pg_replication_slots WHERE slot_type = 'logical' AND database = current_database());

-- seen_by_all -- Whether every transaction sees all rows of a partition, as VACUUM has found; and its bounds.
SELECT relallvisible >= relpages, pg_get_expr(relpartbound, oid)
FROM pg_class WHERE oid = to_regclass('{schema}.{table}') AND relispartition;

-- partition -- The bounds of a partition, and the condition that its rows meet; no row if it is not a partition.
SELECT pg_get_expr(relpartbound, oid), pg_get_partition_constraintdef(oid)
FROM pg_class WHERE oid = to_regclass('{schema}.{table}') AND relispartition;

-- counted_by_index -- The number of rows. The server reads it from an index alone if every transaction sees the rows of a
-- page. The plan tells how many rows it had to look up otherwise.
EXPLAIN (ANALYZE, TIMING OFF, COSTS OFF, FORMAT JSON) SELECT count(*) FROM {schema}.{table};

-- is_awaited -- Whether a transaction waits for a lock on a table.
SELECT EXISTS (
    SELECT FROM pg_locks l
    WHERE l.locktype = 'relation' AND l.relation = to_regclass('{schema}.{table}') AND NOT l.granted
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
);
