-- part adopted -- The changes that have no transaction, each with its place.
{schema}.adopted_change adopted
JOIN {schema}.aggregate_change change
    ON change.eql_type = adopted.eql_type AND change.eql_aggregate_id = adopted.eql_aggregate_id
    AND change.eql_version = adopted.eql_version

-- part placed -- All changes, each with its place if it has no transaction.
{schema}.aggregate_change change
LEFT JOIN {schema}.adopted_change adopted
    ON adopted.eql_type = change.eql_type AND adopted.eql_aggregate_id = change.eql_aggregate_id
    AND adopted.eql_version = change.eql_version

-- part chosen -- Whether a change is of the types and kinds that are read; NULL is all.
(%(types)s::text[] IS NULL OR change.eql_type = ANY (%(types)s::text[]))
  AND (%(kinds)s::text[] IS NULL OR change.eql_kind = ANY (%(kinds)s::text[]))

-- part stored_columns -- All columns of a change.
eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data, eql_created_at, eql_transaction, eql_position,
    eql_schema_version, eql_change_id, eql_metadata

-- part placed_changes -- Changes after a place among those that have a transaction.
SELECT eql_version, eql_kind, eql_data, eql_created_at, eql_schema_version, eql_change_id, eql_metadata,
       eql_type, eql_aggregate_id, eql_transaction, eql_position
FROM {schema}.aggregate_change change
WHERE (eql_transaction, eql_position) > (%(transaction)s::xid8, %(position)s::bigint) AND {chosen}

-- append -- New changes of an aggregate: at the version `expected`, or at any (-1), or at any after the first (-2). Writing
-- the aggregate's row makes a second writer wait for the first. A change takes the greater of its own transaction and its
-- predecessor's: a transaction with a lower id may append after one with a higher id. No index is over the ids of the store
-- and of its archive, so they are looked up. The array of schema versions, of ids or of metadata is NULL if every change has
-- the default. The array of ids may have NULLs, which a session with array_nulls off does not know in a text: it is binary.
WITH stored AS (
    SELECT FROM {schema}.aggregate_change WHERE eql_change_id = ANY (%(change_ids)b::uuid[])
), created AS (
    INSERT INTO {schema}.aggregate AS known (eql_type, eql_id, eql_version, eql_transaction)
    SELECT %(type)s::text, %(id)s::text, %(count)s::bigint, pg_current_xact_id()
    WHERE (%(expected)s::bigint = 0 OR %(expected)s::bigint = -1) AND NOT EXISTS (SELECT FROM stored)
    ON CONFLICT (eql_type, eql_id) DO UPDATE
    SET eql_version = known.eql_version + %(count)s::bigint,
        eql_transaction = greatest(known.eql_transaction, pg_current_xact_id())
    WHERE %(expected)s::bigint = -1 AND known.eql_closed_at IS NULL
    RETURNING eql_version, eql_transaction
), advanced AS (
    UPDATE {schema}.aggregate
    SET eql_version = eql_version + %(count)s::bigint,
        eql_transaction = greatest(eql_transaction, pg_current_xact_id())
    WHERE eql_type = %(type)s::text AND eql_id = %(id)s::text AND eql_closed_at IS NULL
      AND (%(expected)s::bigint = -2 OR eql_version = %(expected)s::bigint)
      AND NOT EXISTS (SELECT FROM stored)
    RETURNING eql_version, eql_transaction
), appendable AS (
    SELECT eql_version, eql_transaction FROM created UNION ALL SELECT eql_version, eql_transaction FROM advanced
), inserted AS (
    INSERT INTO {schema}.aggregate_change (
        eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data, eql_transaction, eql_schema_version, eql_change_id,
        eql_metadata
    )
    SELECT %(type)s::text, %(id)s::text, appendable.eql_version - %(count)s::bigint + change.number, change.kind,
           change.data::jsonb, appendable.eql_transaction, coalesce(change.schema_version, 1), change.id,
           coalesce(change.metadata::jsonb, '{{}}')
    FROM appendable
    CROSS JOIN unnest(
        %(kinds)s::text[], %(data)s::text[], %(schema_versions)s::integer[], %(change_ids)b::uuid[], %(metadata)s::text[]
    ) WITH ORDINALITY AS change (kind, data, schema_version, id, metadata, number)
    ORDER BY change.number
)
SELECT eql_version FROM appendable;

-- standing -- The version of an aggregate, whether it is closed, and how many of some changes it has, up to which version.
SELECT known.eql_version, known.eql_closed_at IS NOT NULL,
       count(change.eql_version), max(change.eql_version)
FROM {schema}.aggregate known
LEFT JOIN {schema}.aggregate_change change
    ON change.eql_type = known.eql_type AND change.eql_aggregate_id = known.eql_id
    AND change.eql_change_id = ANY (%(change_ids)s::uuid[])
WHERE known.eql_type = %(type)s AND known.eql_id = %(id)s
GROUP BY known.eql_version, known.eql_closed_at;

-- stored_elsewhere -- An aggregate that has one of some changes.
SELECT eql_type, eql_aggregate_id, eql_version FROM {schema}.aggregate_change
WHERE eql_change_id = ANY (%(change_ids)s::uuid[]) LIMIT 1;

-- close_stream -- Take no more changes of an aggregate.
UPDATE {schema}.aggregate SET eql_closed_at = coalesce(eql_closed_at, now())
WHERE eql_type = %(type)s AND eql_id = %(id)s;

-- hold_stream -- Lock an aggregate: whether it is closed, and whether it is archived.
SELECT eql_closed_at IS NOT NULL, eql_archived_at IS NOT NULL
FROM {schema}.aggregate
WHERE eql_type = %(type)s AND eql_id = %(id)s
FOR UPDATE;

-- closed -- Lock aggregates that were closed before a time and are not archived.
SELECT eql_id FROM {schema}.aggregate
WHERE eql_type = %(type)s AND eql_closed_at < %(before)s AND eql_archived_at IS NULL
ORDER BY eql_closed_at
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED;

-- archive_changes -- Move the changes of aggregates into the archive, with their places.
WITH moved AS (
    DELETE FROM ONLY {schema}.aggregate_change
    WHERE eql_type = %(type)s AND eql_aggregate_id = ANY (%(ids)s::text[])
    RETURNING *
)
INSERT INTO {schema}.archived_change ({stored_columns})
SELECT {stored_columns} FROM moved;

-- unarchive_changes -- Move the changes of aggregates out of the archive.
WITH moved AS (
    DELETE FROM ONLY {schema}.archived_change
    WHERE eql_type = %(type)s AND eql_aggregate_id = ANY (%(ids)s::text[])
    RETURNING *
)
INSERT INTO {schema}.aggregate_change ({stored_columns})
SELECT {stored_columns} FROM moved;

-- id_of_archived_elsewhere -- An aggregate whose change has the id of an archived change.
SELECT other.eql_type, other.eql_aggregate_id
FROM {schema}.archived_change archived
JOIN ONLY {schema}.aggregate_change other ON other.eql_change_id = archived.eql_change_id
WHERE archived.eql_type = %(type)s AND archived.eql_aggregate_id = %(id)s
LIMIT 1;

-- mark_archived -- Note whether aggregates are archived.
UPDATE {schema}.aggregate
SET eql_archived_at = CASE WHEN %(archived)s THEN now() END
WHERE eql_type = %(type)s AND eql_id = ANY (%(ids)s::text[]);

-- load -- The changes of an aggregate between two versions, in their order.
SELECT eql_version, eql_kind, eql_data, eql_created_at, eql_schema_version, eql_change_id, eql_metadata
FROM {schema}.aggregate_change
WHERE eql_type = %(type)s::text AND eql_aggregate_id = %(id)s::text
  AND eql_version > %(after_version)s::bigint AND eql_version <= %(upto_version)s::bigint
ORDER BY eql_version;

-- read_after -- Changes after a place in the global order that no open transaction can still precede. The horizon is that of
-- the statement's own snapshot.
{placed_changes} AND eql_transaction < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY eql_transaction, eql_position
LIMIT %(limit)s::bigint;

-- read_visible -- As `read_after`, with the changes beyond the horizon that are committed.
{placed_changes}
ORDER BY eql_transaction, eql_position
LIMIT %(limit)s::bigint;

-- read_adopted -- Changes after a place among those that have no transaction: they are older than the global order, or come
-- from another server.
SELECT change.eql_version, change.eql_kind, change.eql_data, change.eql_created_at, change.eql_schema_version,
       change.eql_change_id, change.eql_metadata, change.eql_type, change.eql_aggregate_id,
       0::bigint, adopted.eql_position
FROM {adopted}
WHERE adopted.eql_position > %(position)s::bigint AND {chosen}
ORDER BY adopted.eql_position
LIMIT %(limit)s::bigint;

-- newest -- The place of the newest change below the horizon; else the last adopted change's; else before the first.
SELECT place.eql_transaction::text, place.eql_position FROM (
    (SELECT eql_transaction, eql_position FROM {schema}.aggregate_change
     WHERE eql_transaction < pg_snapshot_xmin(pg_current_snapshot())
     ORDER BY eql_transaction DESC, eql_position DESC LIMIT 1)
    UNION ALL
    (SELECT '0'::xid8, eql_position FROM {schema}.adopted_change ORDER BY eql_position DESC LIMIT 1)
) place
ORDER BY place.eql_transaction DESC, place.eql_position DESC
LIMIT 1;

-- place -- The place of one change.
SELECT coalesce(change.eql_transaction, '0'::xid8)::text, coalesce(adopted.eql_position, change.eql_position)
FROM {placed}
WHERE change.eql_type = %(type)s AND change.eql_aggregate_id = %(id)s AND change.eql_version = %(version)s;

-- home -- The server whose transactions order the changes, as far as it is known, and the era of their checkpoints; whether a
-- visible change has a transaction that this server has not had.
SELECT home.eql_server, home.eql_era,
       EXISTS (
           SELECT FROM {schema}.aggregate_change
           WHERE eql_transaction >= pg_snapshot_xmax(pg_current_snapshot())
             AND eql_transaction = pg_current_xact_id_if_assigned() IS NOT TRUE
       )
FROM {schema}.store_home home;

-- in_use -- A row if the store has had a change or a subscription.
SELECT WHERE EXISTS (SELECT FROM {schema}.aggregate) OR EXISTS (SELECT FROM {schema}.store_subscription);

-- server -- The identity of this server.
SELECT system_identifier::text FROM pg_control_system();

-- may_ask_server -- Whether this role may ask for the identity of the server.
SELECT has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE');

-- hold_home -- Let one process at a time adopt the store.
SELECT eql_era FROM {schema}.store_home FOR UPDATE;

-- hold_changes -- Let no writer append, close or archive meanwhile. A transaction that has locked an aggregate goes
-- first.
LOCK TABLE {schema}.aggregate, {schema}.aggregate_change IN EXCLUSIVE MODE;

-- adopt_subscriptions -- The same place of each subscription, counted in changes.
UPDATE {schema}.store_subscription subscription
SET eql_transaction = '0'::xid8,
    eql_position = coalesce((SELECT max(eql_position) FROM {schema}.adopted_change), 0) + (
        SELECT count(*) FROM {schema}.aggregate_change change
        WHERE (change.eql_transaction, change.eql_position) <= (subscription.eql_transaction, subscription.eql_position)
    )
WHERE subscription.eql_transaction > '0'::xid8;

-- drop_rebuilds -- Rebuilds under way begin anew: their places are of another server.
DELETE FROM {schema}.store_rebuild;

-- adopt_changes -- Places of changes that are ordered by transactions of another server, behind those without transaction.
INSERT INTO {schema}.adopted_change (eql_position, eql_type, eql_aggregate_id, eql_version)
SELECT coalesce((SELECT max(eql_position) FROM {schema}.adopted_change), 0)
           + row_number() OVER (ORDER BY eql_transaction, eql_position),
       eql_type, eql_aggregate_id, eql_version
FROM {schema}.aggregate_change
WHERE eql_transaction IS NOT NULL;

-- forget_places -- No change is ordered by a transaction.
UPDATE {schema}.aggregate_change SET eql_transaction = NULL, eql_position = NULL WHERE eql_transaction IS NOT NULL;

-- forget_transactions -- No aggregate was written by a transaction of this server.
UPDATE {schema}.aggregate SET eql_transaction = NULL WHERE eql_transaction IS NOT NULL;

-- settle -- This server orders the changes from now on.
UPDATE {schema}.store_home SET eql_server = %(server)s, eql_era = left(gen_random_uuid()::text, 8);

-- save_snapshot -- The state of an aggregate at a version that it has reached. Its snapshots of earlier schemas are dropped.
WITH reached AS (
    SELECT eql_type, eql_id FROM {schema}.aggregate
    WHERE eql_type = %(type)s AND eql_id = %(id)s AND eql_version >= %(version)s
), dropped AS (
    DELETE FROM {schema}.aggregate_snapshot
    WHERE eql_type = %(type)s AND eql_aggregate_id = %(id)s AND eql_version <> %(version)s
      AND eql_schema_version < %(schema_version)s AND EXISTS (SELECT FROM reached)
)
INSERT INTO {schema}.aggregate_snapshot (eql_type, eql_aggregate_id, eql_version, eql_data, eql_schema_version)
SELECT eql_type, eql_id, %(version)s, %(state)s::jsonb, %(schema_version)s
FROM reached
ON CONFLICT (eql_type, eql_aggregate_id, eql_version) DO UPDATE
SET eql_data = EXCLUDED.eql_data, eql_schema_version = EXCLUDED.eql_schema_version;

-- snapshot -- The newest snapshot of an aggregate up to a version, in one version of its schema or in any. It has no kind.
SELECT eql_version, NULL::text, eql_data, eql_created_at, eql_schema_version
FROM {schema}.aggregate_snapshot
WHERE eql_type = %(type)s::text AND eql_aggregate_id = %(id)s::text AND eql_version <= %(upto_version)s::bigint
  AND (%(schema_version)s::bigint IS NULL OR eql_schema_version = %(schema_version)s::bigint)
ORDER BY eql_version DESC
LIMIT 1;

-- load_from_snapshot -- The newest snapshot of an aggregate in one version of its schema, which has no kind, and the changes
-- after it, in the order of their versions.
WITH newest AS (
    SELECT eql_version, eql_data, eql_created_at, eql_schema_version
    FROM {schema}.aggregate_snapshot
    WHERE eql_type = %(type)s::text AND eql_aggregate_id = %(id)s::text AND eql_version <= %(upto_version)s::bigint
      AND eql_schema_version = %(schema_version)s::bigint
    ORDER BY eql_version DESC
    LIMIT 1
)
SELECT eql_version, NULL::text, eql_data, eql_created_at, eql_schema_version, NULL::uuid, NULL::jsonb
FROM newest
UNION ALL
SELECT eql_version, eql_kind, eql_data, eql_created_at, eql_schema_version, eql_change_id, eql_metadata
FROM {schema}.aggregate_change
WHERE eql_type = %(type)s::text AND eql_aggregate_id = %(id)s::text
  AND eql_version > coalesce((SELECT eql_version FROM newest), 0) AND eql_version <= %(upto_version)s::bigint
ORDER BY eql_version;

-- count -- How many aggregates of a type there are.
SELECT count(*) FROM {schema}.aggregate WHERE eql_type = %(type)s;

-- types -- The types of aggregates, and how many of each there are.
SELECT eql_type, count(*) FROM {schema}.aggregate GROUP BY eql_type ORDER BY eql_type;

-- aggregates -- Aggregates of a type, by id, after an id.
SELECT eql_id, eql_version, eql_created_at, eql_closed_at, eql_archived_at
FROM {schema}.aggregate
WHERE eql_type = %(type)s AND eql_id > %(after)s
ORDER BY eql_id
LIMIT %(limit)s;
