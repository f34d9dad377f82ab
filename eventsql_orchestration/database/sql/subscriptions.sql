-- parts of store
-- register -- A new subscription at a place; an old one keeps its place. The row notes what is read, for the lag.
INSERT INTO {schema}.store_subscription (eql_name, eql_transaction, eql_position, eql_types, eql_kinds)
VALUES (%(name)s, %(transaction)s::xid8, %(position)s, %(types)s::text[], %(kinds)s::text[])
ON CONFLICT (eql_name) DO UPDATE SET eql_types = EXCLUDED.eql_types, eql_kinds = EXCLUDED.eql_kinds;

-- lock -- The place of a subscription, its failed attempts, the seconds until the next one, and this transaction. No row if
-- another process has it.
SELECT eql_transaction::text, eql_position, eql_attempts,
       greatest(0, extract(epoch FROM eql_retry_at - clock_timestamp()))::float8, pg_current_xact_id()::text
FROM {schema}.store_subscription
WHERE eql_name = %(name)s
FOR UPDATE SKIP LOCKED;

-- await -- Lock a subscription after the transaction that has it.
SELECT FROM {schema}.store_subscription WHERE eql_name = %(name)s FOR UPDATE;

-- exists -- Whether there is a subscription, locked or not.
SELECT FROM {schema}.store_subscription WHERE eql_name = %(name)s;

-- advance -- A subscription has handled the changes up to a place. Nothing is changed in another transaction than the one that
-- has locked it: by then, another process may have moved it further.
UPDATE {schema}.store_subscription
SET eql_transaction = %(transaction)s::xid8,
    eql_position = %(position)s,
    eql_handled = eql_handled + %(handled)s,
    eql_handled_at = clock_timestamp(),
    eql_attempts = 0,
    eql_failure = NULL,
    eql_retry_at = NULL
WHERE eql_name = %(name)s AND pg_current_xact_id() = %(locked_by)s::xid8;

-- record_failure -- The next change of a subscription failed; it is tried again later.
UPDATE {schema}.store_subscription
SET eql_attempts = %(attempts)s,
    eql_failure = %(failure)s,
    eql_retry_at = clock_timestamp() + make_interval(secs => %(backoff)s)
WHERE eql_name = %(name)s;

-- bury -- A change that a subscription has given up.
INSERT INTO {schema}.store_dead_letter (
    eql_subscription, eql_type, eql_aggregate_id, eql_version, eql_attempts, eql_failure
) VALUES (%(name)s, %(type)s, %(id)s, %(version)s, %(attempts)s, %(failure)s);

-- letters -- The changes that a subscription has given up, in that order.
SELECT eql_id, eql_subscription, eql_type, eql_aggregate_id, eql_version, eql_attempts, eql_failure, eql_created_at
FROM {schema}.store_dead_letter
WHERE eql_subscription = %(name)s
ORDER BY eql_id;

-- lock_letter -- A letter that is still there and that no other process redrives: this transaction.
SELECT pg_current_xact_id()::text FROM {schema}.store_dead_letter WHERE eql_id = %(letter)s FOR UPDATE SKIP LOCKED;

-- delete_letter -- A letter whose change was handled after all, in the transaction that has locked it.
DELETE FROM {schema}.store_dead_letter WHERE eql_id = %(letter)s AND pg_current_xact_id() = %(locked_by)s::xid8;

-- dismiss_letters -- Letters of a subscription by their ids, or all; the redrive of a letter is awaited.
DELETE FROM {schema}.store_dead_letter
WHERE eql_subscription = %(name)s AND (%(ids)s::bigint[] IS NULL OR eql_id = ANY (%(ids)s::bigint[]));

-- fail_letter -- A letter whose change failed again.
UPDATE {schema}.store_dead_letter
SET eql_attempts = eql_attempts + 1, eql_failure = %(failure)s
WHERE eql_id = %(letter)s;

-- unregister -- A subscription goes, with its dead letters.
DELETE FROM {schema}.store_subscription WHERE eql_name = %(name)s;

-- may_read_lag -- Whether this role may read the tables of the lag.
SELECT bool_and(has_table_privilege('{schema}.' || each, 'SELECT'))
FROM unnest(ARRAY['aggregate_change', 'adopted_change', 'store_subscription', 'store_dead_letter', 'store_home']) AS each;

-- part followed -- Whether a subscription reads a change.
(s.eql_types IS NULL OR change.eql_type = ANY (s.eql_types))
AND (s.eql_kinds IS NULL OR change.eql_kind = ANY (s.eql_kinds))

-- lag -- How far each subscription is behind: changes that can be read, counted up to a limit; committed changes beyond the
-- horizon; the age of the oldest change that it has not handled; changes that were given up.
SELECT s.eql_name, s.eql_transaction::text, s.eql_position, s.eql_handled, s.eql_attempts, s.eql_failure,
       CASE WHEN s.eql_retry_at IS NOT NULL
           THEN greatest(0, extract(epoch FROM s.eql_retry_at - clock_timestamp()))::float8 END, s.eql_handled_at,
       (
           SELECT count(*) FROM (
               SELECT FROM {schema}.aggregate_change change
               WHERE (change.eql_transaction, change.eql_position) > (s.eql_transaction, s.eql_position)
                 AND change.eql_transaction < pg_snapshot_xmin(pg_current_snapshot())
                 AND {followed}
               LIMIT %(limit)s
           ) readable
       ) + (
           SELECT count(*) FROM (
               SELECT FROM {adopted}
               WHERE s.eql_transaction = '0'::xid8 AND adopted.eql_position > s.eql_position
                 AND {followed}
               LIMIT %(limit)s
           ) old
       ),
       (
           SELECT count(*) FROM {schema}.aggregate_change change
           WHERE change.eql_transaction >= pg_snapshot_xmin(pg_current_snapshot())
             AND {followed}
       ),
       (
           SELECT extract(epoch FROM clock_timestamp() - oldest.eql_created_at)::float8 FROM (
               (
                   SELECT 0 AS part, change.eql_created_at FROM {adopted}
                   WHERE s.eql_transaction = '0'::xid8 AND adopted.eql_position > s.eql_position
                     AND {followed}
                   ORDER BY adopted.eql_position
                   LIMIT 1
               )
               UNION ALL
               (
                   SELECT 1, change.eql_created_at FROM {schema}.aggregate_change change
                   WHERE (change.eql_transaction, change.eql_position) > (s.eql_transaction, s.eql_position)
                     AND {followed}
                   ORDER BY change.eql_transaction, change.eql_position
                   LIMIT 1
               )
           ) oldest
           ORDER BY oldest.part
           LIMIT 1
       ),
       (SELECT count(*) FROM {schema}.store_dead_letter letter WHERE letter.eql_subscription = s.eql_name)
FROM {schema}.store_subscription s
ORDER BY s.eql_name;

-- oldest_writer -- The transaction at the horizon: its age in seconds, and whether its commit waits for a synchronous
-- standby; its process, application and database; or the name of a prepared transaction. The age is NULL if this role may
-- not see it.
SELECT extract(epoch FROM clock_timestamp() - a.xact_start)::float8, coalesce(a.wait_event = 'SyncRep', false),
       a.pid, a.application_name, a.datname::text, NULL::text
FROM pg_stat_activity a
WHERE a.backend_xid = pg_snapshot_xmin(pg_current_snapshot())::xid AND a.pid <> pg_backend_pid()
UNION ALL
SELECT extract(epoch FROM clock_timestamp() - p.prepared)::float8, false, NULL::integer, ''::text, p.database::text, p.gid
FROM pg_prepared_xacts p
WHERE p.transaction = pg_snapshot_xmin(pg_current_snapshot())::xid
LIMIT 1;

-- move -- A subscription goes on from another place.
UPDATE {schema}.store_subscription
SET eql_transaction = %(transaction)s::xid8, eql_position = %(position)s,
    eql_attempts = 0, eql_failure = NULL, eql_retry_at = NULL
WHERE eql_name = %(name)s;

-- drop_letters_behind -- Letters of changes that a subscription is about to read again.
DELETE FROM {schema}.store_dead_letter letter
USING {placed}
WHERE letter.eql_subscription = %(name)s
  AND change.eql_type = letter.eql_type AND change.eql_aggregate_id = letter.eql_aggregate_id
  AND change.eql_version = letter.eql_version
  AND (coalesce(change.eql_transaction, '0'::xid8), coalesce(adopted.eql_position, change.eql_position))
      > (%(transaction)s::xid8, %(position)s);
