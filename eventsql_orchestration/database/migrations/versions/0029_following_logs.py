"""An index of the ids of logs, for those who follow them. Writers to logs that exist wait while it is built."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0029"
down_revision = "0028"

_INDEXES = """
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT 'view_' || d.eql_name FROM {schema}.view_definition d WHERE d.eql_kind = 'logs' LOOP
        EXECUTE format('CREATE INDEX ON %I.%I (eql_id)', {literal}, name);
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    run(_INDEXES)
