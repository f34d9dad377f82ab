-- open -- The answering server process, the database's encoding, and whether transactions begin as READ COMMITTED and
-- arrays have NULLs. If the process is the connection's own and not a pooler's, this makes the settings that results
-- depend on. The server also ends the session within half a minute if the client's machine is gone: its transaction may
-- have locked a topic or a consumer.
SELECT pg_backend_pid(), current_setting('server_encoding'),
       current_setting('default_transaction_isolation') = 'read committed', current_setting('array_nulls') = 'on',
       CASE WHEN pg_backend_pid() = %(pid)s THEN ARRAY[
           set_config('DateStyle', 'ISO', false),
           set_config('IntervalStyle', 'postgres', false),
           set_config('extra_float_digits', '1', false),
           set_config('array_nulls', 'on', false),
           set_config('row_security', 'on', false),
           set_config('quote_all_identifiers', 'off', false),
           set_config('default_transaction_isolation', 'read committed', false),
           set_config('tcp_keepalives_idle', least(current_setting('tcp_keepalives_idle')::int, 15)::text, false),
           set_config(
               'tcp_keepalives_interval', least(current_setting('tcp_keepalives_interval')::int, 5)::text, false
           ),
           set_config('tcp_keepalives_count', least(current_setting('tcp_keepalives_count')::int, 3)::text, false)
       ] END;

-- timeline -- The identity of a primary and its physical copies, the number of its timeline, and the server's start in
-- seconds since 1970; no row for a standby.
SELECT system_identifier::text, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int,
       extract(epoch FROM pg_postmaster_start_time())::float8
FROM pg_control_system()
WHERE NOT pg_is_in_recovery();

-- set_style -- Set the format of times for the transaction, or for the session.
SELECT set_config('DateStyle', %(style)s, %(local)s);

-- plain -- Let this transaction find only the system's own names, and set the settings that change its results.
SELECT set_config('search_path', 'pg_catalog, pg_temp', true),
       set_config('DateStyle', 'ISO', true),
       set_config('extra_float_digits', '1', true);

-- let_last -- Let this transaction and its statements last as long as they take. PostgreSQL before 17 does not have all of
-- the limits.
SELECT set_config(name, '0', true) FROM pg_settings
WHERE name = ANY (ARRAY['statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout']);

-- give_way -- Let this transaction wait for each lock for 10 seconds at most, unless the session has a shorter limit.
SELECT set_config('lock_timeout', '10s', true) FROM pg_settings
WHERE name = 'lock_timeout' AND (setting::int = 0 OR setting::int > 10000);

-- collation -- The database, the version of the collation that its indexes on text were sorted by, and the server's present
-- version, NULL if it has none. No row if both are the same. From PostgreSQL 15 on.
SELECT datname::text, datcollversion, pg_database_collation_actual_version(oid)
FROM pg_database
WHERE datname = current_database() AND datcollversion <> coalesce(pg_database_collation_actual_version(oid), '');

-- has_schema -- Whether there is a schema of this name.
SELECT to_regnamespace(%(schema)s) IS NOT NULL;

-- has_table -- Whether there is a table of this name.
SELECT to_regclass(%(table)s) IS NOT NULL;

-- unlogged_tables -- The tables of a schema that a crash of the server empties. PostgreSQL makes a table logged only after
-- those that it references.
SELECT format('%%I.%%I', n.nspname, c.relname)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relkind = 'r' AND c.relpersistence = 'u'
ORDER BY EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'f'), c.relname;

-- row_security -- The tables of a schema whose row security may hide rows from the platform, and whether only the owner is
-- to be freed of it: the given tables may have policies for other roles. A view's table may have row security.
SELECT format('%%I.%%I', n.nspname, c.relname), own.policies
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT c.relname = ANY (%(tables)s) AND EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid) AS policies
) own
WHERE n.nspname = %(schema)s AND c.relkind::text = ANY (ARRAY['r', 'p']) AND c.relname !~ '^view_'
  AND c.relrowsecurity AND (c.relforcerowsecurity OR NOT own.policies)
ORDER BY c.relname;

-- revision -- The revision of a schema.
SELECT version_num FROM {schema}.schema_version;

-- role -- The current role, the owner of the buffer if the installation has roles, whether the current role may take
-- events out of the buffer, and the kinds of the installation's roles for all topics whose rights it has.
SELECT current_user, buffer.owner, has_table_privilege(buffer.oid, 'DELETE'), ARRAY(
    SELECT each.kind
    FROM unnest(%(kinds)s::text[]) AS each (kind)
    JOIN pg_roles r ON r.rolname = regexp_replace(buffer.owner::text, %(admin)s, '_' || each.kind)
    WHERE pg_has_role(r.oid, 'USAGE')
)
FROM (SELECT) one LEFT JOIN (
    SELECT c.oid, (
        SELECT pg_get_userbyid(c.relowner) FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = %(trigger)s
    ) AS owner
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relname = 'event_buffer'
) buffer ON true;

-- waiting_commits -- The commits in this database that have waited for a synchronous standby for longer than some seconds:
-- their number, the longest wait in seconds, and the standbys that the server waits for. The server does not keep when a
-- wait began, so each counts from the start of its statement: usually COMMIT.
SELECT count(*), max(extract(epoch FROM clock_timestamp() - query_start))::float8,
       current_setting('synchronous_standby_names')
FROM pg_stat_activity
WHERE datname = current_database() AND wait_event = 'SyncRep'
  AND query_start < (clock_timestamp() - make_interval(secs => %(longer_than)s));

-- open_transactions -- The transactions in this database that have been open for longer than some seconds and wait for no
-- other, the oldest first: the seconds, the role, the process with its application and state, or the name of a prepared
-- transaction, and how many sessions wait for it. The server shows a role the transactions of roles that it is a member
-- of. A transaction whose commit waits for a standby is none of them.
SELECT extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds, a.usename::text, a.pid,
       a.application_name, a.state, NULL::text,
       (SELECT count(*) FROM pg_stat_activity w WHERE a.pid = ANY (pg_blocking_pids(w.pid)))
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
  AND a.xact_start < (clock_timestamp() - make_interval(secs => %(longer_than)s))
  AND cardinality(pg_blocking_pids(a.pid)) = 0 AND (a.wait_event = 'SyncRep') IS NOT TRUE
UNION ALL
SELECT extract(epoch FROM clock_timestamp() - p.prepared)::float8, p.owner::text, NULL, NULL, NULL, p.gid, 0
FROM pg_prepared_xacts p
WHERE p.database = current_database()
  AND p.prepared < (clock_timestamp() - make_interval(secs => %(longer_than)s))
ORDER BY seconds DESC;
