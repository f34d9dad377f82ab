"""An ordered queue has one index of the messages of a key that are in sight, and none of all of them.

A role that only sends parks its messages behind others of their key, too.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0043"
down_revision = "0042"

# Each receive wrote four indexes anew, and looked for a message in two of them. A message in sight is seldom beside
# another one of its key, so a look at those in sight is short, however many are parked. Received messages come first in
# the index: whether one of them is still held is a look at them alone.
_INDEXES = """
CREATE INDEX queue_message_in_sight ON {schema}.queue_message (eql_queue, eql_key, eql_receipt, eql_id)
    WHERE eql_in_order AND eql_visible_at < 'infinity';
DROP INDEX {schema}.queue_message_in_order, {schema}.queue_message_held_in_order;
"""

# Rights that were given by hand on the messages go on to be enough.
_KEEP_RIGHTS = """
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner AND acl.privilege_type = 'INSERT'
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.lock_last_of_keys(integer, text[]) TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_INDEXES)
    install("queue_sending", "queue_receiving")
    run(_KEEP_RIGHTS)
