-- parts of store
-- ended -- Whether every transaction up to the given one has ended, so that no change can appear up to there.
SELECT %(transaction)s::xid8 < pg_snapshot_xmin(pg_current_snapshot());

-- era -- The era of the places of changes, and whether the server has all changes up to the given transaction: a standby
-- may be behind.
SELECT eql_era, (%(upto_transaction)s::xid8 < pg_snapshot_xmin(pg_current_snapshot())) AS complete
FROM {schema}.store_home;

-- count_changes -- How many changes a range of the global order has.
SELECT count(*) FROM {schema}.aggregate_change change
WHERE (eql_transaction, eql_position) > (%(after_transaction)s::xid8, %(after_position)s::bigint)
  AND (eql_transaction, eql_position) <= (%(upto_transaction)s::xid8, %(upto_position)s::bigint)
  AND {chosen};

-- count_adopted -- As `count_changes`, among changes that have no transaction.
SELECT count(*) FROM {adopted}
WHERE adopted.eql_position > %(after_position)s::bigint AND adopted.eql_position <= %(upto_position)s::bigint
  AND {chosen};

-- every_place -- Each n-th place in a range of the global order, whatever the type and kind of the changes: an index has them.
SELECT place.eql_transaction::text, place.eql_position FROM (
    SELECT eql_transaction, eql_position, row_number() OVER (ORDER BY eql_transaction, eql_position) AS number
    FROM {schema}.aggregate_change
    WHERE (eql_transaction, eql_position) > (%(after_transaction)s::xid8, %(after_position)s::bigint)
      AND (eql_transaction, eql_position) <= (%(upto_transaction)s::xid8, %(upto_position)s::bigint)
) place
WHERE mod(place.number, %(step)s::bigint) = 0
ORDER BY place.eql_transaction, place.eql_position;

-- every_adopted_place -- As `every_place`, among changes that have no transaction.
SELECT '0', place.eql_position FROM (
    SELECT eql_position, row_number() OVER (ORDER BY eql_position) AS number
    FROM {schema}.adopted_change
    WHERE eql_position > %(after_position)s::bigint AND eql_position <= %(upto_position)s::bigint
) place
WHERE mod(place.number, %(step)s::bigint) = 0
ORDER BY place.eql_position;

-- changes -- The changes of a range of the global order, in that order, with the columns that Spark has.
SELECT eql_type AS aggregate_type, eql_aggregate_id AS aggregate_id, eql_version AS version, eql_kind AS kind,
       eql_data::text AS data, eql_created_at AS created_at, eql_schema_version AS schema_version,
       eql_change_id::text AS id, eql_metadata::text AS metadata,
       eql_transaction::text::bigint AS transaction, eql_position AS position
FROM {schema}.aggregate_change change
WHERE (eql_transaction, eql_position) > (%(after_transaction)s::xid8, %(after_position)s::bigint)
  AND (eql_transaction, eql_position) <= (%(upto_transaction)s::xid8, %(upto_position)s::bigint)
  AND {chosen}
ORDER BY eql_transaction, eql_position;

-- adopted_changes -- As `changes`, among changes that have no transaction.
SELECT change.eql_type AS aggregate_type, change.eql_aggregate_id AS aggregate_id, change.eql_version AS version,
       change.eql_kind AS kind, change.eql_data::text AS data, change.eql_created_at AS created_at,
       change.eql_schema_version AS schema_version, change.eql_change_id::text AS id,
       change.eql_metadata::text AS metadata, 0::bigint AS transaction, adopted.eql_position AS position
FROM {adopted}
WHERE adopted.eql_position > %(after_position)s::bigint AND adopted.eql_position <= %(upto_position)s::bigint
  AND {chosen}
ORDER BY adopted.eql_position;
