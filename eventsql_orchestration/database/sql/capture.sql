-- part hides_rows -- Whether the row security of a table binds the platform's owner.
c.relrowsecurity AND (c.relforcerowsecurity OR NOT pg_has_role(f.proowner, c.relowner, 'USAGE'))
    AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = f.proowner AND (r.rolsuper OR r.rolbypassrls))

-- table -- A table to be captured: its oid, schema, name, kind, persistence; whether it is a partition or has
-- inheritance; whether it is a table of the system; its owner, the platform's owner, and whether the
-- table's owner is a member of the platform's; its primary key; whether the platform's owner may read it, and whether its
-- row security binds that owner; its name as in SQL.
SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relpersistence::text,
       c.relispartition OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid OR i.inhparent = c.oid),
       n.nspname = ANY (ARRAY['pg_catalog', 'information_schema', 'pg_toast']),
       pg_get_userbyid(c.relowner), pg_get_userbyid(f.proowner), pg_has_role(c.relowner, f.proowner, 'MEMBER'),
       ARRAY(
           SELECT a.attname
           FROM pg_index i
           CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (number, place)
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number
           WHERE i.indrelid = c.oid AND i.indisprimary
           ORDER BY k.place
       )::text[],
       has_table_privilege(f.proowner, c.oid, 'SELECT') AND has_schema_privilege(f.proowner, n.oid, 'USAGE'),
       {hides_rows},
       quote_ident(n.nspname) || '.' || quote_ident(c.relname)
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc f ON f.proname = 'capture_changes' AND f.pronamespace = '{schema}'::regnamespace
WHERE c.oid = to_regclass(%(table)s);

-- columns -- The columns of a table: name, number, whether it is a virtual generated column, and whether it cannot be part
-- of a key: equal values may have different texts, or the type is not the system's.
SELECT a.attname, a.attnum, a.attgenerated = 'v',
       {schema}.capture_type(a.atttypid) >= 16384 OR coalesce(NOT k.collisdeterministic, false)
FROM pg_attribute a
LEFT JOIN pg_collation k ON k.oid = a.attcollation
WHERE a.attrelid = %(relation)s::oid AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;

-- start_snapshot -- Begin the snapshot of a capture that was made without one.
UPDATE {schema}.capture SET eql_snapshot = 'running' WHERE eql_id = %(capture)s AND eql_snapshot = 'none';

-- insert_capture -- Note a capture; gives its id and the number of this transaction.
INSERT INTO {schema}.capture
    (eql_topic, eql_relation, eql_table, eql_key_names, eql_key_numbers, eql_column_names, eql_column_numbers,
     eql_snapshot)
VALUES (%(topic)s, %(relation)s::oid, %(name)s, %(key_names)s, %(key_numbers)s::smallint[], %(column_names)s,
        %(column_numbers)s::smallint[], %(snapshot)s)
RETURNING eql_id, pg_current_xact_id()::text;

-- taken -- Whether a table has a trigger of this name. Another installation's captures have numbers of their own.
SELECT EXISTS (SELECT FROM pg_trigger g WHERE g.tgrelid = %(relation)s::oid AND g.tgname = %(trigger)s);

-- give_number_back -- Forget a capture that has just been noted, and has no trigger yet.
DELETE FROM {schema}.capture WHERE eql_id = %(capture)s;

-- missing -- Why a new capture cannot tell the rows of its table apart; NULL if it can. Since PostgreSQL 18, a column counts
-- as NOT NULL although its constraint is NOT VALID: older rows may be NULL.
SELECT coalesce(part.missing, CASE WHEN EXISTS (
    SELECT FROM pg_constraint n
    WHERE n.conrelid = captured.eql_relation AND n.contype = 'n' AND NOT n.convalidated
      AND n.conkey && captured.eql_key_numbers
) THEN 'has no unique key on ' || array_to_string(captured.eql_key_names, ', ') END)
FROM {schema}.capture captured
CROSS JOIN LATERAL {schema}.capture_columns(captured, captured.eql_relation) part
WHERE captured.eql_id = %(capture)s;

-- page -- Publish the next rows of a first snapshot; gives their number, NULL if the snapshot is complete.
SELECT {schema}.capture_page(%(capture)s, %(most)s, %(waiting)s);

-- part triggers -- The triggers of captures, each with the arguments that it was made with. Each statement decodes
-- them once.
WITH triggers AS MATERIALIZED (
    SELECT g.oid, g.tgrelid, g.tgname, g.tgenabled, string_to_array(encode(g.tgargs, 'escape'), E'\\000') AS arguments
    FROM pg_trigger g
    JOIN pg_proc f ON f.oid = g.tgfoid AND f.proname = 'capture_changes' AND f.pronamespace = '{schema}'::regnamespace
)

-- part relation -- The table of a capture, found by its triggers: a restored dump gives the table another oid. If somebody
-- has copied the triggers to another table, the one with the noted name counts.
coalesce(
    (
        SELECT g.tgrelid
        FROM triggers g JOIN pg_class t ON t.oid = g.tgrelid JOIN pg_namespace n ON n.oid = t.relnamespace
        WHERE g.arguments[1] = captured.eql_id::text
        ORDER BY quote_ident(n.nspname) || '.' || quote_ident(t.relname) <> captured.eql_table LIMIT 1
    ), captured.eql_relation
)

-- part key_types -- The types and collations of a capture's key. They order the pages of its snapshot.
(SELECT coalesce(string_agg(format_type(a.atttypid, NULL) || ' ' || a.attcollation::text, ', ' ORDER BY known.place), '')
 FROM unnest(captured.eql_key_names, captured.eql_key_numbers) WITH ORDINALITY AS known (name, number, place)
 JOIN pg_attribute a ON a.attrelid = {relation} AND a.attnum > 0 AND NOT a.attisdropped AND CASE
     WHEN a.attrelid = captured.eql_relation THEN a.attnum = known.number ELSE a.attname = known.name
 END)

-- page_types -- The types of the key when the last page of a first snapshot was read, if they are noted.
SELECT eql_snapshot_after[cardinality(eql_key_names) + 1] FROM {schema}.capture WHERE eql_id = %(capture)s FOR UPDATE;

-- note_types -- Note the types of the key beside the place of a page that was read. If they differ from the types
-- before the page, the snapshot begins anew, and this gives true: the rows have another order now.
{triggers}
UPDATE {schema}.capture c
SET eql_snapshot = CASE WHEN now.others THEN 'running' ELSE c.eql_snapshot END,
    eql_snapshot_after = CASE WHEN NOT now.others THEN c.eql_snapshot_after || now.types END,
    eql_snapshot_rows = CASE WHEN now.others THEN 0 ELSE c.eql_snapshot_rows END
FROM (
    SELECT captured.eql_id, found.types, coalesce(found.types <> %(types)s, false) AS others
    FROM {schema}.capture captured
    CROSS JOIN LATERAL (SELECT {key_types} AS types) found
    WHERE captured.eql_id = %(capture)s
) now
WHERE c.eql_id = now.eql_id AND (now.others OR c.eql_snapshot = 'running')
RETURNING now.others;

-- existing -- The capture of a table to a topic: id, whether it knows the table by its oid, names and numbers of the key
-- and of the columns, and the names of dropped columns. Numbers of dropped columns are left out.
{triggers}
SELECT captured.eql_id, captured.eql_relation = %(relation)s::oid, captured.eql_key_names, captured.eql_key_numbers,
       captured.eql_column_names, CASE WHEN captured.eql_column_numbers IS NOT NULL THEN ARRAY(
           SELECT known.number
           FROM unnest(captured.eql_column_numbers) WITH ORDINALITY AS known (number, place)
           WHERE NOT EXISTS (
               SELECT FROM pg_attribute a
               WHERE a.attrelid = captured.eql_relation AND a.attnum = known.number AND a.attisdropped
           )
           ORDER BY known.place
       ) END, ARRAY(
           SELECT known.name
           FROM unnest(captured.eql_column_names, captured.eql_column_numbers) AS known (name, number)
           JOIN pg_attribute a
               ON a.attrelid = captured.eql_relation AND a.attnum = known.number AND a.attisdropped
       )
FROM {schema}.capture captured
WHERE captured.eql_topic = %(topic)s AND {relation} = %(relation)s::oid;

-- note_columns -- Note the table of a capture, and its columns, as they are now. Nothing is written if the notes are
-- right already.
UPDATE {schema}.capture
SET eql_relation = %(relation)s::oid, eql_table = %(name)s, eql_key_names = %(key_names)s,
    eql_key_numbers = %(key_numbers)s::smallint[], eql_column_names = %(column_names)s,
    eql_column_numbers = %(column_numbers)s::smallint[]
WHERE eql_id = %(capture)s AND NOT EXISTS (
    SELECT eql_relation, eql_table, eql_key_names, eql_key_numbers, eql_column_names, eql_column_numbers
    INTERSECT
    SELECT %(relation)s::oid, %(name)s::text, %(key_names)s::text[], %(key_numbers)s::smallint[],
           %(column_names)s::text[], %(column_numbers)s::smallint[]
);

-- delete_capture -- Forget the capture of a table to a topic, by its oid or, if it is gone, by its name.
{triggers}
DELETE FROM {schema}.capture captured
WHERE eql_topic = %(topic)s AND (
    {relation} = %(relation)s::oid
    OR (eql_table = %(name)s AND NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = {relation}))
);

-- part names_now of kind -- The names that a capture's columns have now, without dropped columns. The columns of a restored
-- table are known by their names, and keep them.
ARRAY(
    SELECT coalesce(a.attname::text, known.name)
    FROM unnest(captured.eql_{kind}_names, captured.eql_{kind}_numbers) WITH ORDINALITY AS known (name, number, place)
    LEFT JOIN pg_attribute a
        ON a.attrelid = c.oid AND c.oid = captured.eql_relation AND a.attnum = known.number
    WHERE a.attisdropped IS NOT TRUE
    ORDER BY known.place
)

-- list -- The captures: id, table as in SQL, topic, key and columns as they are called now, state of the snapshot, its rows, time
-- of creation, whether the table exists, the columns that a restored table lacks, whether the table is a restored one or has
-- renamed or dropped columns, how many of its four triggers would run, whether the table is a partition or has inheritance,
-- whether a crash empties it, whether a subscription writes to it, whether it lacks its unique key, the columns that were
-- dropped and added again, the role as which its triggers run, whether that role may read it, its owner if the owner is
-- not a member of that role, whether row security binds that role, and its noted name if another table has that name and
-- is not captured to the topic.
{triggers}
SELECT captured.eql_id, coalesce(quote_ident(c.nspname) || '.' || quote_ident(c.relname), captured.eql_table), captured.eql_topic,
       now.key, now.columns, captured.eql_snapshot, captured.eql_snapshot_rows,
       captured.eql_created_at, c.relname IS NOT NULL, ARRAY(
           SELECT known.name FROM unnest(captured.eql_key_names || captured.eql_column_names) AS known (name)
           WHERE c.oid <> captured.eql_relation AND NOT EXISTS (
               SELECT FROM pg_attribute a
               WHERE a.attrelid = c.oid AND a.attname = known.name AND a.attnum > 0 AND NOT a.attisdropped
           )
       ),
       coalesce(c.oid <> captured.eql_relation, false) OR now.key <> captured.eql_key_names
           OR coalesce(now.columns <> captured.eql_column_names, false),
       (
           SELECT count(*) FROM triggers g
           WHERE g.tgrelid = c.oid AND g.arguments[1] = captured.eql_id::text AND g.tgenabled::text = ANY (ARRAY['O', 'A'])
       ),
       EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid OR i.inhparent = c.oid),
       c.relpersistence::text = 'u', EXISTS (SELECT FROM pg_subscription_rel s WHERE s.srrelid = c.oid), NOT EXISTS (
           SELECT FROM pg_index i
           WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid
             AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indnkeyatts = cardinality(captured.eql_key_names)
             AND NOT EXISTS (
                 SELECT FROM pg_attribute a
                 WHERE a.attrelid = c.oid AND a.attnum = ANY ((i.indkey::smallint[])[0:i.indnkeyatts - 1])
                   AND NOT (a.attnotnull AND a.attname = ANY (now.key))
             )
       ), ARRAY(
           SELECT again.attname::text
           FROM unnest(captured.eql_column_names, captured.eql_column_numbers) WITH ORDINALITY AS known (name, number, place)
           JOIN pg_attribute gone ON gone.attrelid = c.oid AND gone.attnum = known.number AND gone.attisdropped
           JOIN pg_attribute again ON again.attrelid = c.oid AND again.attname = known.name AND NOT again.attisdropped
           WHERE c.oid = captured.eql_relation AND again.attnum <> ALL (captured.eql_column_numbers)
           ORDER BY known.place
       ),
       pg_get_userbyid(f.proowner),
       has_schema_privilege(f.proowner, c.namespace, 'USAGE') AND has_table_privilege(f.proowner, c.oid, 'SELECT'),
       CASE WHEN NOT pg_has_role(c.relowner, f.proowner, 'MEMBER') THEN pg_get_userbyid(c.relowner) END,
       {hides_rows}, (
           SELECT captured.eql_table
           FROM pg_class other JOIN pg_namespace n ON n.oid = other.relnamespace
           WHERE n.nspname = (parse_ident(captured.eql_table))[1] AND other.relname = (parse_ident(captured.eql_table))[2]
             AND other.oid <> c.oid AND other.relkind::text = ANY (ARRAY['r', 'p'])
             AND NOT EXISTS (
                 SELECT FROM triggers g WHERE g.tgrelid = other.oid AND g.arguments[3] = captured.eql_topic
             )
       )
FROM {schema}.capture captured
LEFT JOIN (
    SELECT c.oid, n.oid AS namespace, n.nspname, c.relname, c.relowner, c.relpersistence, c.relrowsecurity,
           c.relforcerowsecurity
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
) c ON c.oid = {relation}
JOIN pg_proc f ON f.proname = 'capture_changes' AND f.pronamespace = '{schema}'::regnamespace
CROSS JOIN LATERAL (
    SELECT {names_now of key} AS key,
           CASE WHEN captured.eql_column_names IS NOT NULL THEN {names_now of column} END AS columns
) now
ORDER BY 2, 3;

-- triggers_of -- The triggers of captures of a table to a topic, whether the capture still exists or not.
{triggers}
SELECT g.tgname FROM triggers g WHERE g.tgrelid = %(relation)s::oid AND g.arguments[3] = %(topic)s ORDER BY 1;

-- idle_triggers -- Tables with triggers of captures that do not exist any more, which do nothing: table, topic.
{triggers}
SELECT DISTINCT quote_ident(n.nspname) || '.' || quote_ident(c.relname), g.arguments[3]
FROM triggers g
JOIN pg_class c ON c.oid = g.tgrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE NOT EXISTS (SELECT FROM {schema}.capture captured WHERE captured.eql_id::text = g.arguments[1])
ORDER BY 1, 2;

-- captured_tables -- The tables that are captured to a topic.
SELECT eql_table FROM {schema}.capture WHERE eql_topic = %(topic)s ORDER BY eql_table;

-- any_capture -- A capture of this database, if there is one: table and topic.
SELECT eql_table, eql_topic FROM {schema}.capture LIMIT 1;
