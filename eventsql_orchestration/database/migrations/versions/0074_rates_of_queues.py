"""The statistics of a queue have rates, which come from its archive: a reader of messages may read the times there."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0074"
down_revision = "0073"

# Rights that were given by hand on the messages go on to be enough. The migration then grants what the roles need.
_KEEP_RIGHTS = """
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner AND acl.privilege_type = 'SELECT'
    LOOP
        EXECUTE 'GRANT SELECT (eql_queue, eql_created_at, eql_acknowledged_at, eql_expires_at) '
                'ON {schema}.queue_archive TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_KEEP_RIGHTS)
