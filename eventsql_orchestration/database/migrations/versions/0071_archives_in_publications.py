"""A queue with an archive is deleted although a publication has all tables: an archive's rows have an identity."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0071"
down_revision = "0070"

_IDENTITIES = """
DO $$
DECLARE
    part regclass;
BEGIN
    FOR part IN SELECT inhrelid FROM pg_catalog.pg_inherits WHERE inhparent = 'queue_archive'::regclass LOOP
        EXECUTE format('ALTER TABLE %s REPLICA IDENTITY FULL', part);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_IDENTITIES)
    install("queue_settling")
