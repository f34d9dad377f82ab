-- grants -- The rights of roles that do not own a relation, on it and on its columns that another relation has, too:
-- role (NULL for PUBLIC), privilege with its column, whether with the right to grant it.
SELECT CASE WHEN granted.grantee = '0'::oid THEN NULL ELSE pg_get_userbyid(granted.grantee)::text END,
       granted.privilege_type || held.of_column, granted.is_grantable
FROM pg_class c
CROSS JOIN LATERAL (
    SELECT c.relacl AS acl, '' AS of_column
    UNION ALL
    SELECT a.attacl, format(' (%%I)', a.attname)
    FROM pg_attribute a
    WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL AND NOT a.attisdropped AND EXISTS (
        SELECT FROM pg_attribute other
        WHERE other.attrelid = %(other)s::regclass AND other.attname = a.attname AND NOT other.attisdropped
    )
) held
CROSS JOIN aclexplode(held.acl) granted
WHERE c.oid = %(relation)s::regclass AND granted.grantee <> c.relowner;

-- lost -- The row security, policies, triggers, rules and publications of a table that its replacement lacks, each by its
-- name.
WITH belongings AS (
    SELECT c.oid AS relation, 'row security' AS what FROM pg_class c WHERE c.relrowsecurity OR c.relforcerowsecurity
    UNION ALL SELECT p.polrelid, 'policy ' || p.polname FROM pg_policy p
    UNION ALL SELECT t.tgrelid, 'trigger ' || t.tgname FROM pg_trigger t WHERE NOT t.tgisinternal
    UNION ALL SELECT r.ev_class, 'rule ' || r.rulename FROM pg_rewrite r
    UNION ALL
    SELECT m.prrelid, 'publication ' || p.pubname FROM pg_publication_rel m JOIN pg_publication p ON p.oid = m.prpubid
)
SELECT live.what
FROM belongings live
WHERE live.relation = to_regclass(%(live)s)
  AND NOT EXISTS (SELECT FROM belongings made WHERE made.relation = to_regclass(%(made)s) AND made.what = live.what)
ORDER BY live.what;
