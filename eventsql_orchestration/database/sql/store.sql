-- append -- New changes of an aggregate at the expected version; none if it is at another. Inserting or updating the
-- aggregate's row makes a second writer wait for the first, and then do nothing.
WITH created AS (
    INSERT INTO {schema}.aggregate (eql_type, eql_id, eql_version)
    SELECT %(type)s, %(id)s, %(new_version)s
    WHERE %(expected_version)s = 0
    ON CONFLICT (eql_type, eql_id) DO NOTHING
    RETURNING eql_version
), advanced AS (
    UPDATE {schema}.aggregate
    SET eql_version = %(new_version)s
    WHERE eql_type = %(type)s AND eql_id = %(id)s AND eql_version = %(expected_version)s
    RETURNING eql_version
), appendable AS (
    SELECT eql_version FROM created UNION ALL SELECT eql_version FROM advanced
)
INSERT INTO {schema}.aggregate_change (eql_type, eql_aggregate_id, eql_version, eql_kind, eql_data)
SELECT %(type)s, %(id)s, %(expected_version)s + change.position, change.kind, change.data::jsonb
FROM appendable
CROSS JOIN unnest(%(kinds)s::text[], %(data)s::text[]) WITH ORDINALITY AS change (kind, data, position);

-- load -- The changes of an aggregate between two versions, in their order.
SELECT eql_version AS version, eql_kind AS kind, eql_data AS data, eql_created_at AS created_at
FROM {schema}.aggregate_change
WHERE eql_type = %(type)s AND eql_aggregate_id = %(id)s
  AND eql_version > %(after_version)s
  AND eql_version <= coalesce(%(upto_version)s::bigint, 9223372036854775807)
ORDER BY eql_version;

-- save_snapshot -- The state of an aggregate at a version that it has reached.
INSERT INTO {schema}.aggregate_snapshot (eql_type, eql_aggregate_id, eql_version, eql_data)
SELECT eql_type, eql_id, %(version)s, %(state)s::jsonb
FROM {schema}.aggregate
WHERE eql_type = %(type)s AND eql_id = %(id)s AND eql_version >= %(version)s
ON CONFLICT (eql_type, eql_aggregate_id, eql_version) DO UPDATE SET eql_data = EXCLUDED.eql_data;

-- snapshot -- The newest snapshot of an aggregate up to a version.
SELECT eql_version AS version, eql_data AS state, eql_created_at AS created_at
FROM {schema}.aggregate_snapshot
WHERE eql_type = %(type)s AND eql_aggregate_id = %(id)s
  AND eql_version <= coalesce(%(upto_version)s::bigint, 9223372036854775807)
ORDER BY eql_version DESC
LIMIT 1;

-- count -- How many aggregates of a type there are.
SELECT count(*) FROM {schema}.aggregate WHERE eql_type = %(type)s;
