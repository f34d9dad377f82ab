-- ownership -- The owner of the platform's tables, whether there are roles, and whether the current role is another and
-- may become it.
SELECT pg_get_userbyid(c.relowner),
       EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = %(trigger)s),
       pg_get_userbyid(c.relowner) <> current_user AND pg_has_role(c.relowner, 'MEMBER')
FROM pg_class c
WHERE c.oid = to_regclass(%(buffer)s);

-- roles -- The roles of this installation: name, kind, topic, whether the server has the role, and which roles are members
-- of each. PostgreSQL 16 and newer have a row for each grantor of a membership.
SELECT a.eql_role, a.eql_kind, a.eql_topic, EXISTS (SELECT FROM pg_roles r WHERE r.rolname = a.eql_role),
       ARRAY(
           SELECT DISTINCT pg_get_userbyid(m.member)
           FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
           WHERE r.rolname = a.eql_role
           ORDER BY 1
       )
FROM {schema}.access_role a
ORDER BY array_position(%(kinds)s::text[], a.eql_kind), a.eql_topic NULLS FIRST;

-- logs -- The tables and the view of blocks of each topic's log: topic, schema, name, the sequence of the ids, the view of
-- the events (NULL for a log in rows), whether it holds blocks.
SELECT t.eql_name, n.nspname, held.name,
       coalesce(CASE WHEN log.relkind <> 'v' THEN pg_get_serial_sequence(held.own, 'eql_id') END, (
           SELECT pg_get_serial_sequence(format('%%I.%%I', n.nspname, own.relname), 'eql_id')
           FROM pg_class own
           WHERE own.relnamespace = n.oid AND own.relkind = ANY (ARRAY['r', 'p']) AND own.relname = ANY (ARRAY[
               format(%(blocks)s, folded.name), format(%(rows_of_both)s, folded.name), format(%(blocks_of_both)s, folded.name)
           ]) AND pg_get_serial_sequence(format('%%I.%%I', n.nspname, own.relname), 'eql_id') IS NOT NULL
           LIMIT 1
       )),
       CASE WHEN log.relkind = 'v' THEN log.relname END, held.blocks
FROM {schema}.topic t
CROSS JOIN LATERAL (SELECT lower(t.eql_name COLLATE "C")) AS folded (name)
JOIN pg_namespace n ON n.nspname = %(schema)s
JOIN pg_class log ON log.relnamespace = n.oid AND log.relname = format(%(log)s, folded.name)
LEFT JOIN pg_class block ON block.relnamespace = n.oid AND block.relname = format(%(blocks)s, folded.name)
CROSS JOIN LATERAL (
    SELECT named.name, format('%%I.%%I', n.nspname, named.name) AS own, named.blocks
    FROM (
        SELECT log.relname, false WHERE log.relkind <> 'v'
        UNION ALL SELECT block.relname, true WHERE log.relkind = 'v'
        UNION ALL SELECT format(%(rows_of_both)s, folded.name), false WHERE log.relkind = 'v' AND block.relkind = 'v'
        UNION ALL SELECT format(%(blocks_of_both)s, folded.name), true WHERE log.relkind = 'v' AND block.relkind = 'v'
    ) AS named (name, blocks)
) held
WHERE %(topics)s::text[] IS NULL OR t.eql_name = ANY (%(topics)s)
ORDER BY t.eql_name, held.name;

-- tables -- The platform's tables, with the logs and views, and the partitions of all: schema, name, owner, whether that
-- is a superuser. A log in rows that was once in both forms has a view of its blocks.
SELECT n.nspname, c.relname, o.rolname, o.rolsuper
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
JOIN pg_roles o ON o.oid = c.relowner
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class parent ON parent.oid = i.inhparent AND parent.relnamespace = n.oid
WHERE c.relkind = ANY (ARRAY['r', 'p', 'v'])
  AND (
      coalesce(parent.relname, c.relname) = ANY (%(tables)s)
      OR coalesce(parent.relname, c.relname) = ANY (
          SELECT format(pattern, lower(t.eql_name COLLATE "C"))
          FROM {schema}.topic t
          CROSS JOIN unnest(ARRAY[%(log)s, %(blocks)s, %(rows_of_both)s, %(blocks_of_both)s]) AS pattern
          WHERE pattern = %(log)s OR EXISTS (
              SELECT FROM pg_class log
              WHERE log.relnamespace = n.oid AND log.relkind = 'v'
                AND log.relname = format(%(log)s, lower(t.eql_name COLLATE "C"))
          )
          OR pattern = %(blocks)s AND c.relkind = 'v' AND EXISTS (
              SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'eql_places'
          )
          UNION ALL
          SELECT format('view_%%s', v.eql_name) FROM {schema}.view_definition v
      )
      OR obj_description(c.oid, 'pg_class') = %(dropped)s
  )
ORDER BY c.relname;

-- captured -- The captured tables: schema, name, name as in SQL, and whether a role may use the schema, may read the table,
-- sees all rows, and has the table's owner as a member. The triggers run as that role if it owns the platform. Without
-- a name, it is the current role.
SELECT DISTINCT n.nspname, c.relname, quote_ident(n.nspname) || '.' || quote_ident(c.relname),
       coalesce(has_schema_privilege(r.oid, n.oid, 'USAGE'), false),
       coalesce(has_table_privilege(r.oid, c.oid, 'SELECT'), false),
       r.rolsuper OR r.rolbypassrls OR NOT c.relrowsecurity
           OR (NOT c.relforcerowsecurity AND pg_has_role(r.oid, c.relowner, 'USAGE')),
       pg_has_role(c.relowner, r.oid, 'MEMBER')
FROM pg_trigger g
JOIN pg_proc f ON f.oid = g.tgfoid AND f.proname = 'capture_changes'
JOIN pg_namespace own ON own.oid = f.pronamespace AND own.nspname = %(schema)s
JOIN pg_class c ON c.oid = g.tgrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_roles r ON r.rolname = coalesce(%(role)s::name, current_user)
ORDER BY 3;

-- functions -- The platform's functions, and the owner of each.
SELECT p.oid::regprocedure::text, pg_get_userbyid(p.proowner)
FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = %(schema)s
WHERE p.proname = ANY (%(functions)s)
ORDER BY 1;

-- schema_owner -- The owner of the platform's schema, and whether that is a superuser or the database's owner.
SELECT o.rolname, o.rolsuper OR o.rolname = 'pg_database_owner'
FROM pg_namespace n JOIN pg_roles o ON o.oid = n.nspowner
WHERE n.nspname = %(schema)s;

-- creators -- The roles that may create objects in the platform's schema, beside its owner, the owner of the platform's
-- tables and superusers. NULL stands for PUBLIC.
SELECT DISTINCT r.rolname
FROM pg_namespace n
CROSS JOIN LATERAL aclexplode(n.nspacl) acl
JOIN pg_class buffer ON buffer.relnamespace = n.oid AND buffer.relname = 'event_buffer'
LEFT JOIN pg_roles r ON r.oid = acl.grantee
WHERE n.nspname = %(schema)s
  AND acl.privilege_type = 'CREATE'
  AND acl.grantee <> n.nspowner
  AND acl.grantee <> buffer.relowner
  AND r.rolsuper IS NOT TRUE
ORDER BY r.rolname NULLS FIRST;

-- deprived_admin -- The admin role, the owner of the platform's tables, if that is another role, and the prefix of the roles.
SELECT a.eql_role, pg_get_userbyid(buffer.relowner), left(a.eql_role, -length('_' || a.eql_kind))
FROM {schema}.access_role a
JOIN pg_roles r ON r.rolname = a.eql_role
JOIN pg_namespace n ON n.nspname = %(schema)s
JOIN pg_class buffer ON buffer.relnamespace = n.oid AND buffer.relname = 'event_buffer' AND buffer.relowner <> r.oid
WHERE a.eql_kind = 'admin';

-- open_functions -- The functions of the platform that run with their owner's rights, and that every role may execute.
SELECT format('%%I.%%I', n.nspname, p.proname)
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = %(schema)s AND p.prosecdef AND has_function_privilege('public', p.oid, 'EXECUTE')
ORDER BY p.proname;

-- foreign_functions -- The functions in the platform's schema whose owner has no rights of the owner of the platform's tables,
-- and both owners.
SELECT format('%%I.%%I(%%s)', n.nspname, p.proname, pg_get_function_identity_arguments(p.oid)), pg_get_userbyid(p.proowner),
       pg_get_userbyid(buffer.relowner)
FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace
JOIN pg_class buffer ON buffer.relnamespace = n.oid AND buffer.relname = 'event_buffer'
WHERE n.nspname = %(schema)s AND NOT pg_has_role(p.proowner, buffer.relowner, 'MEMBER')
ORDER BY 1;

-- unusable -- Existing roles among these names that are logins, or can do more than a group should.
SELECT rolname FROM pg_roles
WHERE rolname = ANY (%(names)s)
  AND (rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls)
ORDER BY rolname;

-- elsewhere -- Whether a role has rights or tables in another database of the server.
SELECT EXISTS (
    SELECT FROM pg_shdepend d JOIN pg_roles r ON r.oid = d.refobjid
    WHERE d.refclassid = 'pg_catalog.pg_authid'::regclass AND r.rolname = %(role)s AND d.dbid <> 0
      AND d.dbid <> (SELECT oid FROM pg_database WHERE datname = current_database())
);

-- granted -- The roles that have rights on one of these tables or on its columns, beside its owner and PUBLIC, and
-- whether they only read.
SELECT r.rolname, bool_and(acl.privilege_type = 'SELECT')
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
CROSS JOIN LATERAL (
    SELECT c.relacl AS rights
    UNION ALL SELECT a.attacl FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL
) found
CROSS JOIN LATERAL aclexplode(found.rights) acl
JOIN pg_roles r ON r.oid = acl.grantee
WHERE c.relname = ANY (%(tables)s) AND r.oid <> c.relowner
GROUP BY r.rolname
ORDER BY r.rolname;

-- without_row_security -- The tables among these that have no row security.
SELECT c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
WHERE c.relname = ANY (%(tables)s) AND NOT c.relrowsecurity
ORDER BY c.relname;
