"""A role that reads rows of a topic changes none of them with the rights of a role of another topic."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0077"
down_revision = "0076"

# After the revisions, the migration turns row security on again, with the policies of this version.
_TURN_OFF = """
DO $$
DECLARE
    protected text;
BEGIN
    FOR protected IN
        SELECT c.relname FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace AND n.nspname = {literal}
        WHERE c.relrowsecurity
          AND c.relname = ANY (
              ARRAY['consumer', 'consumer_claim', 'consumer_cursor', 'consumer_delivery', 'consumer_worker']
          )
          AND EXISTS (
              SELECT FROM {schema}.access_role a JOIN pg_catalog.pg_roles r ON r.rolname = a.eql_role
              WHERE a.eql_topic IS NOT NULL AND a.eql_kind <> 'publisher'
          )
    LOOP
        EXECUTE format('ALTER TABLE {schema}.%I DISABLE ROW LEVEL SECURITY', protected);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_TURN_OFF)
