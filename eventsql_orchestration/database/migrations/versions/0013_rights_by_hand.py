"""Logins that were given rights by hand before there were roles get the rights that newer statements need."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0013"
down_revision = "0012"

# A login that takes events out of the buffer compares the ids of a log with offsets and layouts, and asks for segments.
# A login that may update a column of `topic` could lock its rows for an outbox; revision 0012 saw only rights on the
# whole table.
_KEEP_RIGHTS = """
DO $$
DECLARE
    given text;
    grantee text;
BEGIN
    FOR given, grantee IN
        SELECT DISTINCT needed.given,
               CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM (VALUES ('{schema}.event_buffer'::regclass, 'DELETE',
                      'SELECT (eql_topic, eql_last_event_id) ON {schema}.consumer'),
                     ('{schema}.event_buffer', 'DELETE', 'SELECT (eql_topic, eql_after) ON {schema}.topic_layout'),
                     ('{schema}.event_buffer', 'DELETE',
                      'EXECUTE ON FUNCTION {schema}.ensure_segments(text, bigint, integer)'),
                     ('{schema}.topic', 'UPDATE', 'EXECUTE ON FUNCTION {schema}.hold_topics(text[])'))
             AS needed (tbl, had, given)
        JOIN pg_catalog.pg_class c ON c.oid = needed.tbl
        CROSS JOIN LATERAL (
            SELECT c.relacl AS rights
            UNION ALL SELECT a.attacl FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL
        ) found
        CROSS JOIN LATERAL aclexplode(found.rights) acl
        WHERE acl.privilege_type = needed.had AND acl.grantee <> c.relowner
          AND NOT EXISTS (SELECT FROM {schema}.access_role a WHERE a.eql_role = pg_get_userbyid(acl.grantee))
    LOOP
        EXECUTE 'GRANT ' || given || ' TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_KEEP_RIGHTS)
