"""Roles with the least rights that each needs, and the functions that do for a role what it has no rights to do."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0012"
down_revision = "0011"

_ROLES = """
CREATE TABLE {schema}.access_role (
    eql_role text PRIMARY KEY,
    eql_kind text NOT NULL CONSTRAINT access_role_kind
        CHECK (eql_kind IN ('admin', 'transfer', 'publisher', 'stager', 'consumer', 'reader')),
    eql_topic text
);
"""

# Rights that were given by hand before there were roles go on to be enough: an outbox needed UPDATE on `topic`, a
# consumer DELETE on its rows.
_KEEP_RIGHTS = """
DO $$
DECLARE
    function text;
    grantee text;
BEGIN
    FOR function, grantee IN
        SELECT DISTINCT needed.function,
               CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM (VALUES ('{schema}.topic'::regclass, 'UPDATE', '{schema}.hold_topics(text[])'),
                     ('{schema}.consumer', 'DELETE', '{schema}.enter_layout(text, text)'))
             AS needed (tbl, had, function)
        JOIN pg_catalog.pg_class c ON c.oid = needed.tbl
        CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE acl.privilege_type = needed.had
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION ' || function || ' TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_ROLES)
    install("publishing", "log", "layouts")
    run(_KEEP_RIGHTS)
