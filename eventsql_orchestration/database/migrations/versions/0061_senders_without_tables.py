"""A sender writes messages by functions alone, which check them: it holds no other sender or receiver up."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0061"
down_revision = "0060"

# Each rule is one of `NewMessage`, on which receivers rely; a login with a sender's rights could break it. A message
# that breaks a rule gets the nearest value that keeps it. Only a message that waits for another one of its key is at
# infinity.
_RULES = """
UPDATE {schema}.queue_message
SET eql_priority = greatest(0, least(9, eql_priority)),
    eql_in_order = eql_in_order AND eql_key IS NOT NULL,
    eql_visible_at = CASE
        WHEN eql_in_order AND eql_key IS NOT NULL AND eql_visible_at = 'infinity' THEN eql_visible_at
        ELSE greatest('0001-01-01 00:00+00', least('9999-12-31 00:00+00', eql_visible_at)) END,
    eql_due_at = CASE WHEN eql_due_at IS NOT NULL
        THEN greatest('0001-01-01 00:00+00', least('9999-12-31 00:00+00', eql_due_at)) END
WHERE eql_priority < 0 OR eql_priority > 9 OR eql_in_order AND eql_key IS NULL
   OR eql_visible_at < '0001-01-01 00:00+00' OR eql_due_at < '0001-01-01 00:00+00'
   OR eql_visible_at >= '10000-01-01 00:00+00' AND NOT (eql_visible_at = 'infinity' AND eql_in_order)
   OR eql_due_at >= '10000-01-01 00:00+00';
"""

# `put_messages` has its owner's rights now. Roles that may insert every column of a message keep sending. The migration
# then grants to senders what they need.
_RIGHTS = """
DO $$
DECLARE
    put text := '{schema}.put_messages(integer, bytea[], text[], text[], integer[], timestamptz[], double precision[], '
                'text[], boolean)';
    grantee text;
BEGIN
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', put);
    FOR grantee IN
        SELECT DISTINCT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner AND acl.privilege_type = 'INSERT'
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', put, grantee);
    END LOOP;
    FOR grantee IN
        SELECT quote_ident(r.rolname) FROM {schema}.access_role a JOIN pg_catalog.pg_roles r ON r.rolname = a.eql_role
        WHERE a.eql_kind = 'sender'
    LOOP
        EXECUTE format('REVOKE ALL ON {schema}.queue_message, {schema}.queue_deduplication FROM %s', grantee);
        EXECUTE format('REVOKE ALL ON SEQUENCE {schema}.queue_message_eql_id_seq FROM %s', grantee);
        EXECUTE format('REVOKE ALL ON FUNCTION {schema}.lock_last_of_keys(integer, text[]) FROM %s', grantee);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_RULES)
    install("queue_sending")
    run(_RIGHTS)
