"""Readers see how tables are captured, and no key of a row."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0048"
down_revision = "0047"

# After its revisions, a migration gives each role the rights that it lacks: here those on columns.
_REVOKE = """
DO $$
DECLARE
    reader name;
BEGIN
    FOR reader IN
        SELECT r.rolname FROM access_role a JOIN pg_roles r ON r.rolname = a.eql_role WHERE a.eql_kind = 'reader'
    LOOP
        EXECUTE format('REVOKE SELECT ON capture FROM %I', reader);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_REVOKE)
