-- ownership -- The owner of the platform's tables, whether there are roles, and whether the current role is another and
-- may become it.
SELECT pg_get_userbyid(c.relowner),
       EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = %(trigger)s),
       pg_get_userbyid(c.relowner) <> current_user AND pg_has_role(c.relowner, 'MEMBER')
FROM pg_class c
WHERE c.oid = to_regclass(%(buffer)s);

-- roles -- The roles of this installation: name, kind, topic, and which roles are members of each.
SELECT a.eql_role, a.eql_kind, a.eql_topic,
       ARRAY(
           SELECT pg_get_userbyid(m.member)
           FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid
           WHERE r.rolname = a.eql_role
           ORDER BY 1
       )
FROM {schema}.access_role a
ORDER BY array_position(%(kinds)s::text[], a.eql_kind), a.eql_topic NULLS FIRST;

-- logs -- Each topic, the schema and table of its log, the sequence of the ids, and the view of a log in blocks.
SELECT t.eql_name, n.nspname, c.relname,
       pg_get_serial_sequence(format('%%I.%%I', n.nspname, c.relname), 'eql_id'),
       CASE WHEN t.eql_storage = 'blocks' THEN format(%(log)s, lower(t.eql_name COLLATE "C")) END
FROM {schema}.topic t
JOIN pg_class c ON c.relname = format(
    CASE WHEN t.eql_storage = 'blocks' THEN %(blocks)s ELSE %(log)s END, lower(t.eql_name COLLATE "C")
)
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
WHERE %(topics)s::text[] IS NULL OR t.eql_name = ANY (%(topics)s)
ORDER BY t.eql_name;

-- tables -- The platform's tables, with the logs and views, and the partitions of all: schema, name, owner, whether that
-- is a superuser.
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
          FROM {schema}.topic t CROSS JOIN unnest(ARRAY[%(log)s, %(blocks)s]) AS pattern
          WHERE pattern = %(log)s OR t.eql_storage = 'blocks'
          UNION ALL
          SELECT format('view_%%s', v.eql_name) FROM {schema}.view_definition v
      )
      OR obj_description(c.oid, 'pg_class') = %(dropped)s
  )
ORDER BY c.relname;

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

-- unusable -- Existing roles among these names that are logins, or can do more than a group should.
SELECT rolname FROM pg_roles
WHERE rolname = ANY (%(names)s)
  AND (rolcanlogin OR rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls)
ORDER BY rolname;

-- granted -- The roles that have rights on one of these tables or on its columns, beside its owner and PUBLIC.
SELECT DISTINCT r.rolname
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = %(schema)s
CROSS JOIN LATERAL (
    SELECT c.relacl AS rights
    UNION ALL SELECT a.attacl FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL
) found
CROSS JOIN LATERAL aclexplode(found.rights) acl
JOIN pg_roles r ON r.oid = acl.grantee
WHERE c.relname = ANY (%(tables)s) AND r.oid <> c.relowner
ORDER BY r.rolname;
