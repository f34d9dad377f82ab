-- parts of store
-- path -- The session's search_path.
SELECT current_setting('search_path');

-- set_path -- Set the transaction's search_path.
SELECT set_config('search_path', %(path)s, true);

-- leave -- Set the transaction's search_path. Gives whether one of some tables took the place of another table after the
-- snapshot of this transaction: in an isolated transaction, no statement sees the rows of the new table.
SELECT set_config('search_path', %(path)s, true), EXISTS (
    SELECT FROM unnest(%(tables)s::text[]) AS own (name)
    WHERE current_setting('transaction_isolation') <> 'read committed'
      AND NOT EXISTS (
          SELECT FROM pg_class c
          WHERE c.oid = to_regclass(own.name) AND c.relnamespace = to_regnamespace(%(in_schema)s)
      )
);

-- hold_install -- Let one process at a time make tables of projections in a schema.
SELECT pg_advisory_xact_lock(hashtextextended(%(in_schema)s, 6074603));

-- forget_elsewhere -- Forget a rebuild in another schema: of an earlier version, whose installations shared one.
DELETE FROM {schema}.store_rebuild WHERE eql_projection = %(name)s AND eql_shadow <> %(shadow)s;

-- begin -- A rebuild of a projection, from the first change on.
INSERT INTO {schema}.store_rebuild (eql_projection, eql_shadow, eql_transaction, eql_position)
VALUES (%(name)s, %(shadow)s, '0'::xid8, 0)
ON CONFLICT (eql_projection) DO NOTHING;

-- lock -- The place of a rebuild, and how many changes it has applied; no row if another process is at it.
SELECT eql_transaction::text, eql_position, eql_applied
FROM {schema}.store_rebuild
WHERE eql_projection = %(name)s
FOR UPDATE SKIP LOCKED;

-- exists -- Whether a rebuild is under way.
SELECT FROM {schema}.store_rebuild WHERE eql_projection = %(name)s;

-- advance -- A rebuild has applied the changes up to a place.
UPDATE {schema}.store_rebuild
SET eql_transaction = %(transaction)s::xid8, eql_position = %(position)s, eql_applied = eql_applied + %(applied)s
WHERE eql_projection = %(name)s;

-- ledgers -- The ledgers of fills in a schema.
SELECT c.relname::text
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(in_schema)s AND starts_with(c.relname, %(ledger)s) AND c.relkind = 'r';

-- count_upto -- How many changes there are up to a place, without or with a transaction.
SELECT count(*) FROM {schema}.aggregate_change change
WHERE (eql_transaction IS NULL OR (eql_transaction, eql_position) <= (%(transaction)s::xid8, %(position)s::bigint))
  AND {chosen};

-- finish -- A rebuild has been swapped in, or was given up.
DELETE FROM {schema}.store_rebuild WHERE eql_projection = %(name)s;

-- progress -- The rebuilds under way.
SELECT eql_projection, eql_applied, eql_started_at FROM {schema}.store_rebuild ORDER BY eql_projection;

-- tables -- Which of some tables a schema has.
SELECT c.relname::text
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(in_schema)s AND c.relname = ANY (%(tables)s::text[]) AND (c.relkind = 'r' OR c.relkind = 'p');

-- sample -- All aggregates of some random ids, without aggregates whose changes a subscription has given up.
SELECT eql_type, eql_id FROM {schema}.aggregate
WHERE (%(types)s::text[] IS NULL OR eql_type = ANY (%(types)s::text[]))
  AND eql_id = ANY (ARRAY(
      SELECT known.eql_id FROM {schema}.aggregate known
      WHERE (%(types)s::text[] IS NULL OR known.eql_type = ANY (%(types)s::text[]))
        AND NOT EXISTS (
            SELECT FROM {schema}.store_dead_letter letter
            WHERE letter.eql_subscription = %(subscription)s::text AND letter.eql_aggregate_id = known.eql_id
        )
      ORDER BY random()
      LIMIT %(sample)s::bigint
  ))
ORDER BY eql_type, eql_id;

-- subscription_place -- The place of a subscription.
SELECT eql_transaction::text, eql_position FROM {schema}.store_subscription WHERE eql_name = %(subscription)s::text;

-- version_at -- The version that an aggregate had at a place in the global order; 0 before its first change.
SELECT coalesce(max(change.eql_version), 0)
FROM {placed}
WHERE change.eql_type = %(type)s AND change.eql_aggregate_id = %(id)s
  AND (coalesce(change.eql_transaction, '0'::xid8), coalesce(adopted.eql_position, change.eql_position))
      <= (%(transaction)s::xid8, %(position)s::bigint);

-- plain_columns -- The columns of a table that get no value of their own.
SELECT a.attname::text
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(in_schema)s AND c.relname = %(table)s
  AND a.attnum > 0 AND NOT a.attisdropped AND NOT a.atthasdef AND a.attidentity = ''
ORDER BY a.attnum;
